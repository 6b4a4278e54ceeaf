// Assignment: argument checks, which both backends share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/check.h"
#include "gating/gating_tables.h"

namespace moe_ext::assignment {

// These functions check everything that can be checked without reading the data, which may be on a device.
void check_expert_choice_gate(
    const Tensor& logits, // [T, E]
    int64_t capacity,
    const std::optional<Tensor>& token_mask); // [T]

void check_expert_choice_gate_backward(
    const std::optional<Tensor>& grad_weights,   // [T, E]
    const std::optional<Tensor>& grad_score_sum, // [E]
    const Tensor& logits,                        // [T, E]
    const Tensor& topk_idx,                      // [T, E]
    const std::optional<Tensor>& token_mask);    // [T]

void check_sinkhorn_scale(
    const Tensor& logits, // [T, E]
    int64_t num_iters, double tolerance,
    const std::optional<Tensor>& token_mask); // [T]

void check_balanced_assignment(
    const Tensor& scores,                     // [T, E]
    const std::optional<Tensor>& token_mask); // [T]

gating::ScoreFn check_sequence_load(
    const Tensor& logits,   // [T, E]
    const Tensor& topk_idx, // [T, K]
    int64_t num_sequences, const std::string& score_fn,
    const std::optional<Tensor>& token_mask); // [T]

gating::ScoreFn check_sequence_load_backward(
    const Tensor& grad_score_sum, // [B, E]
    const Tensor& logits,         // [T, E]
    const std::string& score_fn,
    const std::optional<Tensor>& token_mask); // [T]

} // namespace moe_ext::assignment
