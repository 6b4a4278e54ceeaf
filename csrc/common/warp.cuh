// Warp primitives. Every lane of the warp calls them; the order of additions is fixed.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.cuh"

namespace moe_ext {

constexpr unsigned kFullMask = 0xFFFFFFFFu;

// For blocks of one dimension.
__device__ __forceinline__ int lane_id() {
  return static_cast<int>(threadIdx.x) % kWarpSize;
}

__device__ __forceinline__ int warp_id() {
  return static_cast<int>(threadIdx.x) / kWarpSize;
}

__device__ __forceinline__ unsigned lanes_below() {
  return (1u << lane_id()) - 1u;
}

// Sum over each kWidth neighbouring lanes; the same bits in all of them.
template <int kWidth = kWarpSize, typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// Maximum over each kWidth neighbouring lanes. NaN is passed over.
template <int kWidth = kWarpSize, typename T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kFullMask, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

template <typename T>
struct Candidate {
  T key;
  int idx;

  // The larger key, the lower index in a tie.
  __device__ __forceinline__ bool beats(const Candidate& other) const {
    return key > other.key || (key == other.key && idx < other.idx);
  }
};

// The best candidate of the warp, in every lane. No key may be NaN.
template <typename T>
__device__ __forceinline__ Candidate<T> warp_best(Candidate<T> best) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const Candidate<T> other = {
        __shfl_xor_sync(kFullMask, best.key, offset), __shfl_xor_sync(kFullMask, best.idx, offset)};
    best = other.beats(best) ? other : best;
  }
  return best;
}

template <typename T>
__device__ __forceinline__ T warp_inclusive_scan(T value) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const T other = __shfl_up_sync(kFullMask, value, offset);
    if (lane_id() >= offset) {
      value += other;
    }
  }
  return value;
}

} // namespace moe_ext
