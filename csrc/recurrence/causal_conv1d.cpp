#include "recurrence/causal_conv1d.h"

#include "common/dispatch.h"
#include "common/library.h"
#include "recurrence/checks.h"

namespace moe_ext::recurrence {

MOE_EXT_SCHEMAS(m) {
  m.def("causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor halo, Tensor? documents, bool silu) -> Tensor");
  m.def(
      "_causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor halo, Tensor? documents, "
      "bool silu) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_halo)");
}

void check_causal_conv(const char* op, const CausalConvArgs& args) {
  const Tensor &x = args.x, &weight = args.weight, &halo = args.halo;
  check_wide(op, "x", x);
  check_dim(op, "x", x, 3, "[B, D, L]");
  check_beside(op, "weight", weight, "x", x, 2, "[D, W]");
  check_size(op, "weight", weight, 0, x.size(1), "the channels of x");
  MOE_CHECK(weight.size(1) >= 1, op, ": expected weight to have a tap or more, got shape ", shape_string(weight));
  if (args.bias) {
    check_beside(op, "bias", *args.bias, "x", x, 1, "[D]");
    check_size(op, "bias", *args.bias, 0, x.size(1), "the channels of x");
  }
  check_beside(op, "halo", halo, "x", x, 3, "[B, D, W - 1]");
  check_size(op, "halo", halo, 0, x.size(0), "the batch of x");
  check_size(op, "halo", halo, 1, x.size(1), "the channels of x");
  check_size(op, "halo", halo, 2, weight.size(1) - 1, "the taps but one");
  check_documents(op, args.documents, x, x.size(0), halo.size(2) + x.size(2));
}

} // namespace moe_ext::recurrence
