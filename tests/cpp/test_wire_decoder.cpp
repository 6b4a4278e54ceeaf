// The payload decoder on damaged, foreign and truncated bytes, also under AddressSanitizer and
// UndefinedBehaviorSanitizer: a payload lies in memory of exactly its size, so that one byte read past the end ends the
// test.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "sparse/wire_codec.h"

namespace moe_ext::wire {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes encoded(IndexCodec index, ValueCodec value, const std::vector<int64_t>& indices, int64_t numel) {
  const int64_t count = index == IndexCodec::kDense ? numel : static_cast<int64_t>(indices.size());
  const Bytes packed = encode_indices(index, indices.data(), static_cast<int64_t>(indices.size()), numel);
  Header h{};
  h.magic = kMagic;
  h.version = kVersion;
  h.index_codec = static_cast<uint8_t>(index);
  h.value_codec = static_cast<uint8_t>(value);
  h.value_block = has_scales(value) ? 64 : 0;
  h.numel = static_cast<uint64_t>(numel);
  h.count = static_cast<uint64_t>(count);
  h.index_bytes = packed.size();
  h.code_bytes = code_bytes(value, h.count);
  h.num_scales = num_scales(value, h.count, h.value_block);
  const Layout layout = layout_of(h.index_bytes, h.code_bytes, h.num_scales);
  h.total_bytes = layout.end;
  Bytes out(layout.end);
  std::memcpy(out.data(), &h, sizeof(h));
  std::copy(packed.begin(), packed.end(), out.begin() + static_cast<int64_t>(layout.indices));
  return out;
}

enum class Verdict { kRefused, kDecoded };

// As the operator does, with the result in memory of exactly its size.
Verdict decode(const Bytes& bytes, std::vector<int64_t>* result = nullptr) {
  if (bytes.size() < sizeof(Header)) {
    return Verdict::kRefused;
  }
  const std::unique_ptr<uint8_t[]> payload(new uint8_t[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), payload.get());
  Header h;
  std::memcpy(&h, payload.get(), sizeof(h));
  if (h.magic != kMagic || h.version != kVersion || h.index_codec >= kNumIndexCodecs ||
      h.value_codec >= kNumValueCodecs || h.flags > kHasChecksum || h.total_bytes != bytes.size() ||
      !is_consistent(h, bytes.size())) {
    return Verdict::kRefused;
  }
  if ((h.flags & kHasChecksum) != 0 && checksum_of(h, payload.get()) != h.checksum) {
    return Verdict::kRefused;
  }
  const Layout layout = layout_of(h.index_bytes, h.code_bytes, h.num_scales);
  const uint64_t count = h.index_codec == 0 ? 0 : h.count;
  const std::unique_ptr<int64_t[]> indices(new int64_t[count]);
  if (decode_indices(indices.get(), payload.get() + layout.indices, h) != kDecoded) {
    return Verdict::kRefused;
  }
  for (uint64_t i = 0; i < count; ++i) {
    EXPECT_GE(indices[i], i == 0 ? 0 : indices[i - 1] + 1);
    EXPECT_LT(static_cast<uint64_t>(indices[i]), h.numel);
  }
  // The values are where the layout says, to the last byte.
  EXPECT_LE(layout.codes + h.code_bytes, layout.scales);
  EXPECT_LE(layout.scales + 4 * h.num_scales, bytes.size());
  if (result != nullptr) {
    result->assign(indices.get(), indices.get() + count);
  }
  return Verdict::kDecoded;
}

std::vector<int64_t> random_indices(std::mt19937_64& generator, int64_t numel, int64_t count) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < count; ++i) {
    indices.push_back(static_cast<int64_t>(generator() % static_cast<uint64_t>(numel)));
  }
  std::sort(indices.begin(), indices.end());
  indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  return indices;
}

std::vector<Bytes> seeds(std::mt19937_64& generator) {
  std::vector<Bytes> found;
  for (int64_t index = 0; index < kNumIndexCodecs; ++index) {
    for (int64_t value = 0; value < kNumValueCodecs; ++value) {
      for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{300}, int64_t{140000}}) {
        const std::vector<int64_t> indices =
            index == 0 || numel == 0 ? std::vector<int64_t>() : random_indices(generator, numel, 40);
        found.push_back(encoded(static_cast<IndexCodec>(index), static_cast<ValueCodec>(value), indices, numel));
        if (index != 0) {
          std::vector<int64_t> decoded;
          EXPECT_EQ(decode(found.back(), &decoded), Verdict::kDecoded);
          EXPECT_EQ(decoded, indices);
        }
      }
    }
  }
  return found;
}

// Numbers on which sizes wrap or bounds are met.
uint64_t interesting(std::mt19937_64& generator, uint64_t now) {
  const uint64_t one = 1;
  const uint64_t numbers[] = {0,         1,         now - 1,      now + 1,           2 * now,
                              65535,     65536,     one << 31,    one << 32,         one << 61,
                              one << 62, one << 63, ~uint64_t{0}, ~uint64_t{0} - 15, generator() % 4096};
  return numbers[generator() % std::size(numbers)];
}

void damage(std::mt19937_64& generator, Bytes& bytes) {
  switch (generator() % 5) {
    case 0:
      bytes[generator() % bytes.size()] ^= static_cast<uint8_t>(1 << generator() % 8);
      break;
    case 1:
      bytes[generator() % bytes.size()] = static_cast<uint8_t>(generator());
      break;
    case 2: { // a field of the header
      const uint64_t at = 8 + 8 * (generator() % 6);
      uint64_t field;
      std::memcpy(&field, bytes.data() + at, sizeof(field));
      field = interesting(generator, field);
      std::memcpy(bytes.data() + at, &field, sizeof(field));
      break;
    }
    case 3: // another length, which the header may own up to
      bytes.resize(sizeof(Header) + generator() % (2 * bytes.size()));
      if (generator() % 2 == 0) {
        const uint64_t size = bytes.size();
        std::memcpy(bytes.data() + offsetof(Header, total_bytes), &size, sizeof(size));
      }
      break;
    default: { // a piece from elsewhere
      const uint64_t size = 1 + generator() % 16;
      const uint64_t from = generator() % bytes.size(), to = generator() % bytes.size();
      for (uint64_t i = 0; i < size && std::max(from, to) + i < bytes.size(); ++i) {
        bytes[to + i] = bytes[from + i];
      }
    }
  }
}

TEST(WireDecoder, StaysInsideDamagedPayloads) {
  std::mt19937_64 generator(0);
  const std::vector<Bytes> sound = seeds(generator);
  int64_t refused = 0, decoded = 0;
  for (int round = 0; round < 200; ++round) {
    for (Bytes bytes : sound) {
      for (uint64_t times = 1 + generator() % 3; times > 0; --times) {
        damage(generator, bytes);
      }
      ++(decode(bytes) == Verdict::kRefused ? refused : decoded);
    }
  }
  EXPECT_GT(refused, 1000) << "the damage is too small to test anything";
  EXPECT_GT(decoded, 1000) << "the damage never reaches the indices";
}

TEST(WireDecoder, RefusesEveryTruncation) {
  std::mt19937_64 generator(1);
  for (const Bytes& sound : seeds(generator)) {
    for (uint64_t size = 0; size < std::min<uint64_t>(sound.size(), 400); ++size) {
      ASSERT_EQ(decode(Bytes(sound.begin(), sound.begin() + static_cast<int64_t>(size))), Verdict::kRefused);
    }
  }
}

TEST(WireDecoder, StaysInsideNoiseUnderAnHonestHeader) {
  std::mt19937_64 generator(2);
  for (int round = 0; round < 20000; ++round) {
    const IndexCodec index = static_cast<IndexCodec>(1 + generator() % 3);
    const int64_t numel = static_cast<int64_t>(1 + generator() % 200000);
    Bytes bytes = encoded(index, ValueCodec::kInt8, random_indices(generator, numel, 20), numel);
    for (uint64_t i = sizeof(Header); i < bytes.size(); ++i) {
      // Small numbers go further into a decoder than large ones.
      bytes[i] = static_cast<uint8_t>(generator() % (round % 2 == 0 ? 256 : 3));
    }
    decode(bytes);
  }
}

} // namespace
} // namespace moe_ext::wire
