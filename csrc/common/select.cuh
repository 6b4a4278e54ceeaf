// Selection of the largest keys by radix, one block for one selection. Every thread of the block calls it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/block.cuh"

namespace moe_ext {

constexpr int kSelectThreads = 256;

// The `wanted`-th largest of key(i) for i in [0, n), digit by digit from the top; `ties` becomes how many with that
// very key are among the `wanted` largest. 1 <= wanted <= n.
template <typename Key, typename F>
__device__ Key block_select(F&& key, int64_t n, int64_t wanted, int64_t& ties) {
  static_assert(kSelectThreads == 256, "one thread per value of a digit");
  MOE_SHARED(int, histogram, kSelectThreads);
  MOE_SHARED(int64_t, found, 2);
  Key prefix = 0, mask = 0;
  for (int shift = 8 * static_cast<int>(sizeof(Key)) - 8; shift >= 0; shift -= 8) {
    histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kSelectThreads) {
      const Key k = key(i);
      if ((k & mask) == prefix) {
        atomicAdd(&histogram[(k >> shift) & 255], 1);
      }
    }
    __syncthreads();
    const int digit = kSelectThreads - 1 - static_cast<int>(threadIdx.x);
    const int64_t here = histogram[digit];
    int64_t total = 0;
    const int64_t above = block_exclusive_scan<kSelectThreads>(here, total);
    if (above < wanted && wanted <= above + here) {
      found[0] = digit;
      found[1] = wanted - above;
    }
    __syncthreads();
    prefix |= static_cast<Key>(found[0]) << shift;
    mask |= static_cast<Key>(255) << shift;
    wanted = found[1];
  }
  ties = wanted;
  return prefix;
}

} // namespace moe_ext
