// The loops over one row that permutation_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::permutation {

// Each loop prefetches what a later call will read.
template <typename T>
struct RowKernels {
  using Weight = acc_t<T>;
  // out[d] = sum_k weights[k] rows[row_idx[k]][d], summed in Weight; a negative row is left out; null weights are ones.
  // next_idx: the rows of the next call, or null. `past_caches` writes by the stores of stream.h, which the caller
  // ends.
  void (*combine)(
      T* out, const T* rows, const int64_t* row_idx, const int64_t* next_idx, const Weight* weights, int64_t top_k,
      int64_t dim, bool past_caches);
  // out[d] = weight * in[d]; returns sum_d in[d] row[d]. next_row: the row of a later call, or null. `past_caches` as
  // in combine.
  Weight (*scale_dot)(
      T* out, const T* in, const T* row, const T* next_row, Weight weight, int64_t dim, bool past_caches);
};

using Kernels = PerDtype<RowKernels>;

} // namespace moe_ext::permutation
