#include "router_linear/router_linear.h"

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::router_linear {

MOE_EXT_SCHEMAS(m) {
  m.def("router_logits(Tensor x, Tensor weight) -> Tensor");
  m.def("_router_logits_backward_x(Tensor grad, Tensor weight, ScalarType dtype) -> Tensor");
  m.def("_router_logits_backward_weight(Tensor grad, Tensor x, ScalarType dtype) -> Tensor");
}

namespace {

void check_matrix(const char* op, const char* name, const Tensor& t, const char* legend) {
  check_floating(op, name, t);
  check_dim(op, name, t, 2, legend);
}

void check_target(const char* op, ScalarType dtype) {
  MOE_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
          dtype == ScalarType::Half,
      op, ": expected dtype to be float32, float64, bfloat16 or float16, got ", torch::headeronly::toString(dtype));
}

} // namespace

void check_router_logits(const Tensor& x, const Tensor& weight) {
  const char* op = "router_logits";
  check_same_device(op, "weight", weight, "x", x);
  check_matrix(op, "x", x, "[T, D]");
  check_matrix(op, "weight", weight, "[E, D]");
  check_size(op, "weight", weight, 1, x.size(1), "the features of x");
}

void check_backward_x(const Tensor& grad, const Tensor& weight, ScalarType dtype) {
  const char* op = "_router_logits_backward_x";
  check_same_device(op, "weight", weight, "grad", grad);
  check_target(op, dtype);
  check_dtype(op, "grad", grad, acc_dtype(dtype));
  check_dim(op, "grad", grad, 2, "[T, E]");
  check_matrix(op, "weight", weight, "[E, D]");
  check_size(op, "weight", weight, 0, grad.size(1), "the experts of grad");
}

void check_backward_weight(const Tensor& grad, const Tensor& x, ScalarType dtype) {
  const char* op = "_router_logits_backward_weight";
  check_same_device(op, "x", x, "grad", grad);
  check_target(op, dtype);
  check_matrix(op, "x", x, "[T, D]");
  check_dtype(op, "grad", grad, acc_dtype(x.scalar_type()));
  check_dim(op, "grad", grad, 2, "[T, E]");
  check_size(op, "grad", grad, 0, x.size(0), "the tokens of x");
}

} // namespace moe_ext::router_linear
