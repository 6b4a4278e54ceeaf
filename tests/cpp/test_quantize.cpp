// The loops of the quantisers for every instruction set: the same bits as the portable ones, and nothing written past
// the end.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "isa.h"
#include "quantize/quantize_tables.h"

namespace moe_ext {

namespace quantize {
MOE_EXT_TABLES(Kernels)
} // namespace quantize

namespace {

using testing::random_floats;

constexpr int64_t kSizes[] = {1, 15, 16, 17, 255, 256, 257, 1000};

class Quantisers : public ::testing::TestWithParam<std::string> {};

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scales, residual;

  bool operator==(const Quantized&) const = default;
};

Quantized quantized(const quantize::Kernels& kernels, int64_t format, int64_t n, bool random, bool shared) {
  const std::vector<float> x = random_floats(n, 4);
  const int64_t state[4] = {5, 6, 7, 8};
  static constexpr uint32_t kLargest = 0x41000000; // 8, above all
  Quantized out{std::vector<uint8_t>(n + 1, 7), std::vector<float>(n / 64 + 2, 7), random_floats(n + 1, 5)};
  const quantize::QuantizeArgs<float> args{
      x.data(),
      out.residual.data(),
      out.residual.data(),
      out.codes.data(),
      out.scales.data(),
      n,
      64,
      {random ? state : nullptr, nullptr},
      0,
      shared ? &kLargest : nullptr};
  kernels.f32.quantize[format](args, 0, (n + 63) / 64, nullptr);
  EXPECT_EQ(out.codes[n], 7) << "wrote past the codes";
  EXPECT_EQ(out.scales[(n + 63) / 64], 7) << "wrote past the scales";
  EXPECT_EQ(out.residual[n], random_floats(n + 1, 5)[n]) << "wrote past the residual";
  return out;
}

TEST_P(Quantisers, QuantizesAsThePortableLoops) {
  for (const int64_t n : kSizes) {
    for (int64_t format = 0; format < quantize::kNumFormats; ++format) {
      for (const auto& [random, shared] : {std::pair(false, false), {true, false}, {false, true}}) {
        const Quantized actual = quantized(quantize::table(GetParam()), format, n, random, shared);
        ASSERT_TRUE(actual == quantized(quantize::table("portable"), format, n, random, shared))
            << n << " in " << format;
      }
    }
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A residual beside gradients of a size of one, by how large it is; the last kind is not finite here and there.
std::vector<float> residual_of(const std::string& kind, int64_t n) {
  std::vector<float> residual = random_floats(n, 5);
  for (int64_t i = 0; i < n; ++i) {
    residual[i] *= kind == "none" ? -0.0f : kind == "usual" ? 0.005f : kind == "tiny" ? 1e-9f : 1e3f;
    if (kind == "not finite" && i % 200 == 70) {
      residual[i] = i % 400 == 70 ? std::nanf("0x123") : -INFINITY;
    }
  }
  return residual;
}

TEST_P(Quantisers, TakesAResidualBackBitForBit) {
  const quantize::Kernels& kernels = quantize::table(GetParam());
  const int64_t state[4] = {5, 6, 7, 8};
  for (const int64_t n : {int64_t{1}, int64_t{64}, int64_t{1000}, int64_t{4096}}) {
    for (const char* kind : {"none", "usual", "tiny", "large", "not finite"}) {
      for (int64_t format = 0; format < quantize::kNumFormats; ++format) {
        for (const bool random : {false, true}) {
          const std::vector<float> x = random_floats(n, 4), before = residual_of(kind, n);
          const int64_t blocks = (n + 127) / 128;
          const auto run = [&](std::vector<float>& residual, std::vector<uint8_t>& codes, quantize::UndoLog* log) {
            static std::vector<float> scales;
            scales.assign(blocks, 0);
            quantize::QuantizeArgs<float> args{x.data(),
                                               residual.data(),
                                               residual.data(),
                                               codes.data(),
                                               scales.data(),
                                               n,
                                               128,
                                               {random ? state : nullptr, nullptr},
                                               0};
            kernels.f32.quantize[format](args, 0, blocks, log);
            return args;
          };
          std::vector<float> plain = before, residual = before, values(n + 1);
          std::vector<uint8_t> codes(n + 8), plain_codes(n + 8);
          std::vector<int16_t> steps(n);
          quantize::UndoLog log{steps.data(), values.data()};
          run(plain, plain_codes, nullptr);
          const auto args = run(residual, codes, &log);
          const std::string what = std::string(kind) + " as " + quantize::kFormatNames[format];
          ASSERT_EQ(codes, plain_codes) << what;
          ASSERT_TRUE(std::string(kind) == "not finite" || same_bits(residual, plain)) << what;
          kernels.f32.undo[format](args, 0, blocks, log);
          ASSERT_TRUE(same_bits(residual, before)) << what << ", " << n << " elements";
          if (std::string(kind) == "usual" && format == 0 && !random && n == 4096) {
            EXPECT_LT(log.count, n / 100);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, Quantisers, ::testing::ValuesIn(testing::supported_isas()), [](const auto& info) {
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
} // namespace moe_ext
