// Products of slices of tensors by torch's mm. Slices are made by from_blob, with one call each; narrow, select and
// transpose would take up to three.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "common/check.h"

namespace moe_ext::grouped_gemm {

// Shape and strides of a 2-D view. A view does not own its memory and must not outlive its tensor.
struct Matrix {
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

inline Tensor view_of(const Tensor& t, int64_t offset, const Matrix& m) {
  char* begin = static_cast<char*>(t.data_ptr()) + offset * static_cast<int64_t>(t.element_size());
  const std::array<int64_t, 2> sizes = {m.rows, m.cols};
  const std::array<int64_t, 2> strides = {m.row_stride, m.col_stride};
  return torch::stable::from_blob(begin, sizes, strides, t.device(), t.scalar_type());
}

// View of the rows [begin, end) of a 2-D tensor.
inline Tensor rows_of(const Tensor& t, int64_t begin, int64_t end) {
  return view_of(t, begin * t.stride(0), {end - begin, t.size(1), t.stride(0), t.stride(1)});
}

inline Tensor rows_transposed(const Tensor& t, int64_t begin, int64_t end) {
  return view_of(t, begin * t.stride(0), {t.size(1), end - begin, t.stride(1), t.stride(0)});
}

// View of matrix e of a 3-D tensor.
inline Tensor matrix_of(const Tensor& t, int64_t e) {
  return view_of(t, e * t.stride(0), {t.size(1), t.size(2), t.stride(1), t.stride(2)});
}

inline Tensor matrix_transposed(const Tensor& t, int64_t e) {
  return view_of(t, e * t.stride(0), {t.size(2), t.size(1), t.stride(2), t.stride(1)});
}

// Computes out = a b.
inline void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  if (out.is_cpu()) {
    // A direct call, because the dispatcher takes half as long as a small product.
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
    return;
  }
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack = {from(a), from(b), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  // The returned alias of `out` holds a reference, which must be taken off the stack to be released.
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

} // namespace moe_ext::grouped_gemm
