#include "noisy_gating/noisy_gating.h"

#include <cmath>

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::noisy_gating {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "routing_uniform(Tensor rng_state, SymInt num_tokens, SymInt num_columns, int stream, Tensor? token_idx=None) -> "
      "Tensor");
  m.def("routing_jitter(Tensor x, Tensor rng_state, float eps, Tensor? token_idx=None) -> Tensor");
  m.def(
      "gshard_gate(Tensor logits, Tensor? rng_state=None, float scale=1.0, Tensor? token_mask=None, "
      "Tensor? token_idx=None) -> (Tensor topk_weights, Tensor topk_idx, Tensor num_tokens_per_expert, "
      "Tensor score_sum, Tensor num_first_choices)");
  m.def(
      "_gshard_gate_backward(Tensor? grad_weights, Tensor? grad_score_sum, Tensor logits, Tensor topk_idx, "
      "float scale) -> Tensor");
  m.def(
      "noisy_topk_gate(Tensor clean_logits, Tensor? noise_logits, Tensor? rng_state, SymInt top_k, "
      "float noise_epsilon=0.0, float scale=1.0, Tensor? token_mask=None, Tensor? token_idx=None) -> "
      "(Tensor topk_weights, Tensor topk_idx, Tensor num_tokens_per_expert, Tensor importance, Tensor load)");
  m.def(
      "_noisy_topk_gate_backward(Tensor? grad_weights, Tensor? grad_importance, Tensor? grad_load, "
      "Tensor clean_logits, Tensor? noise_logits, Tensor? rng_state, Tensor topk_idx, float noise_epsilon, "
      "float scale, Tensor? token_idx) -> (Tensor grad_clean, Tensor grad_noise)");
}

namespace {

void check_rng(const char* op, const Tensor& rng_state, const std::optional<Tensor>& token_idx, int64_t num_tokens) {
  check_dtype(op, "rng_state", rng_state, ScalarType::Long);
  check_dim(op, "rng_state", rng_state, 1, "[4]");
  check_size(op, "rng_state", rng_state, 0, 4, "seed, layer, step, first_token");
  if (token_idx) {
    check_same_device(op, "token_idx", *token_idx, "rng_state", rng_state);
    check_dtype(op, "token_idx", *token_idx, ScalarType::Long);
    check_dim(op, "token_idx", *token_idx, 1, "[T]");
    check_size(op, "token_idx", *token_idx, 0, num_tokens, "the number of tokens");
  }
}

void check_optional_rng(
    const char* op, const std::optional<Tensor>& rng_state, const std::optional<Tensor>& token_idx, const char* as_name,
    const Tensor& as) {
  if (rng_state) {
    check_same_device(op, "rng_state", *rng_state, as_name, as);
    check_rng(op, *rng_state, token_idx, as.size(0));
  }
}

void check_logits(const char* op, const char* name, const Tensor& logits, int64_t least_experts) {
  check_floating(op, name, logits);
  check_dim(op, name, logits, 2, "[T, E]");
  MOE_CHECK(
      logits.size(1) >= least_experts, op, ": expected ", name, " to have at least ", least_experts,
      least_experts == 1 ? " expert" : " experts", ", got shape ", shape_string(logits));
}

void check_token_mask(
    const char* op, const std::optional<Tensor>& token_mask, const char* as_name, const Tensor& logits) {
  if (token_mask) {
    check_same_device(op, "token_mask", *token_mask, as_name, logits);
    check_dtype(op, "token_mask", *token_mask, ScalarType::Bool);
    check_dim(op, "token_mask", *token_mask, 1, "[T]");
    check_size(op, "token_mask", *token_mask, 0, logits.size(0), "the number of tokens");
  }
}

void check_scale(const char* op, double scale) {
  MOE_CHECK(std::isfinite(scale), op, ": expected scale to be finite, got ", scale);
}

// Checks an optional gradient of the weights [T, K] or of a statistic [E].
void check_grad(
    const char* op, const char* name, const std::optional<Tensor>& grad, const char* as_name, const Tensor& logits,
    int64_t top_k) {
  if (!grad) {
    return;
  }
  check_same_device(op, name, *grad, as_name, logits);
  check_dtype(op, name, *grad, acc_dtype(logits.scalar_type()));
  if (top_k == 0) {
    check_dim(op, name, *grad, 1, "[E]");
    check_size(op, name, *grad, 0, logits.size(1), "the number of experts");
  } else {
    check_dim(op, name, *grad, 2, "[T, K]");
    check_size(op, name, *grad, 0, logits.size(0), "the number of tokens");
    check_size(op, name, *grad, 1, top_k, "the columns of topk_idx");
  }
}

void check_topk_idx(const char* op, const Tensor& topk_idx, const char* as_name, const Tensor& logits) {
  check_same_device(op, "topk_idx", topk_idx, as_name, logits);
  check_dtype(op, "topk_idx", topk_idx, ScalarType::Long);
  check_dim(op, "topk_idx", topk_idx, 2, "[T, K]");
  check_size(op, "topk_idx", topk_idx, 0, logits.size(0), "the number of tokens");
}

void check_noisy_logits(
    const char* op, const Tensor& clean, const std::optional<Tensor>& noise, const std::optional<Tensor>& rng_state,
    double noise_epsilon, double scale, const std::optional<Tensor>& token_idx) {
  check_logits(op, "clean_logits", clean, 1);
  MOE_CHECK(
      noise.has_value() == rng_state.has_value(), op,
      ": expected noise_logits and rng_state to be given both or neither, got ",
      noise ? "noise_logits alone" : "rng_state alone");
  if (noise) {
    check_same_device(op, "noise_logits", *noise, "clean_logits", clean);
    check_dtype(op, "noise_logits", *noise, clean.scalar_type());
    check_dim(op, "noise_logits", *noise, 2, "[T, E]");
    check_size(op, "noise_logits", *noise, 0, clean.size(0), "the tokens of clean_logits");
    check_size(op, "noise_logits", *noise, 1, clean.size(1), "the experts of clean_logits");
  }
  MOE_CHECK(
      noise_epsilon >= 0 && std::isfinite(noise_epsilon), op,
      ": expected noise_epsilon to be finite and at least 0, got ", noise_epsilon);
  check_scale(op, scale);
  check_optional_rng(op, rng_state, token_idx, "clean_logits", clean);
}

} // namespace

void check_routing_uniform(
    const Tensor& rng_state, int64_t num_tokens, int64_t num_columns, int64_t stream,
    const std::optional<Tensor>& token_idx) {
  const char* op = "routing_uniform";
  MOE_CHECK(num_tokens >= 0, op, ": expected num_tokens to be at least 0, got ", num_tokens);
  MOE_CHECK(num_columns >= 0, op, ": expected num_columns to be at least 0, got ", num_columns);
  MOE_CHECK(stream >= 0 && stream < kNumStreams, op, ": expected stream to be in [0, ", kNumStreams, "), got ", stream);
  check_rng(op, rng_state, token_idx, num_tokens);
}

void check_routing_jitter(
    const Tensor& x, const Tensor& rng_state, double eps, const std::optional<Tensor>& token_idx) {
  const char* op = "routing_jitter";
  check_floating(op, "x", x);
  check_dim(op, "x", x, 2, "[T, D]");
  MOE_CHECK(eps >= 0 && eps < 1, op, ": expected eps to be in [0, 1), got ", eps);
  check_optional_rng(op, rng_state, token_idx, "x", x);
}

void check_gshard_gate(
    const Tensor& logits, const std::optional<Tensor>& rng_state, double scale, const std::optional<Tensor>& token_mask,
    const std::optional<Tensor>& token_idx) {
  const char* op = "gshard_gate";
  check_logits(op, "logits", logits, 2);
  check_scale(op, scale);
  check_token_mask(op, token_mask, "logits", logits);
  check_optional_rng(op, rng_state, token_idx, "logits", logits);
}

void check_gshard_gate_backward(
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_score_sum, const Tensor& logits,
    const Tensor& topk_idx, double scale) {
  const char* op = "_gshard_gate_backward";
  check_logits(op, "logits", logits, 2);
  check_topk_idx(op, topk_idx, "logits", logits);
  check_size(op, "topk_idx", topk_idx, 1, 2, "two choices");
  check_grad(op, "grad_weights", grad_weights, "logits", logits, 2);
  check_grad(op, "grad_score_sum", grad_score_sum, "logits", logits, 0);
  check_scale(op, scale);
}

NoisyOptions check_noisy_topk_gate(
    const Tensor& clean_logits, const std::optional<Tensor>& noise_logits, const std::optional<Tensor>& rng_state,
    int64_t top_k, double noise_epsilon, double scale, const std::optional<Tensor>& token_mask,
    const std::optional<Tensor>& token_idx) {
  const char* op = "noisy_topk_gate";
  check_noisy_logits(op, clean_logits, noise_logits, rng_state, noise_epsilon, scale, token_idx);
  const int64_t num_experts = clean_logits.size(1);
  MOE_CHECK(
      top_k >= 1 && top_k <= num_experts, op, ": expected top_k to be in [1, ", num_experts,
      "], the experts of clean_logits, got ", top_k);
  check_token_mask(op, token_mask, "clean_logits", clean_logits);
  return {num_experts, top_k, noise_epsilon, scale};
}

NoisyOptions check_noisy_topk_gate_backward(
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_importance,
    const std::optional<Tensor>& grad_load, const Tensor& clean_logits, const std::optional<Tensor>& noise_logits,
    const std::optional<Tensor>& rng_state, const Tensor& topk_idx, double noise_epsilon, double scale,
    const std::optional<Tensor>& token_idx) {
  const char* op = "_noisy_topk_gate_backward";
  check_noisy_logits(op, clean_logits, noise_logits, rng_state, noise_epsilon, scale, token_idx);
  check_topk_idx(op, topk_idx, "clean_logits", clean_logits);
  const int64_t num_experts = clean_logits.size(1), top_k = topk_idx.size(1);
  MOE_CHECK(
      top_k >= 1 && top_k <= num_experts, op, ": expected topk_idx to have 1 to ", num_experts,
      " columns, the experts of clean_logits, got shape ", shape_string(topk_idx));
  check_grad(op, "grad_weights", grad_weights, "clean_logits", clean_logits, top_k);
  check_grad(op, "grad_importance", grad_importance, "clean_logits", clean_logits, 0);
  check_grad(op, "grad_load", grad_load, "clean_logits", clean_logits, 0);
  return {num_experts, top_k, noise_epsilon, scale};
}

} // namespace moe_ext::noisy_gating
