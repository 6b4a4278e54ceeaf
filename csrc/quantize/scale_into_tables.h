// The loops that scale_into_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "common/simd.h"

namespace moe_ext::scale_into {

template <typename T>
struct LoopsFrom {
  // Computes out [n] = x [n] * scale; `out` may be `x`. Returns true if an element of the result is not finite.
  template <typename U>
  using Loop = bool (*)(const T* x, acc_t<T> scale, int64_t n, U* out);

  PerDtype<Loop> to;
};

using Kernels = PerDtype<LoopsFrom>;

} // namespace moe_ext::scale_into
