// Primitives of one-dimensional blocks. Every thread of the block must call them.
#pragma once

#include "common/warp.cuh"

namespace moe_ext {

// Return the sum of the values of lower threads, and set `total` to the sum over all threads.
template <int kNumThreads, typename T>
__device__ __forceinline__ T block_exclusive_scan(T value, T& total) {
  static_assert(kNumThreads % kWarpSize == 0 && kNumThreads <= kWarpSize * kWarpSize);
  constexpr int kNumWarps = kNumThreads / kWarpSize;
  MOE_SHARED(T, warp_sums, kNumWarps);
  const T inclusive = warp_inclusive_scan(value);
  if (lane_id() == kWarpSize - 1) {
    warp_sums[warp_id()] = inclusive;
  }
  __syncthreads();
  T below = 0;
  total = 0;
  for (int warp = 0; warp < kNumWarps; ++warp) {
    below += warp < warp_id() ? warp_sums[warp] : T(0);
    total += warp_sums[warp];
  }
  // The next call overwrites `warp_sums`, which other warps may still read.
  __syncthreads();
  return below + inclusive - value;
}

} // namespace moe_ext
