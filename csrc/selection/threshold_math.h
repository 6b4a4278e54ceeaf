// Adaptation of a carried threshold to the number of elements that passed it, shared by all backends.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::topk {
namespace {

MOE_INLINE double root(double x) {
#if defined(__CUDA_ARCH__)
  return ::sqrt(x);
#else
  return __builtin_sqrt(x);
#endif
}

// The next threshold, if `found` elements passed this one. The eighth root keeps the control loop stable even if the
// count falls with the sixteenth power of the threshold, as in the tail of a normal distribution.
template <typename Acc>
MOE_INLINE Acc adapted(Acc threshold, int64_t found, int64_t target) {
  const double ratio = static_cast<double>(found) / static_cast<double>(target);
  const double eighth = root(root(root(ratio)));
  const double factor = eighth < 0.5 ? 0.5 : eighth > 2.0 ? 2.0 : eighth;
  return static_cast<Acc>(static_cast<double>(threshold) * factor);
}

} // namespace
} // namespace moe_ext::topk
