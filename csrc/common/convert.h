// Conversions of contiguous elements to the type of their sums and back, as loops that the compiler vectorises.
// Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext {
namespace { // internal linkage, because the linker must not share one copy between instruction sets

template <typename T>
void widen(acc_t<T>* __restrict__ out, const T* __restrict__ in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = to_acc(in[i]);
  }
}

template <typename T>
void narrow(T* __restrict__ out, const acc_t<T>* __restrict__ in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_acc<T>(in[i]);
  }
}

} // namespace
} // namespace moe_ext
