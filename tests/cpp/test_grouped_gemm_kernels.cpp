// The kernels around the grouped product, emulated, against serial loops, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "grouped_gemm/grouped_gemm_kernels.cuh"
#include "grouped_gemm/products_kernels.cuh"
#include "schedules.h"

namespace moe_ext::grouped_gemm {
namespace {

// Rows 0 and 1 and those from 90 on belong to nobody; experts 1, 2 and 5 have no rows.
const std::vector<int64_t> kOffsets = {2, 40, 40, 40, 41, 90, 90};
constexpr int64_t kNumExperts = 6;
const ExpertBounds kExperts = {kOffsets.data(), nullptr, kNumExperts};
constexpr int64_t kNumRows = 97;

class ExpertRows : public simt::ScheduleTest<int> {
 protected:
  template <typename T>
  std::vector<T> small_integers(int64_t n) const {
    std::mt19937 generator(n);
    std::vector<T> values(n);
    std::generate(values.begin(), values.end(), [&] { return T(static_cast<float>(generator() % 7) - 3); });
    return values;
  }

  // Sums of small integers are exact in every dtype.
  template <typename T>
  void bias_is_added(bool biased) {
    const int64_t dim = param();
    const auto bias = small_integers<T>(kNumExperts * dim);
    const auto before = small_integers<T>(kNumRows * dim);
    std::vector<T> out = before;
    launch_finish_rows(kExperts, biased ? bias.data() : nullptr, kNumRows, dim, out.data(), nullptr);
    for (int64_t i = 0; i < kNumRows * dim; ++i) {
      const int64_t row = i / dim;
      const int expert = row < 40 ? 0 : row < 41 ? 3 : 4;
      const bool owned = row >= 2 && row < 90;
      const double added = biased ? double(acc_t<T>(bias[expert * dim + i % dim])) : 0;
      ASSERT_EQ(double(acc_t<T>(out[i])), owned ? double(acc_t<T>(before[i])) + added : 0) << "row " << row;
    }
  }

  template <typename T>
  void rows_are_summed() {
    const int64_t dim = param();
    const auto rows = small_integers<T>(kNumRows * dim);
    std::vector<T> out(kNumExperts * dim, T(99));
    launch_sum_rows(kExperts, rows.data(), dim, out.data(), nullptr);
    for (int64_t i = 0; i < kNumExperts * dim; ++i) {
      double sum = 0;
      for (int64_t row = kOffsets[i / dim]; row < kOffsets[i / dim + 1]; ++row) {
        sum += double(acc_t<T>(rows[row * dim + i % dim]));
      }
      ASSERT_EQ(double(acc_t<T>(out[i])), sum) << "expert " << i / dim;
    }
  }
};

TEST_P(ExpertRows, GetTheirExpertsBias) {
  for (bool biased : {false, true}) {
    bias_is_added<float>(biased);
    bias_is_added<double>(biased);
    bias_is_added<c10::BFloat16>(biased);
  }
}

TEST_P(ExpertRows, AreSummed) {
  rows_are_summed<float>();
  rows_are_summed<double>();
  rows_are_summed<c10::BFloat16>();
}

TEST_P(ExpertRows, OfExpertsWithoutAnyLeaveZeros) {
  const int64_t size = 3 * param();
  std::vector<float> out(kNumExperts * size, 7);
  launch_zero_empty_experts(kExperts, size, out.data(), nullptr);
  for (int64_t i = 0; i < kNumExperts * size; ++i) {
    const int64_t e = i / size;
    ASSERT_EQ(out[i], e == 1 || e == 2 || e == 5 ? 0 : 7) << "expert " << e;
  }
}

TEST_P(ExpertRows, AddTheirProducts) {
  const int64_t size = 3 * param();
  const auto product = small_integers<c10::BFloat16>(kNumExperts * size);
  const auto before = small_integers<c10::BFloat16>(kNumExperts * size);
  std::vector<c10::BFloat16> sum = before;
  launch_add_experts(kExperts, product.data(), size, sum.data(), nullptr);
  for (int64_t i = 0; i < kNumExperts * size; ++i) {
    const int64_t e = i / size;
    const float added = e == 1 || e == 2 || e == 5 ? 0 : float(product[i]);
    ASSERT_EQ(float(sum[i]), float(before[i]) + added) << "expert " << e;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, ExpertRows, simt::under_all_schedules(std::vector<int>{0, 1, 31, 32, 33, 255, 256, 257}),
    [](const auto& info) {
      return simt::to_string(std::get<0>(info.param)) + "_dim" + std::to_string(std::get<1>(info.param));
    });

// Products of all experts, against sums in float64.
struct Shape {
  const char* name;
  std::vector<int64_t> offsets;
  int64_t num_rows;
  int width, other; // of the rows; of the output
  int padding = 0;  // elements between rows
};

class Products : public simt::ScheduleTest<Shape> {
 protected:
  const Shape shape = param();
  const int num_experts = static_cast<int>(shape.offsets.size()) - 1;
  const std::vector<int32_t> ends{shape.offsets.begin() + 1, shape.offsets.end()};

  // What a sum of products with float32 accumulation, or with three parts of float32, may be off by: a rounding of the
  // output, one of each addition, and 2^-23 of a product that leaves out its three smallest parts.
  template <typename T>
  static double bound(double sum, double magnitude, int64_t terms) {
    constexpr double kOut = std::is_same_v<T, float>       ? 0x1p-24
                            : std::is_same_v<T, double>    ? 0x1p-53
                            : std::is_same_v<T, c10::Half> ? 0x1p-11
                                                           : 0x1p-8;
    const double acc = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
    return kOut * std::abs(sum) + acc * double(terms + 4) * magnitude + 0x1p-25 * std::is_same_v<T, c10::Half>;
  }

  template <typename T>
  static std::vector<T> padded(const std::vector<T>& values, int64_t cols, int64_t stride) {
    std::vector<T> rows(values.size() / std::max<int64_t>(cols, 1) * stride, T(NAN));
    for (size_t i = 0; i < values.size(); ++i) {
      rows[i / cols * stride + i % cols] = values[i];
    }
    return rows;
  }

  // Whether so many elements are each a multiple of 16 bytes: then operands come by asynchronous copies.
  template <typename T>
  static bool are_whole(const std::vector<int64_t>& sizes) {
    return std::ranges::all_of(sizes, [](int64_t size) { return size * sizeof(T) % kAccessBytes == 0; });
  }

  // By the ends where no row comes before the first expert's.
  ExpertBounds bounds(bool by_ends) const {
    const bool as_ends = by_ends && shape.offsets.front() == 0;
    return {as_ends ? nullptr : shape.offsets.data(), ends.data(), num_experts};
  }

  int64_t expert_of(int64_t row) const {
    for (int64_t e = num_experts - 1; e >= 0; --e) {
      if (shape.offsets[e] <= row && row < shape.offsets[e + 1]) {
        return e;
      }
    }
    return -1;
  }

  template <typename T, bool kAlongB>
  void rows_are_multiplied(bool biased) {
    const int depth = shape.width, cols = shape.other;
    const int64_t stride = depth + shape.padding, b_stride = (kAlongB ? depth : cols) + shape.padding;
    const auto x = random_values<T>(shape.num_rows * depth, 1);
    const auto weight = random_values<T>(int64_t{num_experts} * cols * depth, 2); // as it is stored
    const auto bias = random_values<T>(int64_t{num_experts} * cols, 3);
    const auto x_rows = padded(x, depth, stride), weight_rows = padded(weight, b_stride - shape.padding, b_stride);
    std::vector<T> out(shape.num_rows * cols, T(NAN));
    GroupedProduct<T> p = {};
    p.experts = bounds(biased);
    p.num_rows = shape.num_rows;
    p.a = x_rows.data();
    p.b = weight_rows.data();
    p.a_stride = stride;
    p.b_stride = b_stride;
    p.b_expert_stride = b_stride * (kAlongB ? cols : depth);
    p.bias = biased ? bias.data() : nullptr;
    p.out = out.data();
    p.cols = cols;
    p.depth = depth;
    p.aligned = are_whole<T>({depth, stride, kAlongB ? depth : cols, b_stride, p.b_expert_stride});
    launch_grouped_product<T, true, kAlongB>(p, nullptr);
    for (int64_t i = 0; i < shape.num_rows * cols; ++i) {
      const int64_t row = i / cols, col = i % cols, e = expert_of(row);
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; e >= 0 && k < depth; ++k) {
        const double w = double(weight[kAlongB ? (e * cols + col) * depth + k : (e * depth + k) * cols + col]);
        sum += double(x[row * depth + k]) * w;
        magnitude += std::abs(double(x[row * depth + k]) * w);
      }
      if (e >= 0 && biased) {
        sum += double(bias[e * cols + col]);
        magnitude += std::abs(double(bias[e * cols + col]));
      }
      ASSERT_NEAR(double(out[i]), sum, bound<T>(sum, magnitude, depth)) << "row " << row << ", column " << col;
    }
  }

  template <typename T>
  void experts_are_summed() {
    const int rows = shape.width, cols = shape.other;
    const auto grad = random_values<T>(shape.num_rows * rows, 4), x = random_values<T>(shape.num_rows * cols, 5);
    const auto grad_rows = padded(grad, rows, rows + shape.padding), x_rows = padded(x, cols, cols + shape.padding);
    std::vector<T> out(int64_t{num_experts} * rows * cols, T(NAN));
    GroupedProduct<T> p = {};
    p.experts = bounds(std::is_same_v<T, float>);
    p.num_rows = shape.num_rows;
    p.a = grad_rows.data();
    p.b = x_rows.data();
    p.a_stride = rows + shape.padding;
    p.b_stride = cols + shape.padding;
    p.out = out.data();
    p.rows = rows;
    p.cols = cols;
    p.aligned = are_whole<T>({rows, p.a_stride, cols, p.b_stride});
    launch_grouped_product<T, false, false>(p, nullptr);
    for (int64_t i = 0; i < int64_t(out.size()); ++i) {
      const int64_t e = i / cols / rows, row = i / cols % rows, col = i % cols;
      double sum = 0, magnitude = 0;
      for (int64_t r = shape.offsets[e]; r < shape.offsets[e + 1]; ++r) {
        sum += double(grad[r * rows + row]) * double(x[r * cols + col]);
        magnitude += std::abs(double(grad[r * rows + row]) * double(x[r * cols + col]));
      }
      const int64_t terms = shape.offsets[e + 1] - shape.offsets[e];
      ASSERT_NEAR(double(out[i]), sum, bound<T>(sum, magnitude, terms)) << "expert " << e << ", row " << row;
    }
    // Added to what is there, with the bits of a sum of both; without rows nothing is touched.
    const auto before = random_values<T>(int64_t(out.size()), 6);
    auto both = before;
    p.out = both.data();
    launch_grouped_product<T, false, false, true>(p, nullptr);
    for (int64_t i = 0; i < int64_t(out.size()); ++i) {
      const auto wanted = static_cast<T>(acc_t<T>(before[i]) + acc_t<T>(out[i]));
      ASSERT_EQ(double(both[i]), double(wanted)) << "expert " << i / cols / rows;
    }
  }
};
TEST_P(Products, OfRowsMatch) {
  rows_are_multiplied<c10::BFloat16, true>(true);
  rows_are_multiplied<c10::Half, false>(true);
  rows_are_multiplied<float, true>(false);
  rows_are_multiplied<double, false>(true);
}

TEST_P(Products, OfRowsAndTransposedWeightsMatch) {
  rows_are_multiplied<c10::BFloat16, false>(false);
  rows_are_multiplied<float, false>(true);
  rows_are_multiplied<double, true>(false);
}

TEST_P(Products, OverRowsMatch) {
  experts_are_summed<c10::BFloat16>();
  experts_are_summed<float>();
  experts_are_summed<double>();
}

// Experts without rows, and from the 33rd on those that a warp finds in its second look.
std::vector<int64_t> skewed() {
  std::vector<int64_t> offsets(36, 0);
  for (int e = 1; e <= 35; ++e) {
    offsets[e] = offsets[e - 1] + (e == 7 ? 131 : e % 3 == 0 ? 0 : e % 5);
  }
  return offsets;
}

std::vector<Shape> shapes() {
  return {
      {"tails", {2, 3, 3, 140, 141}, 145, 40, 72},
      {"unaligned", {0, 5, 70}, 70, 35, 17},
      {"padded", {0, 33, 66}, 67, 24, 8, 8},
      {"steps", {0, 97}, 97, 104, 8},
      {"tiles", {0, 129, 130}, 130, 136, 136},
      {"skewed", skewed(), 200, 16, 8},
      {"one_element", {0, 1}, 1, 1, 1},
      {"no_rows", {0, 0, 0}, 0, 8, 8},
      {"no_width", {0, 3, 5}, 6, 0, 8},
      {"no_output", {0, 3, 5}, 6, 8, 0},
      {"no_experts", {3}, 5, 8, 8},
  };
}

INSTANTIATE_TEST_SUITE_P(Schedules, Products, simt::under_all_schedules(shapes()), [](const auto& info) {
  return simt::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
});

} // namespace
} // namespace moe_ext::grouped_gemm
