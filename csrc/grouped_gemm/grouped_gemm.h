// Grouped matrix product: the argument checks that both backends share.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/expert_offsets.h"

namespace moe_ext::grouped_gemm {

// Each function checks all arguments, except for the values of elements.
void check_grouped_mm(
    const Tensor& x,                    // [N, K]
    const Tensor& weight,               // [E, M, K]
    const Tensor& expert_offsets,       // [E + 1] or [E]
    const std::optional<Tensor>& bias); // [E, M]

void check_backward_weight(
    const Tensor& grad,            // [N, M]
    const Tensor& x,               // [N, K]
    const Tensor& expert_offsets); // [E + 1] or [E]

void check_backward_weight_add(
    const Tensor& sum,            // [E, M, K]; [E, K, M] if transposed
    const Tensor& grad,           // [N, M]
    const Tensor& x,              // [N, K]
    const Tensor& expert_offsets, // [E + 1] or [E]
    bool transposed);

// Calls `backward_weight`; if `transposed`, its result [E, M, K] is stored as [E, K, M]. The strides must be those of
// the weight, because autograd copies a gradient with other strides. With `grad_owned` (`x_owned`) the caller promises
// that nothing reads `grad` (`x`) afterwards.
template <Tensor (*backward_weight)(Tensor, Tensor, Tensor, bool, bool)>
Tensor backward_weight_stored(
    Tensor grad, Tensor x, Tensor expert_offsets, bool transposed, bool grad_owned, bool x_owned) {
  check_backward_weight(grad, x, expert_offsets);
  if (!transposed) {
    return backward_weight(grad, x, expert_offsets, grad_owned, x_owned);
  }
  return torch::stable::transpose(
      backward_weight(torch::stable::contiguous(x), grad, expert_offsets, x_owned, grad_owned), 1, 2);
}

void check_backward_bias(
    const Tensor& grad,            // [N, M]
    const Tensor& expert_offsets); // [E + 1] or [E]

} // namespace moe_ext::grouped_gemm
