#include "gating/gating.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::gating {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "topk_gate(Tensor logits, SymInt top_k, str score_fn=\"softmax\", bool renormalize=True, float scale=1.0, "
      "Tensor? selection_bias=None, SymInt num_groups=1, SymInt top_groups=1, Tensor? token_mask=None, "
      "str? group_score=None) -> "
      "(Tensor topk_weights, Tensor topk_idx, Tensor num_tokens_per_expert, Tensor score_sum)");
  m.def(
      "gate_weights(Tensor logits, Tensor topk_idx, str score_fn=\"softmax\", bool renormalize=True, "
      "float scale=1.0) -> (Tensor topk_weights, Tensor num_tokens_per_expert, Tensor score_sum)");
  m.def(
      "_topk_gate_backward(Tensor? grad_weights, Tensor? grad_score_sum, Tensor logits, Tensor topk_idx, "
      "str score_fn, bool renormalize, float scale) -> Tensor");
  m.def("router_z_loss(Tensor logits, Tensor? token_mask=None) -> Tensor");
  m.def("_router_z_loss_backward(Tensor grad, Tensor logits, Tensor? token_mask) -> Tensor");
  m.def("load_balance_loss(Tensor score_sum, Tensor num_tokens_per_expert, SymInt top_k) -> Tensor");
  m.def(
      "_load_balance_loss_backward(Tensor grad, Tensor score_sum, Tensor num_tokens_per_expert, SymInt top_k) -> "
      "Tensor");
}

namespace {

constexpr std::pair<const char*, ScoreFn> kScoreFns[] = {
    {"softmax", ScoreFn::kSoftmax},
    {"topk_softmax", ScoreFn::kTopkSoftmax},
    {"sigmoid", ScoreFn::kSigmoid},
    {"sqrtsoftplus", ScoreFn::kSqrtSoftplus}};

ScoreFn parse_score_fn(const char* op, const std::string& name) {
  const auto* found =
      std::find_if(std::begin(kScoreFns), std::end(kScoreFns), [&](const auto& known) { return name == known.first; });
  MOE_CHECK(
      found != std::end(kScoreFns), op,
      ": expected score_fn to be softmax, topk_softmax, sigmoid or sqrtsoftplus, got ", name);
  return found->second;
}

void check_logits(const char* op, const Tensor& logits) {
  check_floating(op, "logits", logits);
  check_dim(op, "logits", logits, 2, "[T, E]");
  MOE_CHECK(logits.size(1) >= 1, op, ": expected logits to have at least 1 expert, got shape ", shape_string(logits));
}

void check_token_mask(const char* op, const std::optional<Tensor>& token_mask, const Tensor& logits) {
  if (token_mask) {
    check_same_device(op, "token_mask", *token_mask, "logits", logits);
    check_dtype(op, "token_mask", *token_mask, ScalarType::Bool);
    check_dim(op, "token_mask", *token_mask, 1, "[T]");
    check_size(op, "token_mask", *token_mask, 0, logits.size(0), "the tokens of logits");
  }
}

void check_topk_idx(const char* op, const Tensor& topk_idx, const Tensor& logits) {
  check_same_device(op, "topk_idx", topk_idx, "logits", logits);
  check_dtype(op, "topk_idx", topk_idx, ScalarType::Long);
  check_dim(op, "topk_idx", topk_idx, 2, "[T, K]");
  check_size(op, "topk_idx", topk_idx, 0, logits.size(0), "the tokens of logits");
  MOE_CHECK(
      topk_idx.size(1) >= 1, op, ": expected topk_idx to have at least 1 column, got shape ", shape_string(topk_idx));
}

void check_scale(const char* op, double scale) {
  MOE_CHECK(std::isfinite(scale), op, ": expected scale to be finite, got ", scale);
}

// Number of largest keys whose sum is the score of a group.
int64_t group_terms(
    const char* op, const std::optional<std::string>& group_score, bool biased, int64_t top_k, int64_t top_groups) {
  if (!group_score) {
    return biased ? 2 : 1;
  }
  MOE_CHECK(
      *group_score == "max" || *group_score == "top2" || *group_score == "topk", op,
      ": expected group_score to be max, top2 or topk, got ", *group_score);
  MOE_CHECK(
      *group_score != "topk" || top_k >= top_groups, op, ": expected top_k to be at least top_groups = ", top_groups,
      " with group_score topk, got ", top_k);
  return *group_score == "max" ? 1 : *group_score == "top2" ? 2 : top_k / top_groups;
}

} // namespace

GateOptions check_topk_gate(
    const Tensor& logits, int64_t top_k, const std::string& score_fn, bool renormalize, double scale,
    const std::optional<Tensor>& selection_bias, int64_t num_groups, int64_t top_groups,
    const std::optional<Tensor>& token_mask, const std::optional<std::string>& group_score) {
  const char* op = "topk_gate";
  check_logits(op, logits);
  const int64_t num_experts = logits.size(1);
  const ScoreFn fn = parse_score_fn(op, score_fn);
  check_scale(op, scale);
  MOE_CHECK(
      top_k >= 1 && top_k <= num_experts, op, ": expected top_k to be in [1, ", num_experts,
      "], the experts of logits, got ", top_k);
  MOE_CHECK(
      num_groups >= 1 && num_experts % num_groups == 0, op, ": expected num_groups to be a divisor of the ",
      num_experts, " experts, got ", num_groups);
  MOE_CHECK(
      top_groups >= 1 && top_groups <= num_groups, op, ": expected top_groups to be in [1, ", num_groups,
      "], the groups, got ", top_groups);
  MOE_CHECK(
      top_k <= num_experts / num_groups * top_groups, op, ": expected top_k to be at most ",
      num_experts / num_groups * top_groups, ", the experts of top_groups groups, got ", top_k);
  if (selection_bias) {
    check_same_device(op, "selection_bias", *selection_bias, "logits", logits);
    check_floating(op, "selection_bias", *selection_bias);
    check_dim(op, "selection_bias", *selection_bias, 1, "[E]");
    check_size(op, "selection_bias", *selection_bias, 0, num_experts, "the experts of logits");
  }
  check_token_mask(op, token_mask, logits);
  const int64_t terms = group_terms(op, group_score, selection_bias.has_value(), top_k, top_groups);
  return {num_experts, top_k, num_groups, top_groups, fn, renormalize, scale, terms};
}

GateOptions check_gate_weights(
    const Tensor& logits, const Tensor& topk_idx, const std::string& score_fn, bool renormalize, double scale) {
  const char* op = "gate_weights";
  check_logits(op, logits);
  check_topk_idx(op, topk_idx, logits);
  const ScoreFn fn = parse_score_fn(op, score_fn);
  check_scale(op, scale);
  MOE_CHECK(
      topk_idx.size(1) <= logits.size(1), op, ": expected topk_idx to have at most ", logits.size(1),
      " columns, the experts of logits, got shape ", shape_string(topk_idx));
  return {logits.size(1), topk_idx.size(1), 1, 1, fn, renormalize, scale};
}

GateOptions check_topk_gate_backward(
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_score_sum, const Tensor& logits,
    const Tensor& topk_idx, const std::string& score_fn, bool renormalize, double scale) {
  const char* op = "_topk_gate_backward";
  check_logits(op, logits);
  check_topk_idx(op, topk_idx, logits);
  const int64_t top_k = topk_idx.size(1);
  if (grad_weights) {
    check_same_device(op, "grad_weights", *grad_weights, "logits", logits);
    check_dtype(op, "grad_weights", *grad_weights, acc_dtype(logits.scalar_type()));
    check_dim(op, "grad_weights", *grad_weights, 2, "[T, K]");
    check_size(op, "grad_weights", *grad_weights, 0, logits.size(0), "the tokens of logits");
    check_size(op, "grad_weights", *grad_weights, 1, top_k, "the columns of topk_idx");
  }
  if (grad_score_sum) {
    check_same_device(op, "grad_score_sum", *grad_score_sum, "logits", logits);
    check_dtype(op, "grad_score_sum", *grad_score_sum, acc_dtype(logits.scalar_type()));
    check_dim(op, "grad_score_sum", *grad_score_sum, 1, "[E]");
    check_size(op, "grad_score_sum", *grad_score_sum, 0, logits.size(1), "the experts of logits");
  }
  return {logits.size(1), top_k, 1, 1, parse_score_fn(op, score_fn), renormalize, scale};
}

void check_router_z_loss(const char* op, const Tensor& logits, const std::optional<Tensor>& token_mask) {
  check_logits(op, logits);
  check_token_mask(op, token_mask, logits);
}

void check_load_balance_loss(
    const char* op, const Tensor& score_sum, const Tensor& num_tokens_per_expert, int64_t top_k) {
  check_same_device(op, "num_tokens_per_expert", num_tokens_per_expert, "score_sum", score_sum);
  MOE_CHECK(
      score_sum.scalar_type() == ScalarType::Float || score_sum.scalar_type() == ScalarType::Double, op,
      ": expected score_sum to be float32 or float64, got ", dtype_string(score_sum));
  check_index(op, "num_tokens_per_expert", num_tokens_per_expert);
  check_dim(op, "score_sum", score_sum, 1, "[E]");
  check_dim(op, "num_tokens_per_expert", num_tokens_per_expert, 1, "[E]");
  check_size(op, "num_tokens_per_expert", num_tokens_per_expert, 0, score_sum.size(0), "the experts of score_sum");
  MOE_CHECK(top_k >= 1, op, ": expected top_k to be at least 1, got ", top_k);
}

void check_scalar_grad(const char* op, const Tensor& grad, const char* as_name, const Tensor& as) {
  check_same_device(op, "grad", grad, as_name, as);
  check_dtype(op, "grad", grad, acc_dtype(as.scalar_type()));
  check_dim(op, "grad", grad, 0, "[]");
}

} // namespace moe_ext::gating
