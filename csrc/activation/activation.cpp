#include "activation/activation.h"

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::activation {

MOE_EXT_SCHEMAS(m) {
  m.def("activation(Tensor x, str kind) -> Tensor");
  m.def("_activation_backward(Tensor grad, Tensor x, str kind) -> Tensor");
  m.def(
      "gated_activation(Tensor x, str kind=\"swiglu\", str layout=\"concatenated\", Tensor? slot_weights=None, "
      "Tensor? slot_of_row=None) -> Tensor");
  m.def("_gated_activation_backward(Tensor grad, Tensor x, str kind, str layout) -> Tensor");
  m.def(
      "_gated_activation_backward_weighted(Tensor grad, Tensor x, str kind, str layout, Tensor slot_weights, "
      "Tensor slot_of_row, bool x_owned=False) -> (Tensor grad_x, Tensor grad_weights)");
}

Kind check_activation(const char* op, const Tensor& x, const std::string& kind) {
  check_floating(op, "x", x);
  if (kind == "silu") {
    return Kind::kSilu;
  }
  if (kind == "gelu") {
    return Kind::kGelu;
  }
  if (kind == "gelu_tanh") {
    return Kind::kGeluTanh;
  }
  if (kind == "relu") {
    return Kind::kRelu;
  }
  MOE_CHECK(
      kind == "relu_squared", op, ": expected kind to be silu, gelu, gelu_tanh, relu or relu_squared, got ", kind);
  return Kind::kReluSquared;
}

namespace {

Kind gate_kind(const char* op, const std::string& kind) {
  if (kind == "swiglu") {
    return Kind::kSilu;
  }
  if (kind == "geglu") {
    return Kind::kGelu;
  }
  if (kind == "geglu_tanh") {
    return Kind::kGeluTanh;
  }
  MOE_CHECK(kind == "reglu", op, ": expected kind to be swiglu, geglu, geglu_tanh or reglu, got ", kind);
  return Kind::kRelu;
}

} // namespace

GatedOptions check_gated(const char* op, const Tensor& x, const std::string& kind, const std::string& layout) {
  check_floating(op, "x", x);
  const Kind gate = gate_kind(op, kind);
  MOE_CHECK(
      layout == "concatenated" || layout == "interleaved", op,
      ": expected layout to be concatenated or interleaved, got ", layout);
  MOE_CHECK(
      x.dim() >= 1 && x.size(x.dim() - 1) % 2 == 0, op, ": expected x to be of even size in the last dim, got shape ",
      shape_string(x));
  return {gate, layout == "concatenated" ? Layout::kConcatenated : Layout::kInterleaved};
}

void check_row_weights(
    const char* op, const Tensor& x, const std::optional<Tensor>& slot_weights,
    const std::optional<Tensor>& slot_of_row) {
  MOE_CHECK(
      slot_weights.has_value() == slot_of_row.has_value(), op,
      ": expected slot_weights and slot_of_row to be given together, got ",
      slot_weights ? "slot_weights" : "slot_of_row", " alone");
  if (!slot_weights) {
    return;
  }
  check_same_device(op, "slot_weights", *slot_weights, "x", x);
  check_same_device(op, "slot_of_row", *slot_of_row, "x", x);
  check_dtype(op, "slot_weights", *slot_weights, acc_dtype(x.scalar_type()));
  check_dtype(op, "slot_of_row", *slot_of_row, ScalarType::Long);
  check_dim(op, "x", x, 2, "[N, 2F] with slot_weights");
  check_dim(op, "slot_of_row", *slot_of_row, 1, "[N]");
  check_size(op, "slot_of_row", *slot_of_row, 0, x.size(0), "the rows of x");
}

void check_grad(const char* op, const Tensor& grad, const Tensor& x, int64_t last_dim) {
  check_same_device(op, "grad", grad, "x", x);
  check_dtype(op, "grad", grad, x.scalar_type());
  bool same = grad.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) {
    same = grad.size(i) == (i + 1 < x.dim() ? x.size(i) : last_dim);
  }
  MOE_CHECK(
      same, op, ": expected grad to be shaped as the output for x ", shape_string(x), ", got shape ",
      shape_string(grad));
}

} // namespace moe_ext::activation
