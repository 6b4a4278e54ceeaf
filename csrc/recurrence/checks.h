// Argument checks that the operators of recurrences share.
#pragma once

#include <optional>

#include "common/check.h"

namespace moe_ext::recurrence {

using OptionalTensor = std::optional<Tensor>;

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

} // namespace moe_ext::recurrence
