// The activations' CUDA kernels, emulated, against the formulas in double, under every schedule. The formulas' accuracy
// is the Python tests' matter; here it is which element goes where, for every width, layout and alignment.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <random>

#include "activation/activation_kernels.cuh"
#include "schedules.h"

namespace moe_ext::activation {
namespace {

constexpr int kRows = 3;

// Two roundings to the output's dtype, and the functions' own error of a few roundings in float.
template <typename T>
double tolerance() {
  return std::is_same_v<T, c10::BFloat16> ? 0x1p-7 : std::is_same_v<T, c10::Half> ? 0x1p-10 : 0x1p-20;
}

double wide(double x) {
  return x;
}
double wide(float x) {
  return x;
}
template <typename T>
double wide(T x) {
  return static_cast<float>(x);
}

double value(Kind kind, double x) {
  switch (kind) {
    case Kind::kSilu:
      return x / (1 + std::exp(-x));
    case Kind::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Kind::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Kind::kRelu:
      return std::max(x, 0.0);
    default:
      return x > 0 ? x * x : 0;
  }
}

double slope(Kind kind, double x) {
  const double step = 1e-6;
  return (value(kind, x + step) - value(kind, x - step)) / (2 * step);
}

class Activations : public simt::ScheduleTest<int> {
 protected:
  template <typename T>
  void plain_matches(Kind kind) {
    const int64_t n = int64_t{kRows} * param();
    const auto x = random_values<T>(n, 1), grad = random_values<T>(n, 2);
    std::vector<T> out(n + 1, T(7)), grad_x(n + 1, T(7));
    launch_activation(kind, x.data(), n, out.data(), nullptr);
    launch_activation_backward(kind, grad.data(), x.data(), n, grad_x.data(), nullptr);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_NEAR(wide(out[i]), value(kind, wide(x[i])), tolerance<T>() * (1 + std::abs(wide(x[i])))) << i;
      const double expected = wide(grad[i]) * slope(kind, wide(x[i]));
      ASSERT_NEAR(wide(grad_x[i]), expected, 2 * tolerance<T>() * (1 + std::abs(expected))) << i;
    }
    ASSERT_EQ(wide(out[n]), 7) << "wrote past the end";
    ASSERT_EQ(wide(grad_x[n]), 7) << "wrote past the end";
  }

  template <typename T>
  void gated_matches(Kind kind, Layout layout) {
    const int64_t dim = param();
    const auto x = random_values<T>(kRows * 2 * dim, 1), grad = random_values<T>(kRows * dim, 2);
    std::vector<T> out(kRows * dim + 1, T(7)), grad_x(kRows * 2 * dim + 1, T(7));
    launch_gated_activation(kind, layout, x.data(), kRows, dim, out.data(), nullptr);
    launch_gated_activation_backward(kind, layout, grad.data(), x.data(), kRows, dim, grad_x.data(), nullptr);
    for (int64_t i = 0; i < kRows * dim; ++i) {
      const bool together = layout == Layout::kInterleaved;
      const int64_t gate = together ? 2 * i : i / dim * 2 * dim + i % dim;
      const int64_t up = together ? gate + 1 : gate + dim;
      const double f = value(kind, wide(x[gate])), g = wide(grad[i]);
      const double expected[] = {f * wide(x[up]), g * wide(x[up]) * slope(kind, wide(x[gate])), g * f};
      const double actual[] = {wide(out[i]), wide(grad_x[gate]), wide(grad_x[up])};
      for (int j = 0; j < 3; ++j) {
        ASSERT_NEAR(actual[j], expected[j], 4 * tolerance<T>() * (1 + std::abs(expected[j]))) << i << ", " << j;
      }
    }
    ASSERT_EQ(wide(out[kRows * dim]), 7) << "wrote past the end";
    ASSERT_EQ(wide(grad_x[kRows * 2 * dim]), 7) << "wrote past the end";
  }

  // Rows of a permutation: one of them has no slot, and one slot no row.
  template <typename T>
  void weighted_matches(Kind kind, Layout layout) {
    const int64_t dim = param();
    const auto x = random_values<T>(kRows * 2 * dim, 1), grad = random_values<T>(kRows * dim, 2);
    const std::vector<acc_t<T>> weights = {acc_t<T>(0.5), acc_t<T>(0.25), acc_t<T>(2)};
    const int64_t slot_of_row[kRows] = {2, -1, 0};
    std::vector<acc_t<T>> grad_weights(weights.size(), 0);
    std::vector<T> out(kRows * dim + 1, T(7)), grad_x(kRows * 2 * dim + 1, T(7));
    launch_gated_activation_weighted<true, T>(
        kind, layout, x.data(), weights.data(), slot_of_row, 3, kRows, dim, out.data(), nullptr);
    launch_gated_activation_weighted_backward<true, T>(
        kind, layout, grad.data(), x.data(), weights.data(), slot_of_row, 3, kRows, dim, grad_x.data(),
        grad_weights.data(), nullptr);
    for (int row = 0; row < kRows; ++row) {
      const int64_t slot = slot_of_row[row];
      const double weight = slot < 0 ? 0 : wide(weights[slot]);
      double dot = 0, terms = 0;
      for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
        const bool together = layout == Layout::kInterleaved;
        const int64_t gate = together ? 2 * i : row * 2 * dim + i % dim;
        const int64_t up = together ? gate + 1 : gate + dim;
        const double f = value(kind, wide(x[gate])), g = wide(grad[i]) * weight;
        const double expected[] = {f * wide(x[up]) * weight, g * wide(x[up]) * slope(kind, wide(x[gate])), g * f};
        const double actual[] = {wide(out[i]), wide(grad_x[gate]), wide(grad_x[up])};
        for (int j = 0; j < 3; ++j) {
          ASSERT_NEAR(actual[j], expected[j], 4 * tolerance<T>() * (1 + std::abs(expected[j]))) << i << ", " << j;
        }
        dot += wide(grad[i]) * f * wide(x[up]);
        terms += std::abs(wide(grad[i]) * f * wide(x[up]));
      }
      if (slot >= 0) {
        ASSERT_NEAR(wide(grad_weights[slot]), dot, 0x1p-18 * terms);
      }
    }
    ASSERT_EQ(wide(grad_weights[1]), 0) << "wrote to a slot without a row";
    ASSERT_EQ(wide(out[kRows * dim]), 7) << "wrote past the end";
    ASSERT_EQ(wide(grad_x[kRows * 2 * dim]), 7) << "wrote past the end";
  }

  template <typename T>
  void all_match() {
    for (Kind kind : {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh, Kind::kRelu, Kind::kReluSquared}) {
      plain_matches<T>(kind);
    }
    for (Kind kind : {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh, Kind::kRelu}) {
      gated_matches<T>(kind, Layout::kConcatenated);
      gated_matches<T>(kind, Layout::kInterleaved);
      weighted_matches<T>(kind, Layout::kConcatenated);
      weighted_matches<T>(kind, Layout::kInterleaved);
    }
  }
};

TEST_P(Activations, MatchTheFormulas) {
  all_match<float>();
  all_match<double>();
  all_match<c10::BFloat16>();
  all_match<c10::Half>();
}

// Widths that do and do not allow 16-byte accesses, and more than one walk of the grid.
INSTANTIATE_TEST_SUITE_P(
    Schedules, Activations, simt::under_all_schedules(std::vector<int>{0, 1, 31, 32, 33, 255, 256, 257, 2064}),
    [](const auto& info) {
      return simt::to_string(std::get<0>(info.param)) + "_dim" + std::to_string(std::get<1>(info.param));
    });

} // namespace
} // namespace moe_ext::activation
