// The loops over one row that permutation_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::permutation {

// Loops over one row. Each loop prefetches rows that a later call will read.
template <typename T>
struct RowKernels {
  using Weight = acc_t<T>;
  // Computes out[d] = sum_k weights[k] rows[row_idx[k]][d] in Weight. Negative rows are left out; null weights mean
  // ones. `next_idx` holds the rows of the next call, or is null. With `past_caches`, results are written by the stores
  // of stream.h, after which the caller must call stream_end.
  void (*combine)(
      T* out, const T* rows, const int64_t* row_idx, const int64_t* next_idx, const Weight* weights, int64_t top_k,
      int64_t dim, bool past_caches);
  // Computes out[d] = weight * in[d] and returns sum_d in[d] row[d]. `next_row` is the row of a later call, or null.
  // `past_caches` is as in combine.
  Weight (*scale_dot)(
      T* out, const T* in, const T* row, const T* next_row, Weight weight, int64_t dim, bool past_caches);
};

using Kernels = PerDtype<RowKernels>;

} // namespace moe_ext::permutation
