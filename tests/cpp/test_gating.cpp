// The loops of the gate against scalar formulas in double, for every instruction set, dtype and awkward size.
#include "gating/gating_tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "isa.h"

namespace moe_ext::gating {

MOE_EXT_TABLES(Kernels)

namespace {

// E, K: lists in registers and in memory, with and without a tail of the transposition.
struct Size {
  int64_t num_experts;
  int64_t top_k;
};

// Two roundings an operation, over a sum of E terms.
template <typename T>
double tolerance(int64_t num_experts) {
  const double unit = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  return (2 * num_experts + 32) * unit;
}

template <typename T>
double rounding() {
  return std::is_same_v<T, BFloat16> ? 0x1p-8 : std::is_same_v<T, Half> ? 0x1p-11 : 0;
}

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<T> values(n);
  for (T& value : values) {
    value = from_acc<T>(normal(generator));
  }
  return values;
}

template <typename T>
std::vector<double> softmax(const T* x, int64_t n) {
  std::vector<double> p(n);
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t e = 0; e < n; ++e) {
    top = std::max<double>(top, to_acc(x[e]));
  }
  for (int64_t e = 0; e < n; ++e) {
    sum += p[e] = std::exp(static_cast<double>(to_acc(x[e])) - top);
  }
  for (double& value : p) {
    value /= sum;
  }
  return p;
}

template <typename T>
std::vector<int64_t> top_experts(const T* x, const Size& size) {
  std::vector<int64_t> order(size.num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return to_acc(x[a]) > to_acc(x[b]); });
  order.resize(size.top_k);
  return order;
}

class GateLoops : public ::testing::TestWithParam<std::tuple<std::string, Size, int64_t>> {
 protected:
  const Kernels& kernels() const {
    return table(std::get<0>(GetParam()));
  }
  const Size& size() const {
    return std::get<1>(GetParam());
  }
  int64_t num_tokens() const {
    return std::get<2>(GetParam());
  }
  GateOptions options(bool renormalize) const {
    return {size().num_experts, size().top_k, 1, 1, ScoreFn::kSoftmax, renormalize, 1.0};
  }
  // Every third token is masked.
  std::unique_ptr<bool[]> mask() const {
    auto real = std::make_unique<bool[]>(num_tokens());
    for (int64_t t = 0; t < num_tokens(); ++t) {
      real[t] = t % 3 != 1;
    }
    return real;
  }

  template <typename T>
  void gate_matches(bool renormalize);
  template <typename T>
  void gate_backward_matches();
  template <typename T>
  void z_loss_matches();
};

template <typename T>
void GateLoops::gate_matches(bool renormalize) {
  using Acc = acc_t<T>;
  const auto [n, top_k] = size();
  const std::vector<T> logits = random_values<T>(num_tokens() * n, 1);
  const auto real = mask();
  std::vector<Acc> weights(num_tokens() * top_k + 1, 7), score_sum(n, 7), scratch(scratch_size(options(renormalize)));
  std::vector<int64_t> idx(num_tokens() * top_k + 1, 7), counts(n, 0), expected_counts(n, 0);
  std::vector<double> expected_sum(n, 0);
  const GateArgs<T> args{logits.data(), nullptr, real.get(), weights.data(), idx.data(), options(renormalize)};
  ASSERT_EQ(kernels().of<T>().gate(args, 0, num_tokens(), score_sum.data(), counts.data(), scratch.data()), -1);
  for (int64_t t = 0; t < num_tokens(); ++t) {
    if (!real[t]) {
      for (int64_t k = 0; k < top_k; ++k) {
        ASSERT_EQ(idx[t * top_k + k], -1);
        ASSERT_EQ(weights[t * top_k + k], 0);
      }
      continue;
    }
    const std::vector<double> p = softmax(logits.data() + t * n, n);
    const std::vector<int64_t> chosen = top_experts(logits.data() + t * n, size());
    double sum = 0;
    for (int64_t e : chosen) {
      sum += p[e];
      ++expected_counts[e];
    }
    for (int64_t k = 0; k < top_k; ++k) {
      ASSERT_EQ(idx[t * top_k + k], chosen[k]) << "token " << t << ", choice " << k;
      const double expected = p[chosen[k]] / (renormalize ? sum : 1);
      ASSERT_NEAR(weights[t * top_k + k], expected, tolerance<T>(n) * expected);
    }
    for (int64_t e = 0; e < n; ++e) {
      expected_sum[e] += p[e];
    }
  }
  for (int64_t e = 0; e < n; ++e) {
    ASSERT_EQ(counts[e], expected_counts[e]);
    ASSERT_NEAR(score_sum[e], expected_sum[e], tolerance<T>(n + num_tokens()) * expected_sum[e]);
  }
  ASSERT_EQ(weights.back(), 7) << "wrote past the weights";
  ASSERT_EQ(idx.back(), 7) << "wrote past the indices";
}

template <typename T>
void GateLoops::gate_backward_matches() {
  using Acc = acc_t<T>;
  const auto [n, top_k] = size();
  const std::vector<T> logits = random_values<T>(num_tokens() * n, 1);
  const std::vector<Acc> grad_weights = random_values<Acc>(num_tokens() * top_k, 2);
  const std::vector<Acc> grad_score_sum = random_values<Acc>(n, 3);
  const auto real = mask();
  std::vector<int64_t> idx(num_tokens() * top_k, -1);
  std::vector<T> grad(num_tokens() * n + 1, from_acc<T>(7));
  std::vector<Acc> scratch(scratch_size(options(false)));
  for (int64_t t = 0; t < num_tokens(); ++t) {
    if (real[t]) {
      const std::vector<int64_t> chosen = top_experts(logits.data() + t * n, size());
      std::copy(chosen.begin(), chosen.end(), idx.begin() + t * top_k);
    }
  }
  const GateGradArgs<T> args{grad.data(),         logits.data(),         idx.data(),
                             grad_weights.data(), grad_score_sum.data(), options(false)};
  kernels().of<T>().gate_backward(args, 0, num_tokens(), scratch.data());
  for (int64_t t = 0; t < num_tokens(); ++t) {
    const std::vector<double> p = softmax(logits.data() + t * n, n);
    std::vector<double> g(grad_score_sum.begin(), grad_score_sum.end());
    for (int64_t k = 0; k < top_k && real[t]; ++k) {
      g[idx[t * top_k + k]] += grad_weights[t * top_k + k];
    }
    double mean = 0, magnitude = 0;
    for (int64_t e = 0; e < n; ++e) {
      mean += p[e] * g[e];
      magnitude = std::max(magnitude, std::abs(g[e]));
    }
    for (int64_t e = 0; e < n; ++e) {
      const double expected = real[t] ? p[e] * (g[e] - mean) : 0;
      const double slack = rounding<T>() * std::abs(expected) + (std::is_same_v<T, Half> ? 0x1p-25 : 0);
      ASSERT_NEAR(to_acc(grad[t * n + e]), expected, slack + 2 * tolerance<T>(n) * magnitude) << "token " << t;
    }
  }
  ASSERT_EQ(to_acc(grad.back()), 7) << "wrote past the gradient";
}

template <typename T>
void GateLoops::z_loss_matches() {
  using Acc = acc_t<T>;
  const int64_t n = size().num_experts;
  const std::vector<T> logits = random_values<T>(num_tokens() * n, 1);
  const auto real = mask();
  std::vector<T> grad(num_tokens() * n + 1, from_acc<T>(7));
  std::vector<Acc> scratch(scratch_size(z_loss_options(n)));
  const ZLossArgs<T> args{logits.data(), real.get(), n};
  const double loss = kernels().of<T>().z_loss(args, 0, num_tokens(), scratch.data());
  kernels().of<T>().z_loss_backward(args, grad.data(), Acc(0.5), 0, num_tokens(), scratch.data());
  double expected_loss = 0;
  for (int64_t t = 0; t < num_tokens(); ++t) {
    const std::vector<double> p = softmax(logits.data() + t * n, n);
    const double lse = static_cast<double>(to_acc(logits[t * n])) - std::log(p[0]);
    expected_loss += real[t] ? lse * lse : 0;
    for (int64_t e = 0; e < n; ++e) {
      const double expected = real[t] ? 0.5 * lse * p[e] : 0;
      const double slack = rounding<T>() * std::abs(expected) + (std::is_same_v<T, Half> ? 0x1p-25 : 0);
      ASSERT_NEAR(to_acc(grad[t * n + e]), expected, slack + tolerance<T>(n) * 16 * p[e]) << "token " << t;
    }
  }
  ASSERT_NEAR(loss, expected_loss, tolerance<T>(n) * (expected_loss + 16.0 * num_tokens()));
  ASSERT_EQ(to_acc(grad.back()), 7) << "wrote past the gradient";
}

TEST_P(GateLoops, GateMatchesScalarFormula) {
  for (bool renormalize : {false, true}) {
    gate_matches<float>(renormalize);
    gate_matches<double>(renormalize);
    gate_matches<BFloat16>(renormalize);
    gate_matches<Half>(renormalize);
  }
}

TEST_P(GateLoops, BackwardMatchesScalarFormula) {
  gate_backward_matches<float>();
  gate_backward_matches<double>();
  gate_backward_matches<BFloat16>();
  gate_backward_matches<Half>();
}

TEST_P(GateLoops, ZLossMatchesScalarFormula) {
  z_loss_matches<float>();
  z_loss_matches<double>();
  z_loss_matches<BFloat16>();
  z_loss_matches<Half>();
}

// The first of the refused tokens is named, wherever it lies in a tile, and a masked one never is.
TEST_P(GateLoops, NamesTheFirstRefusedToken) {
  const auto [n, top_k] = size();
  std::vector<float> logits(num_tokens() * n, 0), weights(num_tokens() * top_k), score_sum(n);
  std::vector<float> scratch(scratch_size(options(true)));
  std::vector<int64_t> idx(num_tokens() * top_k), counts(n);
  const auto real = mask();
  const GateArgs<float> args{logits.data(), nullptr, real.get(), weights.data(), idx.data(), options(true)};
  for (float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (int64_t t = 0; t < num_tokens(); ++t) {
      logits[t * n + t % n] = value;
      logits[(num_tokens() - 1) * n] = value;
      const int64_t expected = real[t] ? t : real[num_tokens() - 1] ? num_tokens() - 1 : -1;
      const int64_t refused =
          kernels().f32.gate(args, 0, num_tokens(), score_sum.data(), counts.data(), scratch.data());
      ASSERT_EQ(refused, expected);
      logits[t * n + t % n] = logits[(num_tokens() - 1) * n] = 0;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, GateLoops,
    ::testing::Combine(
        ::testing::ValuesIn(moe_ext::testing::supported_isas()),
        ::testing::Values(Size{1, 1}, Size{6, 2}, Size{8, 8}, Size{33, 5}, Size{64, 6}),
        ::testing::Values(0, 1, 15, 16, 17, 256)),
    [](const auto& info) {
      const Size size = std::get<1>(info.param);
      return std::get<0>(info.param) + "_E" + std::to_string(size.num_experts) + "_K" + std::to_string(size.top_k) +
             "_T" + std::to_string(std::get<2>(info.param));
    });

} // namespace
} // namespace moe_ext::gating
