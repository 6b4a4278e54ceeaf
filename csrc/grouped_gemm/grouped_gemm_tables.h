// The loops that grouped_gemm_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::grouped_gemm {

template <typename T>
struct Loops {
  void (*add)(T* sum, const T* x, int64_t n); // sum[i] += x[i], with the rounding of torch
  void (*widen)(acc_t<T>* out, const T* x, int64_t n);
  void (*narrow)(T* out, const acc_t<T>* x, int64_t n); // with the rounding of torch
};

using Kernels = PerDtype<Loops>;

} // namespace moe_ext::grouped_gemm
