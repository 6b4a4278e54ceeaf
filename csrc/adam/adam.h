// Adam's step on the CPU: argument checks. Throws unless tensors have equal numbers of elements, fitting dtypes and
// separate memory.
#pragma once

#include <optional>

#include "common/check.h"

namespace moe_ext::adam {

void check_adam_step(
    const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const std::optional<Tensor>& copy, int64_t step);

} // namespace moe_ext::adam
