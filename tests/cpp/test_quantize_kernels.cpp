// The block quantisers' CUDA kernels, emulated, against a serial quantiser, under every schedule: the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "quantize/quantize_kernels.cuh"
#include "schedules.h"

namespace moe_ext::quantize {
namespace {

struct Case {
  int64_t numel;
  int64_t block;
  bool residual = false;
  bool random = false;
  int64_t offset = 0;     // elements, of every tensor
  bool elsewhere = false; // the old residual is read from another tensor
  int64_t first = 0;      // number of the first element
  bool shared = false;    // one scale
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.numel << " in " << c.block << (c.residual ? ", residual" : "") << (c.random ? ", random" : "") << ", "
             << c.offset << (c.elsewhere ? ", elsewhere" : "") << ", " << c.first << (c.shared ? ", one scale" : "");
}

struct Result {
  std::vector<uint8_t> codes;
  std::vector<float> scales, residual;

  bool operator==(const Result&) const = default;
};

constexpr int64_t kState[4] = {(int64_t{1} << 40) + 5, 7, 3, 2};

template <typename T>
struct Problem {
  Case c;
  std::vector<T> x;
  std::vector<float> residual;

  explicit Problem(const Case& of) : c(of), residual(random_values<float>(of.numel + of.offset, 2)) {
    for (const float value : random_values<float>(of.numel + of.offset, 1)) {
      x.push_back(from_acc<T>(value));
    }
  }
  Result start(Format format) const {
    return {
        std::vector<uint8_t>(c.offset + code_bytes(c.numel, format)), std::vector<float>(ceil_div(c.numel, c.block)),
        c.elsewhere ? std::vector<float>(residual.size(), -9.0f) : residual};
  }
  QuantizeArgs<T> args(Format format, Result& out) const {
    return {
        x.data() + c.offset,
        c.residual ? (c.elsewhere ? residual : out.residual).data() + c.offset : nullptr,
        c.residual ? out.residual.data() + c.offset : nullptr,
        out.codes.data() + c.offset,
        out.scales.data(),
        c.numel,
        c.block,
        {c.random && format != Format::kSign ? kState : nullptr, nullptr},
        c.first};
  }
};

float sum_of(const std::vector<float>& a, float factor) {
  float lanes[16] = {};
  for (size_t i = 0; i < a.size(); ++i) {
    lanes[i % 16] += std::abs(a[i]) * factor;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

uint32_t bits_at(const uint8_t* bytes, int64_t i, Format format) {
  uint32_t found = 0;
  for (int64_t bit = 0; bit < bits_of(format); ++bit) {
    const int64_t at = i * bits_of(format) + bit;
    found |= (bytes[at / 8] >> at % 8 & 1u) << bit;
  }
  return found;
}

template <Format kFormat, typename T>
void serial_block(const QuantizeArgs<T>& args, int64_t block) {
  const int64_t begin = block * args.block, end = std::min(args.numel, begin + args.block);
  std::vector<float> a;
  uint32_t most = 0;
  for (int64_t i = begin; i < end; ++i) {
    a.push_back(args.residual_in == nullptr ? to_acc(args.x[i]) : args.residual_in[i] + to_acc(args.x[i]));
    most = std::max(most, key_of(a.back()));
  }
  Scaling s = scaling_of(bit_cast<float>(args.largest != nullptr ? *args.largest : most), largest_code(kFormat));
  if (kFormat == Format::kSign) {
    s.scale = sign_scale(sum_of(a, sign_factor(most)), end - begin, sign_factor(most));
  }
  args.scales[args.largest != nullptr ? 0 : block] = s.scale;
  for (int64_t i = begin; i < end; ++i) {
    const float value = a[i - begin];
    float back = value < 0 ? -s.scale : s.scale;
    int8_t code = value < 0;
    if constexpr (kFormat != Format::kSign) {
      code = code_of<kFormat, false>(value, s, 0);
      if (args.rng.state != nullptr) {
        const int64_t number = args.offset + i;
        code = code_of<kFormat, true>(value, s, rounding_draws(args.rng, number - i + begin).words(number).w[i % 4]);
      }
      back = value_of<kFormat>(code, s.scale);
    }
    for (int64_t bit = 0; bit < bits_of(kFormat); ++bit) {
      const int64_t at = i * bits_of(kFormat) + bit;
      args.codes[at / 8] |= static_cast<uint8_t>((code >> bit & 1) << at % 8);
    }
    if (args.residual != nullptr) {
      args.residual[i] = value - back;
    }
  }
}

template <Format kFormat, typename T>
void check_format(const Case& c) {
  const Problem<T> problem(c);
  Result expected = problem.start(kFormat), out = problem.start(kFormat);
  QuantizeArgs<T> serial = problem.args(kFormat, expected), args = problem.args(kFormat, out);
  int largest = 0;
  if (c.shared) {
    launch_largest(args, &largest, nullptr);
    args.largest = serial.largest = reinterpret_cast<const uint32_t*>(&largest);
    int most = 0;
    for (int64_t i = 0; i < c.numel; ++i) {
      const float value = to_acc(args.x[i]);
      most =
          std::max(most, static_cast<int>(key_of(args.residual_in == nullptr ? value : args.residual_in[i] + value)));
    }
    EXPECT_EQ(largest, most);
  }
  for (int64_t block = 0; block < ceil_div(c.numel, c.block); ++block) {
    serial_block<kFormat>(serial, block);
  }
  launch_quantize(kFormat, args, nullptr, nullptr);
  EXPECT_EQ(out, expected);

  // What the residual keeps is what the decoder does not give back; a sum with x tells the other entry.
  for (const bool add : {false, true}) {
    std::vector<T> values = problem.x;
    launch_dequantize<T>(
        kFormat,
        {values.data() + c.offset, out.codes.data() + c.offset, out.scales.data(), c.numel, c.block, add, c.shared},
        nullptr);
    for (int64_t i = 0; i < c.numel; ++i) {
      const uint32_t bits = bits_at(out.codes.data() + c.offset, i, kFormat);
      const float scale = out.scales[c.shared ? 0 : i / c.block];
      const float value = kFormat == Format::kSign  ? (bits != 0 ? -scale : scale)
                          : kFormat == Format::kFp8 ? value_of<kFormat>(static_cast<int8_t>(bits), scale)
                                                    : static_cast<float>(from_low_bits<bits_of(kFormat)>(bits)) * scale;
      const float sum = add ? to_acc(problem.x[c.offset + i]) + value : value;
      ASSERT_EQ(to_acc(values[c.offset + i]), to_acc(from_acc<T>(sum))) << i;
    }
  }
}

class Quantize : public simt::ScheduleTest<Case> {};

TEST_P(Quantize, EqualsASerialQuantizer) {
  const auto check = [&]<typename T>() {
    check_format<Format::kInt8, T>(param());
    check_format<Format::kInt4, T>(param());
    check_format<Format::kFp8, T>(param());
    if (!param().shared) {
      check_format<Format::kSign, T>(param());
    }
    check_format<Format::kInt6, T>(param());
    check_format<Format::kInt3, T>(param());
    check_format<Format::kInt2, T>(param());
  };
  check.operator()<float>();
  check.operator()<BFloat16>();
  check.operator()<Half>();
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Quantize,
    simt::under_all_schedules<Case>(
        {{1, 64},
         {63, 64, true},
         {64, 64, true, true},
         {129, 128, true, true},
         {1000, 128, false, true},
         {1000, 128, true, true, 1},
         {1025, 1024, true},
         {5000, 256, true, true},
         {1000, 128, true, false, 0, true},
         {1000, 128, true, true, 1, true, 256},
         {1, 256, false, false, 0, false, 0, true},
         {1003, 256, true, true, 1, true, 1024, true}}));

TEST(Quantize, WhatIsNotFiniteTravelsAndTheResidualStays) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (int64_t i = 0; i < kNumFormats; ++i) {
      const Format format = static_cast<Format>(i);
      Problem<float> problem({300, 64, true});
      problem.x[70] = bad;
      Result out = problem.start(format);
      int refused = 0;
      const auto args = problem.args(format, out);
      launch_check_finite<false>(args, &refused, nullptr);
      launch_quantize(format, args, &refused, nullptr);
      EXPECT_EQ(refused, 1);
      EXPECT_EQ(out.residual, problem.residual);
      std::vector<float> values(300);
      launch_dequantize<float>(format, {values.data(), out.codes.data(), out.scales.data(), 300, 64, false}, nullptr);
      EXPECT_FALSE(std::isfinite(values[70]));
      EXPECT_TRUE(std::isfinite(values[0]));
      EXPECT_THROW(launch_check_finite<true>(args, &refused, nullptr), simt::Error);
    }
  }
}

struct RowsCase {
  int64_t num_rows;
  int64_t dim;
  int64_t offset = 0; // elements, of both tensors
};

std::ostream& operator<<(std::ostream& out, const RowsCase& c) {
  return out << c.num_rows << " of " << c.dim << " from " << c.offset;
}

template <RowFormat kRow, typename T>
void check_rows(const RowsCase& c, float special) {
  constexpr int64_t kBlock = row_block(kRow);
  const int64_t width = row_bytes(c.dim, kRow);
  std::vector<T> x;
  for (const float value : random_values<float>(c.num_rows * c.dim + c.offset, 3)) {
    x.push_back(from_acc<T>(value));
  }
  x[c.offset + c.num_rows * c.dim / 2] = from_acc<T>(special);
  std::vector<uint8_t> expected(c.offset + c.num_rows * width), rows = expected;
  std::vector<T> back(x.size()), values = back;
  for (int64_t i = 0; i < c.num_rows * c.dim; i += std::min(kBlock, c.dim - i % c.dim)) {
    const int64_t row = i / c.dim, column = i % c.dim, n = std::min(kBlock, c.dim - column);
    uint8_t* const out = expected.data() + c.offset + row * width;
    uint32_t most = 0;
    for (int64_t j = 0; j < n; ++j) {
      most = std::max(most, key_of(to_acc(x[c.offset + i + j])));
    }
    const Scaling s = row_scaling<kRow>(most);
    put_row_scale<kRow>(out + c.dim + column / kBlock * scale_bytes(kRow), most, s.scale);
    for (int64_t j = 0; j < n; ++j) {
      const bool finite = most < kInfinityKey<float>;
      const int8_t code = finite ? code_of<code_format(kRow), false>(to_acc(x[c.offset + i + j]), s, 0) : int8_t{0};
      out[column + j] = static_cast<uint8_t>(code);
      back[c.offset + i + j] = from_acc<T>(within<kRow, T>(value_of<code_format(kRow)>(code, s.scale)));
      EXPECT_EQ(std::isfinite(to_acc(back[c.offset + i + j])), finite);
    }
  }
  launch_quantize_rows<T>(kRow, {x.data() + c.offset, rows.data() + c.offset, c.dim}, c.num_rows, nullptr);
  EXPECT_EQ(rows, expected);
  launch_dequantize_rows<T>(kRow, {values.data() + c.offset, rows.data() + c.offset, c.dim}, c.num_rows, nullptr);
  EXPECT_EQ(std::memcmp(values.data(), back.data(), back.size() * sizeof(T)), 0);
}

class QuantizeRows : public simt::ScheduleTest<RowsCase> {};

TEST_P(QuantizeRows, EqualsASerialQuantizer) {
  const auto check = [&]<typename T>() {
    for (const float special : {0.5f, std::numeric_limits<float>::infinity()}) {
      check_rows<RowFormat::kInt8, T>(param(), special);
      check_rows<RowFormat::kFp8, T>(param(), special);
      check_rows<RowFormat::kMx, T>(param(), special);
    }
  };
  check.operator()<float>();
  check.operator()<BFloat16>();
  check.operator()<Half>();
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, QuantizeRows,
    simt::under_all_schedules<RowsCase>({{1, 1}, {3, 31}, {2, 128, 1}, {5, 256}, {7, 300}, {9, 132, 3}}));

} // namespace
} // namespace moe_ext::quantize
