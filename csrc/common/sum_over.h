// The sum of a tensor over one of its dimensions, by the library.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "common/check.h"

namespace moe_ext {

// The dimension has a name: one in braces is a number that is gone when the call reads it.
inline Tensor sum_over(const Tensor& t, int64_t dim) {
  return torch::stable::sum(t, torch::headeronly::IntHeaderOnlyArrayRef(dim));
}

} // namespace moe_ext
