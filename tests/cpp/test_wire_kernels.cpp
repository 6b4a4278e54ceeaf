// The wire format's CUDA kernels, emulated, against serial encoders, under every schedule, and what a decoder refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "schedules.h"
#include "sparse/checksum_kernels.cuh"
#include "sparse/decode_kernels.cuh"

namespace moe_ext::wire {
namespace {

struct Case {
  int64_t numel;
  int64_t count;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.count << " of " << c.numel;
}

std::vector<int64_t> ascending(const Case& c) {
  std::mt19937_64 generator(static_cast<uint64_t>(c.numel + c.count));
  std::vector<int64_t> indices;
  if (c.numel < 1000000) {
    std::vector<int64_t> all(c.numel);
    std::iota(all.begin(), all.end(), 0);
    std::sample(all.begin(), all.end(), std::back_inserter(indices), c.count, generator);
    return indices;
  }
  while (static_cast<int64_t>(indices.size()) < c.count) {
    indices.push_back(static_cast<int64_t>(generator() % static_cast<uint64_t>(c.numel)));
    std::sort(indices.begin(), indices.end());
    indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  }
  return indices;
}

std::vector<uint8_t> serial_indices(IndexCodec codec, const std::vector<int64_t>& indices, int64_t numel) {
  std::vector<uint8_t> out;
  const auto append = [&](uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) {
      out.push_back(static_cast<uint8_t>(value >> 8 * i));
    }
  };
  if (codec == IndexCodec::kBitmap) {
    out.resize(ceil_div(numel, int64_t{8}));
    for (const int64_t i : indices) {
      out[i / 8] |= static_cast<uint8_t>(1 << i % 8);
    }
  } else if (codec == IndexCodec::kU16) {
    for (int64_t run = 0; run * kRun < numel; ++run) {
      append(std::count_if(indices.begin(), indices.end(), [&](int64_t i) { return i / kRun == run; }), 4);
    }
    for (const int64_t i : indices) {
      append(i % kRun, 2);
    }
  } else {
    int64_t last = -1;
    for (const int64_t i : indices) {
      uint64_t gap = static_cast<uint64_t>(i - last - 1);
      for (; gap >= 128; gap >>= 7) {
        append(gap | 128, 1);
      }
      append(gap, 1);
      last = i;
    }
  }
  return out;
}

// At an address that vectors fit, with room for the padding.
struct alignas(16) Line {
  uint8_t bytes[16];
};

std::vector<Line> lines(const std::vector<uint8_t>& bytes, uint8_t fill) {
  std::vector<Line> out(ceil_div(bytes.size(), size_t{16}) + 1);
  std::fill_n(out[0].bytes, 16 * out.size(), fill);
  std::copy(bytes.begin(), bytes.end(), out[0].bytes);
  return out;
}

std::vector<uint8_t> encoded(IndexCodec codec, const std::vector<int64_t>& indices, int64_t numel, int64_t size) {
  const int64_t count = static_cast<int64_t>(indices.size());
  std::vector<Line> out = lines(std::vector<uint8_t>(size), 0xAA);
  uint8_t* const bytes = out[0].bytes;
  if (codec == IndexCodec::kDelta) {
    std::vector<int64_t> sizes(num_segments(count) + 1);
    int64_t total = 0;
    launch_place_gaps(indices.data(), count, sizes.data(), &total, nullptr);
    EXPECT_EQ(total, size);
    launch(over_segments(count, nullptr), encode_delta_kernel, indices.data(), count, sizes.data(), bytes);
  } else {
    launch_encode_indices(codec, indices.data(), count, numel, size, bytes, nullptr);
    EXPECT_EQ(std::count(bytes + size, bytes + aligned(size), 0), static_cast<int64_t>(aligned(size)) - size);
  }
  return {bytes, bytes + size};
}

struct Decoded {
  std::vector<int64_t> indices;
  int64_t wrong = -1;
};

Decoded decoded(IndexCodec codec, const std::vector<uint8_t>& bytes, int64_t count, int64_t numel) {
  const std::vector<Line> in = lines(bytes, 0xFF);
  Decoded out{std::vector<int64_t>(count)};
  unsigned long long wrong = 0;
  const int64_t size = static_cast<int64_t>(bytes.size());
  std::vector<uint64_t> scratch(num_decode_longs(codec, size, count, numel));
  launch_decode_indices(codec, {in[0].bytes, size, count, numel, out.indices.data(), &wrong}, scratch.data(), nullptr);
  out.wrong = wrong == 0 ? -1 : static_cast<int64_t>(kWrongFrom - wrong);
  return out;
}

constexpr IndexCodec kCodecs[] = {IndexCodec::kBitmap, IndexCodec::kU16, IndexCodec::kDelta};

class Indices : public simt::ScheduleTest<Case> {};

TEST_P(Indices, AreEncodedAndComeBack) {
  const Case c = param();
  const std::vector<int64_t> indices = ascending(c);
  for (const IndexCodec codec : kCodecs) {
    if (c.numel > 1000000 && codec != IndexCodec::kDelta) {
      continue;
    }
    const std::vector<uint8_t> bytes = serial_indices(codec, indices, c.numel);
    if (c.count > 0) {
      EXPECT_EQ(encoded(codec, indices, c.numel, static_cast<int64_t>(bytes.size())), bytes);
    }
    const Decoded back = decoded(codec, bytes, c.count, c.numel);
    EXPECT_EQ(back.indices, indices);
    EXPECT_EQ(back.wrong, -1);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Indices,
    simt::under_all_schedules<Case>(
        {{1, 0}, {1, 1}, {9, 4}, {300, 300}, {65537, 100}, {200000, 3000}, {int64_t{1} << 61, 1500}}));

TEST(Indices, OfAnyBytesAreInOrderOrRefused) {
  std::mt19937 generator(1);
  const Case c{70000, 90};
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    const IndexCodec codec = kCodecs[round % 3];
    std::vector<uint8_t> bytes = serial_indices(codec, ascending(c), c.numel);
    for (int edit = 0; edit < 1 + round % 4; ++edit) {
      bytes[generator() % bytes.size()] = static_cast<uint8_t>(generator());
    }
    const Decoded out = decoded(codec, bytes, c.count, c.numel);
    refused += out.wrong >= 0;
    if (out.wrong < 0) {
      EXPECT_EQ(serial_indices(codec, out.indices, c.numel), bytes);
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(Indices, NamesTheFirstThatIsWrong) {
  EXPECT_EQ(decoded(IndexCodec::kDelta, {5, 0, 127}, 3, 100).wrong, 2);
  EXPECT_EQ(decoded(IndexCodec::kDelta, {5, 0x80, 0, 1}, 3, 100).wrong, 1);
  EXPECT_EQ(decoded(IndexCodec::kDelta, {5, 0, 0x80}, 3, 100).wrong, 2);
  EXPECT_EQ(decoded(IndexCodec::kU16, {2, 0, 0, 0, 9, 0, 9, 0}, 2, 100).wrong, 1);
  EXPECT_EQ(decoded(IndexCodec::kU16, {1, 0, 0, 0, 9, 0, 10, 0}, 2, 100).wrong, 1);
  EXPECT_EQ(decoded(IndexCodec::kBitmap, {0x81, 0x02}, 3, 9).wrong, 2);
}

TEST(Indices, TrapsThoseThatDoNotAscend) {
  for (const std::vector<int64_t>& indices : {std::vector<int64_t>{3, 3}, {4, 3}, {-1, 3}, {3, 10}}) {
    const auto check = [&] {
      launch(over_threads(2, nullptr), check_ascending_kernel, indices.data(), int64_t{2}, int64_t{10});
    };
    EXPECT_THROW(check(), simt::Error);
  }
}

class Checksum : public simt::ScheduleTest<int64_t> {};

TEST_P(Checksum, IsCrc32c) {
  std::mt19937 generator(7);
  std::vector<uint8_t> bytes(param());
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<uint8_t>(generator()); });
  const int64_t skipped = param() / 3;
  uint32_t crc = ~0u;
  for (int64_t i = 0; i < param(); ++i) {
    crc ^= i >= skipped && i < skipped + 4 ? 0u : bytes[i];
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    }
  }
  std::vector<uint32_t> partial(num_checksum_words(param()));
  uint32_t out = 0;
  launch_checksum(bytes.data(), param(), skipped, partial.data(), &out, nullptr);
  EXPECT_EQ(out, ~crc);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Checksum, simt::under_all_schedules<int64_t>({5, 64, 1024, 1025, 5000, 1200000}));

TEST(Copy, PadsWithZeros) {
  for (const int64_t size : {1, 15, 16, 17, 5000}) {
    for (const int64_t offset : {0, 1}) {
      for (const int64_t padded : {size, static_cast<int64_t>(aligned(size))}) {
        std::vector<uint8_t> from(size + offset, 3), expected(padded, 3);
        std::fill(expected.begin() + size, expected.end(), 0);
        std::vector<Line> to = lines(std::vector<uint8_t>(padded), 7);
        launch_copy_padded(from.data() + offset, size, to[0].bytes, padded, nullptr);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to[0].bytes));
        EXPECT_EQ(to[0].bytes[padded], 7);
      }
    }
  }
}

} // namespace
} // namespace moe_ext::wire
