// Router product: the argument checks that both backends share.
#pragma once

#include "common/check.h"

namespace moe_ext::router_linear {

void check_router_logits(
    const Tensor& x,       // [T, D]
    const Tensor& weight); // [E, D]

void check_backward_x(
    const Tensor& grad,   // [T, E]
    const Tensor& weight, // [E, D]
    ScalarType dtype);    // of x

void check_backward_weight(
    const Tensor& grad, // [T, E]
    const Tensor& x,    // [T, D]
    ScalarType dtype);  // of the weight

} // namespace moe_ext::router_linear
