// The loops that router_linear_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::router_linear {

template <typename T>
struct ConvertKernels {
  void (*widen)(acc_t<T>* out, const T* in, int64_t n);
  void (*narrow)(T* out, const acc_t<T>* in, int64_t n); // rounds to nearest, ties to even
};

using Kernels = PerDtype<ConvertKernels>;

} // namespace moe_ext::router_linear
