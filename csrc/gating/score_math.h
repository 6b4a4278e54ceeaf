// Pointwise score functions and their slopes, for loops and kernels. Internal linkage, for the reason in simd.h.
#pragma once

#include "common/philox.h"
#include "gating/gating_tables.h"

namespace moe_ext::gating {
namespace {

// log(1 + exp(x)). The factor e / (u - 1) undoes the rounding of u = 1 + e, for a small relative error far below zero.
template <typename Acc>
MOE_INLINE Acc softplus(Acc x) {
  const Acc e = exp_acc(x < 0 ? x : -x);
  const Acc u = Acc(1) + e;
  const Acc rounded = u - Acc(1);
  const Acc log1p = log_positive(u) * (e / (rounded > 0 ? rounded : Acc(1)));
  return (x > 0 ? x : Acc(0)) + (rounded > 0 ? log1p : e);
}

MOE_INLINE double sqrt_of(double x) {
#if defined(__CUDA_ARCH__)
  return ::sqrt(x);
#else
  return __builtin_sqrt(x);
#endif
}

MOE_INLINE float sqrt_of(float x) {
  return sqrt_acc(x);
}

// sqrt(softplus(x)). Far below zero it equals exp(x / 2) to the last place, whereas exp(x) would underflow.
template <typename Acc>
MOE_INLINE Acc sqrt_softplus(Acc x) {
  constexpr Acc kTail = sizeof(Acc) == 8 ? Acc(-37) : Acc(-17);
  const Acc tail = exp_acc(Acc(0.5) * (x < kTail ? x : kTail));
  const Acc root = sqrt_of(softplus(x < kTail ? kTail : x));
  return x < kTail ? tail : root;
}

// Score f(x) for a pointwise score function.
template <typename Acc>
MOE_INLINE Acc pointwise_score(ScoreFn fn, Acc x) {
  return fn == ScoreFn::kSigmoid ? sigmoid_acc(x) : sqrt_softplus(x);
}

// f'(x) / f(x) for s = f(x) = sqrt(log(1 + exp(x))), which is (1 - exp(-t)) / 2t with t = s^2. Near t = 0, where the
// difference cancels, a series replaces it.
template <typename Acc>
MOE_INLINE Acc sqrt_softplus_slope(Acc s) {
  constexpr int kTerms = sizeof(Acc) == 8 ? 15 : 8; // further terms, 0.5^n / (n + 1)!, are below the last place
  const Acc t = s * s;
  const Acc near = t < Acc(0.5) ? t : Acc(0.5), far = t < Acc(0.5) ? Acc(0.5) : t;
  Acc series = 1;
  for (int n = kTerms; n > 0; --n) {
    series = Acc(1) - near * series * (Acc(1) / Acc(n + 1));
  }
  return Acc(0.5) * (t < Acc(0.5) ? series : (Acc(1) - exp_acc(-far)) / far);
}

// f'(x) / f(x) as a function of s = f(x). For the softmax the factor is 1, because the callers subtract the mean.
template <typename Acc>
MOE_INLINE Acc score_slope(ScoreFn fn, Acc s) {
  return fn == ScoreFn::kSigmoid ? Acc(1) - s : fn == ScoreFn::kSqrtSoftplus ? sqrt_softplus_slope(s) : Acc(1);
}

} // namespace
} // namespace moe_ext::gating
