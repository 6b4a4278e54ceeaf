// Pairs, one thread per pair. Indices ascend, so the end of a run and the run of a pair are found by bisection.
// Received indices are clamped to the result, so that wrong ones touch no other memory.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/threads.cuh"
#include "sparse/pair_format.h"

namespace moe_ext::pairs {

// Writes ends of runs and offsets, or indices, then zeros. With kCheck, indices that are out of range or descend trap.
template <bool kCheck>
__global__ void __launch_bounds__(kThreads)
    pack_indices_kernel(const int64_t* __restrict__ indices, IndexLayout layout, uint8_t* __restrict__ packed) {
  const IndexParts<uint8_t> to(packed, layout);
  for (int64_t run = global_thread(); run < layout.runs; run += num_threads()) {
    to.ends_or_indices[run] = static_cast<int32_t>(first_from(indices, layout.count, (run + 1) * kRun));
  }
  for (int64_t i = global_thread(); i < layout.count; i += num_threads()) {
    if constexpr (kCheck) {
      if (indices[i] < 0 || indices[i] >= layout.numel || (i > 0 && indices[i - 1] > indices[i])) {
        __trap();
      }
    }
    if (layout.runs > 0) {
      to.offsets[i] = static_cast<uint16_t>(indices[i]);
    } else {
      to.ends_or_indices[i] = static_cast<int32_t>(indices[i]);
    }
  }
  for (int64_t i = used_bytes(layout) + global_thread(); i < num_bytes(layout); i += num_threads()) {
    packed[i] = 0;
  }
}

// Index of pair i. Whatever the ends, the bisection finds some run.
__device__ __forceinline__ int64_t
index_at(const IndexParts<const uint8_t>& from, const IndexLayout& layout, int64_t i) {
  int64_t index = 0;
  if (layout.runs > 0) {
    const int64_t run = first_from(from.ends_or_indices, layout.runs - 1, i + 1);
    index = run * kRun + from.offsets[i];
  } else {
    index = from.ends_or_indices[i];
  }
  return in_range(index, layout.numel);
}

static __global__ void __launch_bounds__(kThreads)
    unpack_indices_kernel(const uint8_t* __restrict__ packed, IndexLayout layout, int64_t* __restrict__ indices) {
  const IndexParts<const uint8_t> from(packed, layout);
  for (int64_t i = global_thread(); i < layout.count; i += num_threads()) {
    indices[i] = index_at(from, layout, i);
  }
}

// Adds values / divisor to out [size], without atomics: two non-zero values have the same index only if the pairs were
// not made by `pack_indices` of distinct indices.
static __global__ void __launch_bounds__(kThreads) add_pairs_kernel(
    float* __restrict__ out, int64_t size, const float* __restrict__ values, const uint8_t* __restrict__ packed,
    IndexLayout layout, int64_t start, float divisor) {
  const IndexParts<const uint8_t> from(packed, layout);
  for (int64_t i = global_thread(); i < layout.count; i += num_threads()) {
    if (values[i] != 0) {
      out[in_range(index_at(from, layout, i) - start, size)] += values[i] / divisor;
    }
  }
}

template <bool kCheck>
void launch_pack_indices(const int64_t* indices, const IndexLayout& layout, uint8_t* packed, cudaStream_t stream) {
  if (num_bytes(layout) > 0) {
    launch(
        over_threads(std::max(layout.runs, layout.count), stream), pack_indices_kernel<kCheck>, indices, layout,
        packed);
  }
}

inline void launch_unpack_indices(
    const uint8_t* packed, const IndexLayout& layout, int64_t* indices, cudaStream_t stream) {
  if (layout.count > 0) {
    launch(over_threads(layout.count, stream), unpack_indices_kernel, packed, layout, indices);
  }
}

inline void launch_add_pairs(
    float* out, int64_t size, const float* values, const uint8_t* packed, const IndexLayout& layout, int64_t start,
    float divisor, cudaStream_t stream) {
  if (layout.count > 0) {
    launch(over_threads(layout.count, stream), add_pairs_kernel, out, size, values, packed, layout, start, divisor);
  }
}

} // namespace moe_ext::pairs
