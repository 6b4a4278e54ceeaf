// The loop that grouped_gemm_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::grouped_gemm {

// sum[i] += x[i], rounded as torch rounds it.
template <typename T>
struct Loops {
  void (*add)(T* sum, const T* x, int64_t n);
};

using Kernels = PerDtype<Loops>;

} // namespace moe_ext::grouped_gemm
