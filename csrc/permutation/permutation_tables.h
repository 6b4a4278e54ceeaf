// The loops over one row that permutation_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::permutation {

template <typename T>
struct RowKernels {
  using Weight = acc_t<T>;
  // out[d] = sum_k weights[k] rows[row_idx[k]][d], summed in Weight; a negative row is left out; null weights are ones.
  void (*combine)(T* out, const T* rows, const int64_t* row_idx, const Weight* weights, int64_t top_k, int64_t dim);
  // out[d] = weight * in[d]
  void (*scale)(T* out, const T* in, Weight weight, int64_t dim);
  // sum_d a[d] b[d]
  Weight (*dot)(const T* a, const T* b, int64_t dim);
};

using Kernels = PerDtype<RowKernels>;

} // namespace moe_ext::permutation
