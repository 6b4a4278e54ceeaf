// Decays of recurrences from their logarithms, for CPU loops and kernels.
#pragma once

#include "common/simd.h"

namespace moe_ext::recurrence {
namespace {

// exp(log). Clamped to 89, where the result is inf, because exp_acc accepts no larger arguments.
MOE_INLINE float decay_of(float log) {
  return exp_acc(log > 89.0f ? 89.0f : log);
}

MOE_INLINE double decay_of(double log) {
  return exp_acc(log);
}

} // namespace
} // namespace moe_ext::recurrence
