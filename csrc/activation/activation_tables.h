// Tables of the loops that activation_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::activation {

enum class Kind { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

// Order of the two halves of a gated input: all gate columns before all up columns, or each up column behind its gate
// column.
enum class Layout { kConcatenated, kInterleaved };

// Gated loops compute n outputs of one row. x points to the first gate, whose up value is at x + dim (concatenated) or
// x + 1.
template <typename T>
struct Loops {
  // out[i] = f(x[i])
  void (*activation)(Kind kind, T* out, const T* x, int64_t n);
  // grad_x[i] = grad[i] f'(x[i])
  void (*activation_backward)(Kind kind, T* grad_x, const T* grad, const T* x, int64_t n);
  // out[i] = f(gate[i]) up[i] weight
  void (*gated)(Kind kind, Layout layout, T* out, const T* x, acc_t<T> weight, int64_t dim, int64_t n);
  // grad_gate[i] = grad[i] up[i] f'(gate[i]), grad_up[i] = grad[i] f(gate[i]), laid out as x
  void (*gated_backward)(Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, int64_t dim, int64_t n);
  // As gated_backward with grad * weight, for a whole row. Returns the weight's gradient, sum_i grad[i] f(gate[i])
  // up[i].
  acc_t<T> (*gated_backward_weighted)(
      Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, acc_t<T> weight, int64_t dim);
};

using Kernels = PerDtype<Loops>;

} // namespace moe_ext::activation
