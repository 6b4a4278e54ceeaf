// Sum of a tensor over one dimension, by torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "common/check.h"

namespace moe_ext {

// `dim` is a named variable because the array reference only points to it: a number in braces would be gone when the
// call reads it.
inline Tensor sum_over(const Tensor& t, int64_t dim) {
  return torch::stable::sum(t, torch::headeronly::IntHeaderOnlyArrayRef(dim));
}

} // namespace moe_ext
