// Checks and views of arguments, which the operators of recurrences share.
#pragma once

#include <optional>

#include "common/check.h"
#include "common/sum_over.h"

namespace moe_ext::recurrence {

using OptionalTensor = std::optional<Tensor>;

// Throw unless t is float32 or float64.
inline void check_wide(const char* op, const char* name, const Tensor& t) {
  MOE_CHECK(
      t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::Double, op, ": expected ", name,
      " to be float32 or float64, got ", dtype_string(t));
}

// Throw unless t has `dim` dimensions, and the device and dtype of `as`.
inline void check_beside(
    const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as, int64_t dim,
    const char* legend) {
  check_dim(op, name, t, dim, legend);
  check_same_device(op, name, t, as_name, as);
  check_dtype(op, name, t, as.scalar_type());
}

// Throw unless t has the sizes, device and dtype of `as`.
inline void check_like(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  check_same_device(op, name, t, as_name, as);
  check_dtype(op, name, t, as.scalar_type());
  bool same = t.dim() == as.dim();
  for (int64_t i = 0; same && i < t.dim(); ++i) {
    same = t.size(i) == as.size(i);
  }
  MOE_CHECK(
      same, op, ": expected ", name, " to have the sizes of ", as_name, ", ", shape_string(as), ", got shape ",
      shape_string(t));
}

// Throw unless documents are absent or int64 [B or 1, L] with L = `length`.
inline void check_documents(
    const char* op, const OptionalTensor& documents, const Tensor& like, int64_t batch, int64_t length) {
  if (!documents) {
    return;
  }
  check_same_device(op, "documents", *documents, "the other arguments", like);
  check_dtype(op, "documents", *documents, ScalarType::Long);
  check_dim(op, "documents", *documents, 2, "[B or 1, L]");
  MOE_CHECK(
      documents->size(0) == 1 || documents->size(0) == batch, op, ": expected documents to have one row or ", batch,
      ", got shape ", shape_string(*documents));
  check_size(op, "documents", *documents, 1, length, "the positions");
}

// Return t if the elements of its rows are adjacent, else a contiguous copy.
inline Tensor with_dense_rows(const Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : torch::stable::contiguous(t);
}

// Sum over dimension 0. With one element it is a view of that element.
inline Tensor sum_over_first(const Tensor& t) {
  return t.size(0) == 1 ? torch::stable::select(t, 0, 0) : sum_over(t, 0);
}

} // namespace moe_ext::recurrence
