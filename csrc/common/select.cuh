// Selection of the largest keys by radix, one block for each selection. Every thread of the block must call it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/block.cuh"

namespace moe_ext {

constexpr int kSelectThreads = 256;

struct SelectedDigit {
  int value;
  int64_t num_keys; // with this digit
};

// Return the digit of the `wanted`-th largest key. `here` is the number of keys with the digit 255 - threadIdx.x.
// `wanted` becomes the key's place among the keys that share the digit.
inline __device__ SelectedDigit select_digit(int64_t here, int64_t& wanted) {
  static_assert(kSelectThreads == 256, "one thread per value of a digit");
  MOE_SHARED(int64_t, found, 3);
  int64_t total = 0;
  const int64_t above = block_exclusive_scan<kSelectThreads>(here, total);
  if (above < wanted && wanted <= above + here) {
    found[0] = kSelectThreads - 1 - static_cast<int>(threadIdx.x);
    found[1] = wanted - above;
    found[2] = here;
  }
  __syncthreads();
  wanted = found[1];
  return {static_cast<int>(found[0]), found[2]};
}

// Return the `wanted`-th largest of key(i) for i in [0, n), found digit by digit from the top; 1 <= wanted <= n. `ties`
// becomes the number of keys equal to the result among the `wanted` largest.
template <typename Key, typename F>
__device__ Key block_select(F&& key, int64_t n, int64_t wanted, int64_t& ties) {
  MOE_SHARED(int, histogram, kSelectThreads);
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
    const SelectedDigit digit = select_digit(histogram[kSelectThreads - 1 - threadIdx.x], wanted);
    prefix |= static_cast<Key>(digit.value) << shift;
    mask |= static_cast<Key>(255) << shift;
  }
  ties = wanted;
  return prefix;
}

} // namespace moe_ext
