// Selection among keys against a sort, and the loops of selection and quantisers for every instruction set: the same
// bits as the portable ones, and nothing written past the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "compression/quantize_tables.h"
#include "compression/select.h"
#include "compression/topk_tables.h"
#include "isa.h"

namespace moe_ext::compression {

namespace topk {
MOE_EXT_TABLES(Kernels)
} // namespace topk

namespace quantize {
MOE_EXT_TABLES(Kernels)
} // namespace quantize

namespace {

constexpr int64_t kSizes[] = {1, 15, 16, 17, 255, 256, 257, 1000};

std::vector<float> random_floats(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) {
    value = normal(generator);
  }
  return values;
}

template <typename Key>
void expect_kth(const std::vector<Key>& keys) {
  std::vector<Key> sorted = keys;
  std::sort(sorted.begin(), sorted.end(), std::greater<Key>());
  const int64_t n = static_cast<int64_t>(keys.size());
  for (const int64_t k : {int64_t{1}, int64_t{2}, n / 100 + 1, n / 2 + 1, n - 1, n}) {
    std::vector<Key> scratch = keys;
    ASSERT_EQ(kth_largest(scratch.data(), n, k), sorted[k - 1]) << k << " of " << n;
    scratch = keys;
    const Cut<Key> cut = cut_largest(keys.data(), scratch.data(), n, k);
    const int64_t above = std::count_if(keys.begin(), keys.end(), [&](Key key) { return key > cut.bound; });
    ASSERT_EQ(above + cut.ties, k);
    ASSERT_LE(cut.ties, std::count(keys.begin(), keys.end(), cut.bound));
  }
}

TEST(Select, FindsTheKthLargest) {
  std::mt19937_64 generator(0);
  for (const int64_t n : {int64_t{2}, int64_t{1024}, int64_t{1025}, int64_t{50000}}) {
    for (const uint64_t range : {uint64_t{1}, uint64_t{7}, uint64_t{5000}, ~uint64_t{0}}) {
      std::vector<uint64_t> wide(n);
      std::vector<uint32_t> narrow(n);
      for (int64_t i = 0; i < n; ++i) {
        wide[i] = generator() % range;
        narrow[i] = static_cast<uint32_t>(generator() % range);
      }
      expect_kth(wide);
      expect_kth(narrow);
    }
  }
}

TEST(Select, TakesNothingForZero) {
  std::vector<uint32_t> keys = {3, 1, 2}, scratch = keys;
  const Cut<uint32_t> cut = cut_largest(keys.data(), scratch.data(), 3, 0);
  EXPECT_EQ(cut.ties, 0);
  EXPECT_GT(cut.bound, 3u);
}

class EachIsa : public ::testing::TestWithParam<std::string> {};

struct Scanned {
  std::vector<uint32_t> keys, offsets;
  std::vector<float> residual, velocity;
  uint32_t largest = 0;
  int64_t count = 0;

  bool operator==(const Scanned&) const = default;
};

Scanned scan(const topk::Kernels& kernels, int64_t n, bool with_velocity, uint32_t low) {
  const std::vector<float> grad = random_floats(n, 1);
  Scanned out{
      std::vector<uint32_t>(n + 32, 7), std::vector<uint32_t>(n + 32, 7), random_floats(n + 1, 2),
      random_floats(n + 1, 3)};
  const Feedback<float> args{
      grad.data(), out.residual.data(), with_velocity ? out.velocity.data() : nullptr, 0.7f, 0.9f};
  out.count = kernels.f32.feed_and_scan(args, 0, n, low, out.keys.data(), out.offsets.data(), &out.largest);
  // What lies behind the candidates is scratch, up to one vector past the end.
  EXPECT_EQ(out.keys[n + 16], 7u);
  EXPECT_EQ(out.offsets[n + 16], 7u);
  out.keys.resize(out.count);
  out.offsets.resize(out.count);
  return out;
}

TEST_P(EachIsa, ScansAsThePortableLoops) {
  for (const int64_t n : kSizes) {
    for (const float low : {0.0f, 1.0f, 2.5f}) {
      for (const bool with_velocity : {false, true}) {
        const Scanned actual = scan(topk::table(GetParam()), n, with_velocity, key_of(low));
        const Scanned expected = scan(topk::table("portable"), n, with_velocity, key_of(low));
        ASSERT_TRUE(actual == expected) << n << " elements from " << low << " on";
      }
    }
  }
}

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scales, residual;

  bool operator==(const Quantized&) const = default;
};

Quantized quantized(const quantize::Kernels& kernels, int64_t format, int64_t n, bool random) {
  const std::vector<float> x = random_floats(n, 4);
  const int64_t state[4] = {5, 6, 7, 8};
  Quantized out{std::vector<uint8_t>(n + 1, 7), std::vector<float>(n / 64 + 2, 7), random_floats(n + 1, 5)};
  const quantize::QuantizeArgs<float> args{
      x.data(), out.residual.data(), out.codes.data(), out.scales.data(), n, 64, {random ? state : nullptr, nullptr}};
  kernels.f32.quantize[format](args, 0, (n + 63) / 64);
  EXPECT_EQ(out.codes[n], 7) << "wrote past the codes";
  EXPECT_EQ(out.scales[(n + 63) / 64], 7) << "wrote past the scales";
  EXPECT_EQ(out.residual[n], random_floats(n + 1, 5)[n]) << "wrote past the residual";
  return out;
}

TEST_P(EachIsa, QuantizesAsThePortableLoops) {
  for (const int64_t n : kSizes) {
    for (int64_t format = 0; format < quantize::kNumFormats; ++format) {
      for (const bool random : {false, true}) {
        const Quantized actual = quantized(quantize::table(GetParam()), format, n, random);
        ASSERT_TRUE(actual == quantized(quantize::table("portable"), format, n, random)) << n << " in " << format;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, EachIsa, ::testing::ValuesIn(testing::supported_isas()), [](const auto& info) {
  return info.param;
});

TEST(E4m3, RoundsEveryCodeToItself) {
  for (uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7Fu) != 0x7Fu) { // NaN
      EXPECT_EQ(quantize::to_e4m3(quantize::from_e4m3(code), false, 0), code);
    }
  }
  EXPECT_EQ(quantize::to_e4m3(1e30f, false, 0), 0x7Eu) << "saturates";
}

} // namespace
} // namespace moe_ext::compression
