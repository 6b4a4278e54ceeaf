#include "assignment/assignment.h"

#include <cmath>

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::assignment {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "expert_choice_gate(Tensor logits, SymInt capacity, Tensor? token_mask=None) -> "
      "(Tensor topk_weights, Tensor topk_idx, Tensor num_tokens_per_expert, Tensor score_sum)");
  m.def(
      "_expert_choice_gate_backward(Tensor? grad_weights, Tensor? grad_score_sum, Tensor logits, Tensor topk_idx, "
      "Tensor? token_mask) -> Tensor");
  m.def("_sinkhorn_scale(Tensor logits, int num_iters, float tolerance, Tensor? token_mask=None) -> Tensor");
  m.def("balanced_assignment(Tensor scores, Tensor? token_mask=None) -> Tensor");
  m.def(
      "sequence_load(Tensor logits, Tensor topk_idx, SymInt num_sequences, str score_fn=\"softmax\", "
      "Tensor? token_mask=None) -> (Tensor score_sum, Tensor num_tokens_per_expert)");
  m.def("_sequence_load_backward(Tensor grad_score_sum, Tensor logits, str score_fn, Tensor? token_mask) -> Tensor");
}

namespace {

void check_scores(const char* op, const char* name, const Tensor& scores) {
  check_floating(op, name, scores);
  check_dim(op, name, scores, 2, "[T, E]");
  MOE_CHECK(
      scores.size(1) >= 1, op, ": expected ", name, " to have at least 1 expert, got shape ", shape_string(scores));
}

void check_token_mask(
    const char* op, const std::optional<Tensor>& token_mask, const char* as_name, const Tensor& scores) {
  if (token_mask) {
    check_same_device(op, "token_mask", *token_mask, as_name, scores);
    check_dtype(op, "token_mask", *token_mask, ScalarType::Bool);
    check_dim(op, "token_mask", *token_mask, 1, "[T]");
    check_size(op, "token_mask", *token_mask, 0, scores.size(0), "the tokens");
  }
}

void check_topk_idx(const char* op, const Tensor& topk_idx, const Tensor& logits) {
  check_same_device(op, "topk_idx", topk_idx, "logits", logits);
  check_dtype(op, "topk_idx", topk_idx, ScalarType::Long);
  check_dim(op, "topk_idx", topk_idx, 2, "[T, K]");
  check_size(op, "topk_idx", topk_idx, 0, logits.size(0), "the tokens of logits");
}

// Parse the score function. A softmax over only the chosen experts is refused, because it gives no score to other
// experts.
gating::ScoreFn parse_score_fn(const char* op, const std::string& name) {
  MOE_CHECK(
      name == "softmax" || name == "sigmoid" || name == "sqrtsoftplus", op,
      ": expected score_fn to be softmax, sigmoid or sqrtsoftplus, got ", name);
  return name == "softmax"   ? gating::ScoreFn::kSoftmax
         : name == "sigmoid" ? gating::ScoreFn::kSigmoid
                             : gating::ScoreFn::kSqrtSoftplus;
}

void check_num_sequences(const char* op, int64_t num_sequences, int64_t num_tokens) {
  MOE_CHECK(
      num_sequences >= 1 ? num_tokens % num_sequences == 0 : num_sequences == 0 && num_tokens == 0, op,
      ": expected num_sequences to be a divisor of the ", num_tokens, " tokens, got ", num_sequences);
}

} // namespace

void check_expert_choice_gate(const Tensor& logits, int64_t capacity, const std::optional<Tensor>& token_mask) {
  const char* op = "expert_choice_gate";
  check_scores(op, "logits", logits);
  MOE_CHECK(capacity >= 1, op, ": expected capacity to be at least 1, got ", capacity);
  check_token_mask(op, token_mask, "logits", logits);
}

void check_expert_choice_gate_backward(
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_score_sum, const Tensor& logits,
    const Tensor& topk_idx, const std::optional<Tensor>& token_mask) {
  const char* op = "_expert_choice_gate_backward";
  check_scores(op, "logits", logits);
  check_topk_idx(op, topk_idx, logits);
  check_size(op, "topk_idx", topk_idx, 1, logits.size(1), "the experts of logits");
  const ScalarType acc = acc_dtype(logits.scalar_type());
  if (grad_weights) {
    check_same_device(op, "grad_weights", *grad_weights, "logits", logits);
    check_dtype(op, "grad_weights", *grad_weights, acc);
    check_dim(op, "grad_weights", *grad_weights, 2, "[T, E]");
    check_size(op, "grad_weights", *grad_weights, 0, logits.size(0), "the tokens of logits");
    check_size(op, "grad_weights", *grad_weights, 1, logits.size(1), "the experts of logits");
  }
  if (grad_score_sum) {
    check_same_device(op, "grad_score_sum", *grad_score_sum, "logits", logits);
    check_dtype(op, "grad_score_sum", *grad_score_sum, acc);
    check_dim(op, "grad_score_sum", *grad_score_sum, 1, "[E]");
    check_size(op, "grad_score_sum", *grad_score_sum, 0, logits.size(1), "the experts of logits");
  }
  check_token_mask(op, token_mask, "logits", logits);
}

void check_sinkhorn_scale(
    const Tensor& logits, int64_t num_iters, double tolerance, const std::optional<Tensor>& token_mask) {
  const char* op = "sinkhorn_gate";
  check_scores(op, "logits", logits);
  MOE_CHECK(num_iters >= 1, op, ": expected num_iters to be at least 1, got ", num_iters);
  MOE_CHECK(
      tolerance >= 0 && std::isfinite(tolerance), op, ": expected tolerance to be finite and at least 0, got ",
      tolerance);
  check_token_mask(op, token_mask, "logits", logits);
}

void check_balanced_assignment(const Tensor& scores, const std::optional<Tensor>& token_mask) {
  check_scores("balanced_assignment", "scores", scores);
  check_token_mask("balanced_assignment", token_mask, "scores", scores);
}

gating::ScoreFn check_sequence_load(
    const Tensor& logits, const Tensor& topk_idx, int64_t num_sequences, const std::string& score_fn,
    const std::optional<Tensor>& token_mask) {
  const char* op = "sequence_load";
  check_scores(op, "logits", logits);
  check_topk_idx(op, topk_idx, logits);
  check_num_sequences(op, num_sequences, logits.size(0));
  check_token_mask(op, token_mask, "logits", logits);
  return parse_score_fn(op, score_fn);
}

gating::ScoreFn check_sequence_load_backward(
    const Tensor& grad_score_sum, const Tensor& logits, const std::string& score_fn,
    const std::optional<Tensor>& token_mask) {
  const char* op = "_sequence_load_backward";
  check_scores(op, "logits", logits);
  check_same_device(op, "grad_score_sum", grad_score_sum, "logits", logits);
  check_dtype(op, "grad_score_sum", grad_score_sum, acc_dtype(logits.scalar_type()));
  check_dim(op, "grad_score_sum", grad_score_sum, 2, "[B, E]");
  check_size(op, "grad_score_sum", grad_score_sum, 1, logits.size(1), "the experts of logits");
  check_num_sequences(op, grad_score_sum.size(0), logits.size(0));
  check_token_mask(op, token_mask, "logits", logits);
  return parse_score_fn(op, score_fn);
}

} // namespace moe_ext::assignment
