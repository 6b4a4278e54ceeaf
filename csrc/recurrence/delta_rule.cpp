#include "recurrence/delta_rule.h"

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::recurrence {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor state, Tensor? documents) -> "
      "(Tensor out, Tensor last, Tensor news)");
  m.def(
      "_gated_delta_rule_backward(Tensor grad_out, Tensor grad_last, Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor? beta, Tensor state, Tensor? documents, Tensor news) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, "
      "Tensor grad_g, Tensor grad_beta, Tensor grad_state)");
}

void check_delta_rule(const char* op, const DeltaRuleArgs& args) {
  const Tensor &q = args.q, &v = args.v;
  check_wide(op, "v", v);
  check_dim(op, "v", v, 4, "[B, H, L, V]");
  check_beside(op, "q", q, "v", v, 4, "[B, G, L, K]");
  check_size(op, "q", q, 0, v.size(0), "the batch of v");
  check_size(op, "q", q, 2, v.size(2), "the positions of v");
  MOE_CHECK(
      q.size(1) > 0 ? v.size(1) % q.size(1) == 0 : v.size(1) == 0, op,
      ": expected the heads of v to be a multiple of those of q, got ", v.size(1), " and ", q.size(1));
  check_like(op, "k", args.k, "q", q);
  check_beside(op, "g", args.g, "v", v, 3, "[B, H, L]");
  for (const int64_t i : {0, 1, 2}) {
    check_size(op, "g", args.g, i, v.size(i), "as v");
  }
  if (args.beta) {
    check_like(op, "beta", *args.beta, "g", args.g);
  }
  const Tensor& state = args.state;
  check_beside(op, "state", state, "v", v, 4, "[B, H, K, V]");
  check_size(op, "state", state, 0, v.size(0), "the batch of v");
  check_size(op, "state", state, 1, v.size(1), "the heads of v");
  check_size(op, "state", state, 2, q.size(3), "the head dim of q");
  check_size(op, "state", state, 3, v.size(3), "the head dim of v");
  check_documents(op, args.documents, v, v.size(0), v.size(2));
}

void check_delta_rule_backward(
    const char* op, const DeltaRuleArgs& args, const Tensor& grad_out, const Tensor& grad_last, const Tensor& news) {
  check_delta_rule(op, args);
  check_like(op, "grad_out", grad_out, "v", args.v);
  check_like(op, "grad_last", grad_last, "state", args.state);
  if (args.beta) {
    check_like(op, "news", news, "v", args.v);
  }
}

} // namespace moe_ext::recurrence
