// Checks and views of arguments that the operators of recurrences share.
#pragma once

#include <optional>

#include "common/check.h"
#include "common/sum_over.h"

namespace moe_ext::recurrence {

using OptionalTensor = std::optional<Tensor>;

// Float32 or float64.
inline void check_wide(const char* op, const char* name, const Tensor& t) {
  MOE_CHECK(
      t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::Double, op, ": expected ", name,
      " to be float32 or float64, got ", dtype_string(t));
}

// On the device of `as` and in its dtype, of so many dimensions.
inline void check_beside(
    const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as, int64_t dim,
    const char* legend) {
  check_dim(op, name, t, dim, legend);
  check_same_device(op, name, t, as_name, as);
  check_dtype(op, name, t, as.scalar_type());
}

// t of the sizes of `as`, on its device and in its dtype.
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

// documents, of L positions, [B or 1, L] int64.
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

// Rows that lie where they are if their elements are adjacent.
inline Tensor with_dense_rows(const Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : torch::stable::contiguous(t);
}

// Sums over dimension 0; a view of the only element where there is one.
inline Tensor sum_over_first(const Tensor& t) {
  return t.size(0) == 1 ? torch::stable::select(t, 0, 0) : sum_over(t, 0);
}

} // namespace moe_ext::recurrence
