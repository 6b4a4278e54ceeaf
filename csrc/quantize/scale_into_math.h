// Rounding and check of one element of a scaled copy, for the CPU loops of each instruction set and for CUDA kernels.
#pragma once

#include "common/simd.h"

namespace moe_ext::scale_into {
namespace {

// Type in which a product is checked and rounded: float64 only from float64 to float64, otherwise float32, through
// which torch converts, too.
template <typename T, typename U>
using wide_t = std::conditional_t<std::is_same_v<U, double>, acc_t<T>, float>;

// Bits of the least float that becomes infinite when converted to U: the midpoint above the largest finite number,
// which rounds to even, here to infinity.
template <typename U>
constexpr uint32_t kInfiniteFrom = std::is_same_v<U, BFloat16> ? 0x7F7F8000u
                                   : std::is_same_v<U, Half>   ? 0x477FF000u
                                                               : 0x7F800000u;

// Returns a word whose top bit is set if y as U is NaN or infinite. An OR of these words checks many elements.
template <typename U>
MOE_INLINE uint32_t nonfinite_bit(float y) {
  return (bit_cast<uint32_t>(y) & 0x7FFFFFFFu) + (0x80000000u - kInfiniteFrom<U>);
}

template <typename U>
MOE_INLINE uint64_t nonfinite_bit(double y) {
  return (bit_cast<uint64_t>(y) & 0x7FFFFFFFFFFFFFFFu) + 0x0010000000000000u;
}

MOE_INLINE bool has_top_bit(uint32_t bits) {
  return bits >> 31 != 0;
}

MOE_INLINE bool has_top_bit(uint64_t bits) {
  return bits >> 63 != 0;
}

template <typename U, typename Wide>
MOE_INLINE U rounded(Wide y) {
  if constexpr (std::is_same_v<U, double>) {
    return static_cast<double>(y);
  } else {
    return from_acc<U>(y);
  }
}

} // namespace
} // namespace moe_ext::scale_into
