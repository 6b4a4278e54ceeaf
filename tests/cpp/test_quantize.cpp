// The loops of the quantisers for every instruction set: the same bits as the portable ones, and nothing written past
// the end.
#include <gtest/gtest.h>

#include <algorithm>
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

// Rows of every size of numbers: usual, near the ends of the range, subnormal, zeros of both signs, some not finite.
template <typename T>
std::vector<T> row_elements(int64_t n) {
  std::vector<float> values = random_floats(n, 6);
  std::vector<T> elements(n);
  for (int64_t i = 0; i < n; ++i) {
    const float sizes[] = {1.0f, 1e-5f, 1e-40f, 1e37f, 3e4f, 0.0f};
    float value = values[i] * sizes[i / 128 % 6];
    value = i % 1000 == 130 ? INFINITY : i % 1000 == 300 ? std::nanf("0x123") : i % 37 == 3 ? -0.0f : value;
    elements[i] = from_acc<T>(value);
  }
  return elements;
}

template <typename T, quantize::RowFormat kRow>
void expect_rows_as_elements(const quantize::Kernels& kernels, int64_t dim) {
  constexpr int64_t kRows = 7, kBlock = quantize::row_block(kRow);
  constexpr quantize::Format kFormat = quantize::code_format(kRow);
  const std::string what = "format " + std::to_string(static_cast<int>(kRow)) + ", dim " + std::to_string(dim);
  const int64_t row_bytes = quantize::row_bytes(dim, kRow);
  const std::vector<T> x = row_elements<T>(kRows * dim);
  std::vector<uint8_t> rows(kRows * row_bytes + 1, 7), expected = rows;
  std::vector<T> back(kRows * dim + 1, T{}), expected_back = back;
  for (int64_t row = 0; row < kRows; ++row) {
    uint8_t* const codes = expected.data() + row * row_bytes;
    for (int64_t first = 0; first < dim; first += kBlock) {
      uint8_t* const scale = codes + dim + first / kBlock * quantize::scale_bytes(kRow);
      const int64_t end = first + kBlock < dim ? first + kBlock : dim;
      uint32_t key = 0;
      for (int64_t i = first; i < end; ++i) {
        key = std::max(key, key_of(to_acc(x[row * dim + i])));
      }
      const quantize::Scaling s = quantize::row_scaling<kRow>(key);
      quantize::put_row_scale<kRow>(scale, key, s.scale);
      for (int64_t i = first; i < end; ++i) {
        const float a = to_acc(x[row * dim + i]);
        const int8_t code = key >= kInfinityKey<float> ? int8_t{0} : quantize::code_of<kFormat, false>(a, s, 0);
        codes[i] = static_cast<uint8_t>(code);
        const float value = quantize::value_of<kFormat>(code, quantize::get_row_scale<kRow>(scale));
        expected_back[row * dim + i] = from_acc<T>(quantize::within<kRow, T>(value));
      }
    }
  }
  const auto& table = kernels.of<T>();
  table.quantize_rows[static_cast<int>(kRow)]({x.data(), rows.data(), dim}, 0, kRows);
  ASSERT_EQ(rows, expected) << what;
  table.dequantize_rows[static_cast<int>(kRow)]({back.data(), rows.data(), dim}, 0, kRows);
  ASSERT_EQ(std::memcmp(back.data(), expected_back.data(), back.size() * sizeof(T)), 0) << what;
}

template <typename T>
void expect_all_rows(const quantize::Kernels& kernels) {
  for (const int64_t dim : {1, 15, 31, 32, 33, 127, 128, 129, 1000}) {
    expect_rows_as_elements<T, quantize::RowFormat::kInt8>(kernels, dim);
    expect_rows_as_elements<T, quantize::RowFormat::kFp8>(kernels, dim);
    expect_rows_as_elements<T, quantize::RowFormat::kMx>(kernels, dim);
  }
}

TEST_P(Quantisers, CodesRowsElementByElement) {
  const quantize::Kernels& kernels = quantize::table(GetParam());
  expect_all_rows<float>(kernels);
  expect_all_rows<BFloat16>(kernels);
  expect_all_rows<Half>(kernels);
}

TEST_P(Quantisers, DecodesEveryByteOfARow) {
  const quantize::Kernels& kernels = quantize::table(GetParam());
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (const float scale : {1.0f, 0.037f, 1e-39f, 3e38f}) {
      const uint32_t bits = bit_cast<uint32_t>(scale);
      const auto code = static_cast<uint8_t>(byte);
      const uint8_t row[5] = {
          code, static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8), static_cast<uint8_t>(bits >> 16),
          static_cast<uint8_t>(bits >> 24)};
      float value = 0;
      kernels.f32.dequantize_rows[static_cast<int>(quantize::RowFormat::kFp8)]({&value, row, 1}, 0, 1);
      ASSERT_EQ(value, quantize::from_e4m3(byte) * scale) << byte;
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
