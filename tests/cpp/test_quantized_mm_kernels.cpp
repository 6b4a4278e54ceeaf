// The CUDA kernel of products with codes, emulated, against serial loops in the order of the CPU, under every schedule.
#include <gtest/gtest.h>

#include <random>

#include "quantize/quantized_mm_kernels.cuh"
#include "schedules.h"

namespace moe_ext::quantized_mm {
namespace {

struct Case {
  int64_t bits, num_tokens, num_rows, dim, block;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.bits << " bits, " << c.num_tokens << " by " << c.num_rows << " by " << c.dim << " / " << c.block;
}

class QuantizedProduct : public simt::ScheduleTest<Case> {};

TEST_P(QuantizedProduct, HasTheBitsOfTheCpu) {
  const Case c = param();
  std::mt19937 generator(7);
  const std::vector<float> x = random_values<float>(c.num_tokens * c.dim, 1);
  const std::vector<float> scales = random_values<float>(c.num_rows * c.dim / c.block, 2);
  std::vector<uint8_t> codes(c.num_rows * c.dim * c.bits / 8);
  std::generate(codes.begin(), codes.end(), [&] { return static_cast<uint8_t>(generator()); });
  std::vector<int64_t> offsets{0};
  for (int64_t m = 0; m < c.num_rows; ++m) {
    offsets.push_back(offsets.back() + static_cast<int64_t>(generator() % 3));
  }
  const std::vector<float> outliers = random_values<float>(offsets.back(), 3);
  std::vector<int32_t> columns(outliers.size());
  std::generate(columns.begin(), columns.end(), [&] { return static_cast<int32_t>(generator() % c.dim); });
  std::vector<float> out(c.num_tokens * c.num_rows), wanted(out.size());
  for (int64_t m = 0; m < c.num_rows; ++m) {
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      float sums[kSums] = {}, sum = 0;
      for (int64_t begin = 0; begin < c.dim; begin += c.block) {
        float parts[2][kSums] = {};
        for (int64_t i = begin; i < begin + c.block; ++i) {
          const int64_t at = m * c.dim + i;
          const int byte = codes[at * c.bits / 8];
          const int nibble = i % 2 == 0 ? byte & 15 : byte >> 4;
          const int code = c.bits == 8 ? static_cast<int8_t>(byte) : (nibble ^ 8) - 8;
          const int64_t half = c.bits == 8 ? i % 32 / 16 : i % 2, lane = c.bits == 8 ? i % 16 : i % 32 / 2;
          parts[half][lane] += static_cast<float>(code) * x[t * c.dim + i];
        }
        for (int lane = 0; lane < kSums; ++lane) {
          sums[lane] += (parts[0][lane] + parts[1][lane]) * scales[(m * c.dim + begin) / c.block];
        }
      }
      for (const float lane : sums) {
        sum += lane;
      }
      for (int64_t i = offsets[m]; i < offsets[m + 1]; ++i) {
        sum += outliers[i] * x[t * c.dim + columns[i]];
      }
      wanted[t * c.num_rows + m] = sum;
    }
  }
  Product<float> product{x.data(),   codes.data(), scales.data(), outliers.data(), columns.data(), offsets.data(),
                         out.data(), c.num_tokens, c.dim,         c.num_rows,      c.block,        offsets.back()};
  launch_quantized_mm<true>(product, c.bits, nullptr);
  EXPECT_EQ(out, wanted);
  // As the rows of some experts, whose first tokens belong to nobody: each token with its own expert's rows.
  const int64_t num_experts = c.num_rows % 3 == 0 ? 3 : c.num_rows, each = c.num_rows / num_experts;
  std::vector<int64_t> begin(num_experts + 1, c.num_tokens);
  for (int64_t e = 0; e < num_experts; ++e) {
    begin[e] = std::max(c.num_tokens / 4, c.num_tokens * e / num_experts);
  }
  std::vector<float> of_experts(c.num_tokens * each, 7);
  const float* const before = product.out;
  product.out = of_experts.data();
  product.experts = {begin.data(), nullptr, static_cast<int>(num_experts)};
  launch_quantized_mm<true>(product, c.bits, nullptr);
  for (int64_t e = 0; e < num_experts; ++e) {
    for (int64_t t = e == 0 ? 0 : begin[e]; t < begin[e + 1]; ++t) {
      for (int64_t m = 0; m < each; ++m) {
        const float want = t < begin[0] ? 7 : before[t * c.num_rows + e * each + m];
        EXPECT_EQ(of_experts[t * each + m], want) << "token " << t;
      }
    }
  }
  begin[num_experts] = c.num_tokens + 1;
  EXPECT_THROW(launch_quantized_mm<true>(product, c.bits, nullptr), simt::Error);
  launch_quantized_mm<false>(product, c.bits, nullptr);
  product.out = out.data();
  product.experts = {};
  if (!columns.empty()) {
    columns[0] = static_cast<int32_t>(c.dim);
    EXPECT_THROW(launch_quantized_mm<true>(product, c.bits, nullptr), simt::Error);
    launch_quantized_mm<false>(product, c.bits, nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, QuantizedProduct,
    simt::under_all_schedules<Case>(
        {{8, 1, 1, 32, 32}, {4, 1, 3, 64, 32}, {8, 5, 9, 192, 64}, {4, 4, 17, 256, 128}, {4, 9, 2, 96, 96}}));

} // namespace
} // namespace moe_ext::quantized_mm
