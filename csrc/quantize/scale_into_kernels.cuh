// Scaled copies. If the addresses allow it, a thread takes as many elements as 16 bytes of the larger dtype hold; the
// rest is taken one by one. All threads that find a non-finite element store the same value, so no atomics are needed.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/threads.cuh"
#include "common/vec.cuh"
#include "quantize/scale_into_math.h"

namespace moe_ext::scale_into {

// `out` may be `x`, because one thread reads each element before it writes it. Therefore neither is __restrict__.
template <int kSize, typename T, typename U>
__device__ __forceinline__ bool scale_vector(const T* x, acc_t<T> scale, U* out) {
  using Wide = wide_t<T, U>;
  decltype(nonfinite_bit<U>(Wide())) seen = 0;
  const Vec<T, kSize> from = load<kSize>(x);
  Vec<U, kSize> to;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const Wide y = static_cast<Wide>(to_acc(from.v[j]) * scale);
    to.v[j] = rounded<U>(y);
    seen |= nonfinite_bit<U>(y);
  }
  store(out, to);
  return has_top_bit(seen);
}

// Scales, and sets nonfinite [] to true if an element is not finite. `nonfinite` must begin as false.
template <int kSize, typename T, typename U>
__global__ void __launch_bounds__(kThreads)
    scale_into_kernel(const T* x, acc_t<T> scale, int64_t numel, U* out, bool* __restrict__ nonfinite) {
  const int64_t vectors = numel / kSize;
  bool found = false;
  // Unrolling would not help, because loads cannot move before stores that may alias, and it would spill registers.
#pragma unroll 1
  for (int64_t i = global_thread(); i < vectors; i += num_threads()) {
    found |= scale_vector<kSize>(x + i * kSize, scale, out + i * kSize);
  }
  if constexpr (kSize > 1) {
    const int64_t i = vectors * kSize + global_thread();
    if (i < numel) {
      found |= scale_vector<1>(x + i, scale, out + i);
    }
  }
  if (found) {
    *nonfinite = true;
  }
}

template <typename T, typename U>
void launch_scale_into(const T* x, acc_t<T> scale, int64_t numel, U* out, bool* nonfinite, cudaStream_t stream) {
  if (numel == 0) {
    return;
  }
  constexpr int kSize = kAccessBytes / static_cast<int>(std::max(sizeof(T), sizeof(U)));
  const bool aligned = is_aligned(x, kSize * sizeof(T)) && is_aligned(out, kSize * sizeof(U));
  const auto kernel = aligned ? scale_into_kernel<kSize, T, U> : scale_into_kernel<1, T, U>;
  const int64_t threads = aligned ? ceil_div(numel, int64_t{kSize}) : numel;
  launch(over_threads(threads, stream), kernel, x, scale, numel, out, nonfinite);
}

} // namespace moe_ext::scale_into
