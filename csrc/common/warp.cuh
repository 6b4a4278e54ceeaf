// Warp primitives. Every lane of the warp must call them. The order of additions is fixed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"

namespace moe_ext {

constexpr unsigned kFullMask = 0xFFFFFFFFu;

// Lane and warp of a thread in a one-dimensional block.
__device__ __forceinline__ int lane_id() {
  return static_cast<int>(threadIdx.x) % kWarpSize;
}

__device__ __forceinline__ int warp_id() {
  return static_cast<int>(threadIdx.x) / kWarpSize;
}

__device__ __forceinline__ unsigned lanes_below() {
  return (1u << lane_id()) - 1u;
}

// Sum over each group of kWidth neighbouring lanes, with the same bits in all of them.
template <int kWidth = kWarpSize, typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// Maximum over each group of kWidth neighbouring lanes. NaN is ignored.
template <int kWidth = kWarpSize, typename T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kFullMask, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// Key whose unsigned order is the order of the values. Both zeros have the same key.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value == 0 ? 0.0f : value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint64_t ordered_key(double value) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(value == 0 ? 0.0 : value));
  return bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
}

// The value of a key; zero is positive.
__device__ __forceinline__ float value_of_key(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ double value_of_key(uint64_t key) {
  return __longlong_as_double(static_cast<long long>(key >> 63 ? key & 0x7FFFFFFFFFFFFFFFull : ~key));
}

// The largest key of the warp, in every lane. For 32 bits it is one instruction.
__device__ __forceinline__ uint32_t warp_max_key(uint32_t key) {
  return __reduce_max_sync(kFullMask, key);
}

__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32), top = __reduce_max_sync(kFullMask, high);
  const uint32_t low = __reduce_max_sync(kFullMask, high == top ? static_cast<uint32_t>(key) : 0u);
  return uint64_t{top} << 32 | low;
}

template <typename T>
struct Candidate {
  T key;
  int idx; // at least 0
};

// The candidate of the warp with the largest key, and the lowest index in a tie, in every lane. No key may be NaN.
template <typename T>
__device__ __forceinline__ Candidate<T> warp_best(Candidate<T> mine) {
  const auto key = ordered_key(mine.key);
  const auto top = warp_max_key(key);
  const uint32_t idx = __reduce_min_sync(kFullMask, key == top ? static_cast<uint32_t>(mine.idx) : UINT32_MAX);
  return {value_of_key(top), static_cast<int>(idx)};
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
