// One thread for each element, over a grid of any size; and bisection.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"

namespace moe_ext {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t global_thread() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t num_threads() {
  return int64_t{gridDim.x} * kThreads;
}

inline Launch over_threads(int64_t threads, cudaStream_t stream) {
  return {
      persistent_grid(ceil_div(threads, int64_t{kThreads}), kThreads, device_properties()), Dim3(kThreads), 0, stream};
}

// Return the first place in [0, count) whose element is at least `value`, or `count` if there is none.
template <typename T>
__device__ __forceinline__ int64_t first_from(const T* ascending, int64_t count, int64_t value) {
  int64_t low = 0;
  for (int64_t high = count; low < high;) {
    const int64_t middle = low + (high - low) / 2;
    const bool below = static_cast<int64_t>(ascending[middle]) < value;
    low = below ? middle + 1 : low;
    high = below ? high : middle;
  }
  return low;
}

} // namespace moe_ext
