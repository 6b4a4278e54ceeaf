// Uniforms and jitter. Each thread draws four columns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"
#include "noisy_gating/noisy_gating_tables.h"

namespace moe_ext::noisy_gating {

constexpr int kDrawThreads = 256;

__device__ __forceinline__ int64_t first_group() {
  return int64_t{blockIdx.x} * kDrawThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t group_stride() {
  return int64_t{gridDim.x} * kDrawThreads;
}

// Writes uniforms to out [T, C].
__global__ void __launch_bounds__(kDrawThreads) routing_uniform_kernel(
    float* __restrict__ out, int64_t num_tokens, int64_t num_columns, Stream stream, RngSource rng) {
  const int64_t groups = ceil_div(num_columns, int64_t{4});
  for (int64_t i = first_group(); i < num_tokens * groups; i += group_stride()) {
    const int64_t t = i / groups, c = i % groups * 4;
    const PhiloxWords words = token_draws(rng, stream, t).words(c);
    for (int j = 0; j < 4 && c + j < num_columns; ++j) {
      out[t * num_columns + c + j] = to_uniform(words.w[j]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kDrawThreads) routing_jitter_kernel(JitterArgs<T> args, int64_t num_tokens) {
  using Acc = acc_t<T>;
  const Acc low = static_cast<Acc>(1 - args.eps), span = static_cast<Acc>(2 * args.eps);
  const int64_t groups = ceil_div(args.dim, int64_t{4});
  for (int64_t i = first_group(); i < num_tokens * groups; i += group_stride()) {
    const int64_t t = i / groups, c = i % groups * 4;
    const PhiloxWords words = token_draws(args.rng, Stream::kJitter, t).words(c);
    for (int j = 0; j < 4 && c + j < args.dim; ++j) {
      const int64_t place = t * args.dim + c + j;
      const Acc factor = low + span * static_cast<Acc>(to_uniform(words.w[j]));
      args.out[place] = static_cast<T>(static_cast<Acc>(args.x[place]) * factor);
    }
  }
}

inline Launch draw_launch(int64_t num_tokens, int64_t num_columns, cudaStream_t stream) {
  const int64_t blocks = ceil_div(num_tokens * ceil_div(num_columns, int64_t{4}), int64_t{kDrawThreads});
  return {persistent_grid(blocks, kDrawThreads, device_properties()), Dim3(kDrawThreads), 0, stream};
}

inline void launch_routing_uniform(
    float* out, int64_t num_tokens, int64_t num_columns, Stream stream, RngSource rng, cudaStream_t on) {
  launch(draw_launch(num_tokens, num_columns, on), routing_uniform_kernel, out, num_tokens, num_columns, stream, rng);
}

template <typename T>
void launch_routing_jitter(const JitterArgs<T>& args, int64_t num_tokens, cudaStream_t stream) {
  launch(draw_launch(num_tokens, args.dim, stream), routing_jitter_kernel<T>, args, num_tokens);
}

} // namespace moe_ext::noisy_gating
