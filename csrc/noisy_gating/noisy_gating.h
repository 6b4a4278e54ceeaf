// Noisy gating: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "noisy_gating/noisy_gating_tables.h"

namespace moe_ext::noisy_gating {

// Each function checks all arguments, except for the values of elements.
void check_routing_uniform(
    const Tensor& rng_state, // [4]
    int64_t num_tokens, int64_t num_columns, int64_t stream,
    const std::optional<Tensor>& token_idx); // [T]

void check_routing_jitter(
    const Tensor& x,         // [T, D]
    const Tensor& rng_state, // [4]
    double eps,
    const std::optional<Tensor>& token_idx); // [T]

void check_gshard_gate(
    const Tensor& logits,                   // [T, E]
    const std::optional<Tensor>& rng_state, // [4]
    double scale,
    const std::optional<Tensor>& token_mask, // [T]
    const std::optional<Tensor>& token_idx); // [T]

void check_gshard_gate_backward(
    const std::optional<Tensor>& grad_weights,   // [T, 2]
    const std::optional<Tensor>& grad_score_sum, // [E]
    const Tensor& logits,                        // [T, E]
    const Tensor& topk_idx,                      // [T, 2]
    double scale);

NoisyOptions check_noisy_topk_gate(
    const Tensor& clean_logits,                // [T, E]
    const std::optional<Tensor>& noise_logits, // [T, E]
    const std::optional<Tensor>& rng_state,    // [4]
    int64_t top_k, double noise_epsilon, double scale,
    const std::optional<Tensor>& token_mask, // [T]
    const std::optional<Tensor>& token_idx); // [T]

NoisyOptions check_noisy_topk_gate_backward(
    const std::optional<Tensor>& grad_weights,    // [T, K]
    const std::optional<Tensor>& grad_importance, // [E]
    const std::optional<Tensor>& grad_load,       // [E]
    const Tensor& clean_logits,                   // [T, E]
    const std::optional<Tensor>& noise_logits,    // [T, E]
    const std::optional<Tensor>& rng_state,       // [4]
    const Tensor& topk_idx,                       // [T, K]
    double noise_epsilon, double scale,
    const std::optional<Tensor>& token_idx); // [T]

} // namespace moe_ext::noisy_gating
