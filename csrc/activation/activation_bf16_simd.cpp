// Activation loops of bfloat16, with functions that are good to 2^-16: next to the 2^-8 of the rounding at the end,
// more would not be seen. Compiled without fused multiply-add: every instruction set computes the same bits.
#include "activation/activation_loops.h"
#include "activation/activation_math.h"

namespace moe_ext::activation::MOE_ISA {
namespace {

// 2^y for -125 <= y <= 128, infinity at 128. y = n + f, |f| <= 1/2; adding 1.5 * 2^23 rounds n to an integer and leaves
// it in the low bits, from where it goes into the exponent. A minimax fit of 2^f, good to 2^-18.4.
MOE_INLINE float exp2_short(float y) {
  const float shifted = y + 12582912.0f;
  const float f = y - (shifted - 12582912.0f);
  const float square = f * f;
  const float p = (1.0f + 0.6931242f * f) + square * ((0.24024099f + 0.055906426f * f) + square * 0.009582853f);
  return bit_cast<float>(bit_cast<uint32_t>(p) + (bit_cast<uint32_t>(shifted) << 23));
}

MOE_INLINE float at_least(float low, float x) {
  return x > low ? x : low;
}

// 1 + exp(-x), infinity where exp(x) is below 2^-128: x / infinity is the zero that is wanted.
MOE_INLINE float one_plus_exp(float x) {
  const float y = at_least(-125.0f, -1.44269504f * x);
  return 1.0f + exp2_short(y < 128.0f ? y : 128.0f);
}

// As normal_cdf of activation_math.h: Phi(-a) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.31 a), a fit good to 2^-17.7.
MOE_INLINE Cdf<float> normal_cdf_short(float x) {
  const float a = x < 0 ? -x : x;
  const float t = 1.0f / (1.0f + 0.31f * a);
  const float y = -0.72134752f * (x * x);
  const float e = y < -125.0f ? 0.0f : exp2_short(at_least(-125.0f, y));
  const float square = t * t;
  const float high = (0.015744742f + 0.1804503f * t) - square * 0.07392912f;
  const float p = (0.1238607f + 0.12044127f * t) + square * (0.13342978f + t * high);
  const float lower = (e * t) * p;
  return {x < 0 ? lower : 1.0f - lower, 0.39894228f * e};
}

template <Kind kKind>
struct ShortFunction : Function<kKind> {};

// s' = s (1 - s): what 1 - s loses for a large x is below 2^-18 of the slope.
template <>
struct ShortFunction<Kind::kSilu> {
  static MOE_INLINE float value(float x) {
    return x / one_plus_exp(x);
  }
  static MOE_INLINE float value_and_grad(float x, float g, float& grad) {
    const float s = 1.0f / one_plus_exp(x);
    grad = g * (s + x * (s * (1.0f - s)));
    return x * s;
  }
};

template <>
struct ShortFunction<Kind::kGelu> {
  static MOE_INLINE float value(float x) {
    return x * normal_cdf_short(x).value;
  }
  static MOE_INLINE float value_and_grad(float x, float g, float& grad) {
    const Cdf<float> cdf = normal_cdf_short(x);
    grad = g * (cdf.value + x * cdf.density);
    return x * cdf.value;
  }
};

template <>
struct ShortFunction<Kind::kGeluTanh> {
  static MOE_INLINE float value(float x) {
    return x / one_plus_exp(Function<Kind::kGeluTanh>::twice_u(x));
  }
  static MOE_INLINE float value_and_grad(float x, float g, float& grad) {
    const float s = 1.0f / one_plus_exp(Function<Kind::kGeluTanh>::twice_u(x));
    grad = g * (s + x * (s * (1.0f - s)) * Function<Kind::kGeluTanh>::twice_slope(x));
    return x * s;
  }
};

} // namespace

extern const Loops<BFloat16> bf16_table;
const Loops<BFloat16> bf16_table = LoopsOf<ShortFunction, BFloat16>::kTable;

} // namespace moe_ext::activation::MOE_ISA
