// The activation loops against the standard library in double, for every instruction set, dtype and awkward size.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "activation/activation_tables.h"
#include "isa.h"

namespace moe_ext::activation {

MOE_EXT_TABLES(Kernels)

namespace {

constexpr Kind kKinds[] = {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh, Kind::kRelu, Kind::kReluSquared};
constexpr Layout kLayouts[] = {Layout::kConcatenated, Layout::kInterleaved};

struct Point {
  double value;
  double slope;
  double terms;    // |f| + sum of the absolute terms of the slope
  double argument; // of the exponential, with the roundings that it has seen: it multiplies its relative error
};

Point smooth(double x, double cdf, double density, double argument) {
  return {x * cdf, cdf + x * density, std::abs(x * cdf) + cdf + std::abs(x * density), argument};
}

Point exact(Kind kind, double x) {
  switch (kind) {
    case Kind::kSilu: {
      const double s = 1 / (1 + std::exp(-x));
      return smooth(x, s, s / (1 + std::exp(x)), 0);
    }
    case Kind::kGelu:
      return smooth(x, 0.5 * std::erfc(-x * std::sqrt(0.5)), std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI), x * x);
    case Kind::kGeluTanh: {
      const double u = std::sqrt(8 / M_PI) * (x + 0.044715 * x * x * x);
      const double s = 1 / (1 + std::exp(-u));
      const double slope = std::sqrt(8 / M_PI) * (1 + 3 * 0.044715 * x * x);
      return smooth(x, s, slope * s / (1 + std::exp(u)), 4 * std::abs(u));
    }
    case Kind::kRelu:
      return {std::max(x, 0.0), x > 0 ? 1.0 : 0.0, std::abs(x) + 1, 0};
    default:
      return {x > 0 ? x * x : 0, std::max(2 * x, 0.0), x * x + 2 * std::abs(x), 0};
  }
}

// A dozen roundings of the accumulator on the way (exponential 2.5, polynomial 4.5, division, sums and products), or
// the fits of bfloat16 and float16, which are good to 2^-16; the error of the exponential's argument, one rounding of
// the output; what the exponential flushes below 2^-126.
constexpr double kRoundings = 12;

template <typename T>
double tolerance(double result, double terms, double argument) {
  const double acc_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  const double out_eps = std::is_same_v<T, BFloat16> ? 0x1p-8 : std::is_same_v<T, Half> ? 0x1p-11 : acc_eps;
  const double flushed = std::is_same_v<T, Half> ? 0x1p-25 : 0x1p-118;
  const double roundings = sizeof(T) == 2 ? 256 : kRoundings;
  return terms * (roundings + std::min(argument, 700.0)) * acc_eps + std::abs(result) * out_eps + flushed;
}

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<T> values(n);
  for (T& value : values) {
    value = from_acc<T>(normal(generator));
  }
  return values;
}

class ActivationLoops : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  template <typename T>
  const Loops<T>& loops() const {
    return table(std::get<0>(GetParam())).template of<T>();
  }
  int64_t size() const {
    return std::get<1>(GetParam());
  }

  template <typename T>
  void plain_matches() {
    const std::vector<T> x = random_values<T>(size(), 1);
    const std::vector<T> grad = random_values<T>(size(), 2);
    std::vector<T> out(size() + 1, from_acc<T>(7));
    std::vector<T> grad_x = out;
    for (Kind kind : kKinds) {
      loops<T>().activation(kind, out.data(), x.data(), size());
      loops<T>().activation_backward(kind, grad_x.data(), grad.data(), x.data(), size());
      for (int64_t i = 0; i < size(); ++i) {
        const Point p = exact(kind, to_acc(x[i]));
        const double g = to_acc(grad[i]);
        ASSERT_NEAR(to_acc(out[i]), p.value, tolerance<T>(p.value, std::abs(p.value), p.argument)) << to_acc(x[i]);
        ASSERT_NEAR(to_acc(grad_x[i]), g * p.slope, tolerance<T>(g * p.slope, std::abs(g) * p.terms, p.argument))
            << to_acc(x[i]);
      }
      ASSERT_EQ(to_acc(out[size()]), 7) << "wrote past the end";
      ASSERT_EQ(to_acc(grad_x[size()]), 7) << "wrote past the end";
    }
  }

  template <typename T>
  void gated_matches(Kind kind, Layout layout, bool weighted) {
    const int64_t step = layout == Layout::kInterleaved ? 2 : 1;
    const int64_t to_up = layout == Layout::kInterleaved ? 1 : size();
    const std::vector<T> x = random_values<T>(2 * size(), 3);
    const std::vector<T> grad = random_values<T>(size(), 4);
    std::vector<T> out(size() + 1, from_acc<T>(7));
    std::vector<T> grad_x(2 * size() + 1, from_acc<T>(7));
    // A weight of one goes by the loop without weights.
    const acc_t<T> weight = weighted ? acc_t<T>(0.3f) : 1;
    loops<T>().gated(kind, layout, out.data(), x.data(), weight, size(), size());
    double grad_weight = 0, dot = 0, terms = 0;
    if (weighted) {
      grad_weight =
          loops<T>().gated_backward_weighted(kind, layout, grad_x.data(), grad.data(), x.data(), weight, size());
    } else {
      loops<T>().gated_backward(kind, layout, grad_x.data(), grad.data(), x.data(), size(), size());
    }
    for (int64_t i = 0; i < size(); ++i) {
      const Point p = exact(kind, to_acc(x[i * step]));
      const double up = to_acc(x[i * step + to_up]);
      const double g = static_cast<double>(to_acc(grad[i])) * weight;
      dot += to_acc(grad[i]) * p.value * up;
      terms += std::abs(to_acc(grad[i]) * p.value * up);
      const auto near = [&](T actual, double expected, double terms) {
        ASSERT_NEAR(to_acc(actual), expected, tolerance<T>(expected, terms, p.argument)) << to_acc(x[i * step]);
      };
      near(out[i], p.value * up * weight, std::abs(p.value * up) * weight);
      near(grad_x[i * step], g * up * p.slope, std::abs(g * up) * p.terms);
      near(grad_x[i * step + to_up], g * p.value, std::abs(g * p.value));
    }
    ASSERT_EQ(to_acc(out[size()]), 7) << "wrote past the end";
    ASSERT_EQ(to_acc(grad_x[2 * size()]), 7) << "wrote past the end";
    if (weighted) {
      // The functions are as good as for an output, before that is rounded; 16 sums of a sixteenth of the terms each.
      const double acc_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
      const double good_to = (std::is_same_v<T, BFloat16> ? 256 : 64) + static_cast<double>(size()) / 16 + 16;
      ASSERT_NEAR(grad_weight, dot, terms * good_to * acc_eps);
    }
  }

  template <typename T>
  void all_match() {
    plain_matches<T>();
    for (Kind kind : kKinds) {
      for (Layout layout : kLayouts) {
        gated_matches<T>(kind, layout, false);
        gated_matches<T>(kind, layout, true);
      }
    }
  }
};

TEST_P(ActivationLoops, MatchTheStandardLibrary) {
  all_match<float>();
  all_match<double>();
  all_match<BFloat16>();
  all_match<Half>();
}

INSTANTIATE_TEST_SUITE_P(
    Isa, ActivationLoops,
    ::testing::Combine(
        ::testing::ValuesIn(moe_ext::testing::supported_isas()), ::testing::Values(0, 1, 15, 16, 17, 255, 256, 257)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)); });

class ActivationSweep : public ::testing::TestWithParam<std::string> {};

// The relative error stays small where the values are tiny too: no cancellation in 1 + erf or 1 + tanh.
TEST_P(ActivationSweep, SmoothFunctionsKeepTheirRelativeErrorInTheTails) {
  std::vector<float> x;
  for (float at = -13.0f; at < 13.0f; at += 0.00037f) {
    x.push_back(at);
  }
  std::vector<float> out(x.size());
  for (Kind kind : {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh}) {
    table(GetParam()).f32.activation(kind, out.data(), x.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const Point p = exact(kind, x[i]);
      ASSERT_NEAR(out[i], p.value, tolerance<float>(p.value, std::abs(p.value), p.argument)) << x[i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, ActivationSweep, ::testing::ValuesIn(moe_ext::testing::supported_isas()),
    [](const auto& info) { return info.param; });

} // namespace
} // namespace moe_ext::activation
