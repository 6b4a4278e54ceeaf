// Gating: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/check.h"
#include "gating/gating_tables.h"

namespace moe_ext::gating {

// The following functions check all arguments, except for the values of elements. The first three return the options.
GateOptions check_topk_gate(
    const Tensor& logits, // [T, E]
    int64_t top_k, const std::string& score_fn, bool renormalize, double scale,
    const std::optional<Tensor>& selection_bias, // [E]
    int64_t num_groups, int64_t top_groups,
    const std::optional<Tensor>& token_mask, // [T]
    const std::optional<std::string>& group_score);

GateOptions check_gate_weights(
    const Tensor& logits,   // [T, E]
    const Tensor& topk_idx, // [T, K]
    const std::string& score_fn, bool renormalize, double scale);

GateOptions check_topk_gate_backward(
    const std::optional<Tensor>& grad_weights,   // [T, K]
    const std::optional<Tensor>& grad_score_sum, // [E]
    const Tensor& logits,                        // [T, E]
    const Tensor& topk_idx,                      // [T, K]
    const std::string& score_fn, bool renormalize, double scale);

void check_router_z_loss(
    const char* op,
    const Tensor& logits,                     // [T, E]
    const std::optional<Tensor>& token_mask); // [T]

void check_load_balance_loss(
    const char* op,
    const Tensor& score_sum,             // [E]
    const Tensor& num_tokens_per_expert, // [E]
    int64_t top_k);

// Checks that `grad`, the gradient of a scalar loss, is a scalar with the device and dtype that go with `as`.
void check_scalar_grad(const char* op, const Tensor& grad, const char* as_name, const Tensor& as);

} // namespace moe_ext::gating
