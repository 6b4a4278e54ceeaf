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

// The same bits in every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
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
