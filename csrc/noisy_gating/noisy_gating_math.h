// Maths of the noisy gate that loops and kernels share. Internal linkage, for the reason in simd.h.
#pragma once

#include "activation/activation_math.h"
#include "gating/score_math.h"

namespace moe_ext::noisy_gating {
namespace {

// Bound of |z|. Beyond it the normal density is zero in double, and its product with an infinite z would be NaN.
constexpr int kMostDeviations = 40;

// (x - threshold) / deviation, clamped to +-kMostDeviations.
template <typename Acc>
MOE_INLINE Acc standardize(Acc x, Acc threshold, Acc deviation) {
  const Acc z = (x - threshold) / deviation;
  const Acc above = z < Acc(-kMostDeviations) ? Acc(-kMostDeviations) : z;
  return above > Acc(kMostDeviations) ? Acc(kMostDeviations) : above;
}

// Smallest deviation. Without it, the deviation of a noise logit far below zero would be flushed to zero, and logits
// are divided by deviations.
template <typename Acc>
constexpr Acc kLeastDeviation = sizeof(Acc) == 8 ? static_cast<Acc>(0x1p-511) : static_cast<Acc>(0x1p-63);

template <typename Acc>
MOE_INLINE Acc deviation_of(Acc noise_logit, Acc epsilon) {
  const Acc deviation = gating::softplus(noise_logit) + epsilon;
  return deviation > kLeastDeviation<Acc> ? deviation : kLeastDeviation<Acc>;
}

} // namespace
} // namespace moe_ext::noisy_gating
