// Activation functions and their slopes, for CPU loops and kernels. Internal linkage, as simd.h.
#pragma once

#include "activation/activation_tables.h"
#include "common/simd.h"

namespace moe_ext::activation {
namespace {

template <typename Acc>
struct Cdf {
  Acc value;
  Acc density;
};

// Phi(x) of the normal distribution, with small relative error also in the lower tail, where 1 + erf(x / sqrt 2)
// cancels. Phi(-a) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.35 a). P is a minimax fit on 0 <= a <= 14 with relative error
// 3.2e-8, and 2.7e-7 evaluated in float. Beyond 14 the exponential is zero.
MOE_INLINE Cdf<float> normal_cdf(float x) {
  const float a = x < 0 ? -x : x;
  const float t = 1.0f / fma_acc(0.35f, a, 1.0f);
  const float e = exp_acc(-0.5f * (x * x));
  float p = -0.029145924f;
  p = fma_acc(p, t, 0.14397167f);
  p = fma_acc(p, t, -0.2557142f);
  p = fma_acc(p, t, 0.15917413f);
  p = fma_acc(p, t, -0.023109807f);
  p = fma_acc(p, t, 0.10550799f);
  p = fma_acc(p, t, 0.119832866f);
  p = fma_acc(p, t, 0.13986187f);
  p = fma_acc(p, t, 0.1396214f);
  const float lower = e * (p * t);
  return {x < 0 ? lower : 1.0f - lower, 0.39894228f * e};
}

MOE_INLINE Cdf<double> normal_cdf(double x) {
  return {0.5 * erfc_acc(-0.70710678118654752440 * x), 0.39894228040143267794 * exp_acc(-0.5 * x * x)};
}

// s(x) and s'(x) = s (1 - s). The slope is computed without the cancellation of 1 - s.
template <typename Acc>
MOE_INLINE Cdf<Acc> logistic_cdf(Acc x) {
  const Acc e = exp_acc(x < 0 ? x : -x);
  const Acc r = Acc(1) / (Acc(1) + e);
  return {(x < 0 ? e : Acc(1)) * r, e * r * r};
}

// `value` is f(x). `value_and_grad` also sets grad = g f'(x).
template <Kind kKind>
struct Function;

template <>
struct Function<Kind::kSilu> {
  template <typename Acc>
  static MOE_INLINE Acc value(Acc x) {
    return x * sigmoid_acc(x);
  }
  template <typename Acc>
  static MOE_INLINE Acc value_and_grad(Acc x, Acc g, Acc& grad) {
    const Cdf<Acc> cdf = logistic_cdf(x);
    grad = g * (cdf.value + x * cdf.density);
    return x * cdf.value;
  }
};

template <>
struct Function<Kind::kGelu> {
  template <typename Acc>
  static MOE_INLINE Acc value(Acc x) {
    return x * normal_cdf(x).value;
  }
  template <typename Acc>
  static MOE_INLINE Acc value_and_grad(Acc x, Acc g, Acc& grad) {
    const Cdf<Acc> cdf = normal_cdf(x);
    grad = g * (cdf.value + x * cdf.density);
    return x * cdf.value;
  }
};

// Uses (1 + tanh u) / 2 = s(2 u), whose relative error stays small where 1 + tanh u cancels.
template <>
struct Function<Kind::kGeluTanh> {
  template <typename Acc>
  static MOE_INLINE Acc twice_u(Acc x) {
    return Acc(1.59576912160573071176) * (x + Acc(0.044715) * x * x * x);
  }
  // Without the bound, the square of a large x would be infinite, and its product with a density of zero NaN.
  template <typename Acc>
  static MOE_INLINE Acc twice_slope(Acc x) {
    const Acc square = x * x > Acc(1e30) ? Acc(1e30) : x * x;
    return Acc(1.59576912160573071176) * (Acc(1) + Acc(3 * 0.044715) * square);
  }
  template <typename Acc>
  static MOE_INLINE Acc value(Acc x) {
    return x * sigmoid_acc(twice_u(x));
  }
  template <typename Acc>
  static MOE_INLINE Acc value_and_grad(Acc x, Acc g, Acc& grad) {
    const Cdf<Acc> cdf = logistic_cdf(twice_u(x));
    grad = g * (cdf.value + x * cdf.density * twice_slope(x));
    return x * cdf.value;
  }
};

// The comparisons are written so that NaN passes through. At x <= 0 the gradient is zero even if g is infinite.
template <>
struct Function<Kind::kRelu> {
  template <typename Acc>
  static MOE_INLINE Acc value(Acc x) {
    return x <= 0 ? Acc(0) : x;
  }
  template <typename Acc>
  static MOE_INLINE Acc value_and_grad(Acc x, Acc g, Acc& grad) {
    grad = x <= 0 ? Acc(0) : g;
    return value(x);
  }
};

template <>
struct Function<Kind::kReluSquared> {
  template <typename Acc>
  static MOE_INLINE Acc value(Acc x) {
    return x <= 0 ? Acc(0) : x * x;
  }
  template <typename Acc>
  static MOE_INLINE Acc value_and_grad(Acc x, Acc g, Acc& grad) {
    grad = x <= 0 ? Acc(0) : Acc(2) * x * g;
    return value(x);
  }
};

} // namespace
} // namespace moe_ext::activation
