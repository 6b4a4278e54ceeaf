#include "grouped_gemm/grouped_gemm.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::grouped_gemm {

MOE_EXT_SCHEMAS(m) {
  m.def("grouped_mm(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? bias=None) -> Tensor");
  m.def(
      "_grouped_mm_backward_weight(Tensor grad, Tensor x, Tensor expert_offsets, bool transposed=False, "
      "bool grad_owned=False, bool x_owned=False) -> Tensor");
  m.def(
      "_grouped_mm_backward_weight_add_(Tensor(a!) sum, Tensor grad, Tensor x, Tensor expert_offsets, "
      "bool transposed=False, bool grad_owned=False, bool x_owned=False) -> ()");
  m.def("_grouped_mm_backward_bias(Tensor grad, Tensor expert_offsets) -> Tensor");
  m.def("_set_reuses_memory(bool enabled) -> ()");
}

namespace {

void check_same_dtype(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  MOE_CHECK(
      t.scalar_type() == as.scalar_type(), op, ": expected ", name, " to be ", dtype_string(as), " as ", as_name,
      ", got ", dtype_string(t));
}

} // namespace

void check_grouped_mm(
    const Tensor& x, const Tensor& weight, const Tensor& expert_offsets, const std::optional<Tensor>& bias) {
  const char* op = "grouped_mm";
  check_same_device(op, "weight", weight, "x", x);
  check_same_device(op, "expert_offsets", expert_offsets, "x", x);
  check_floating(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  check_dim(op, "x", x, 2, "[N, K]");
  check_dim(op, "weight", weight, 3, "[E, M, K]");
  check_offsets_tensor(op, expert_offsets);
  check_size(op, "weight", weight, 2, x.size(1), "the columns of x");
  const bool is_long = expert_offsets.scalar_type() == ScalarType::Long;
  check_size(
      op, "expert_offsets", expert_offsets, 0, weight.size(0) + is_long,
      is_long ? "the experts of weight + 1" : "the experts of weight, of which int32 are the ends");
  if (bias) {
    check_same_device(op, "bias", *bias, "x", x);
    check_same_dtype(op, "bias", *bias, "x", x);
    check_dim(op, "bias", *bias, 2, "[E, M]");
    check_size(op, "bias", *bias, 0, weight.size(0), "the experts of weight");
    check_size(op, "bias", *bias, 1, weight.size(1), "the rows of each expert's weight");
  }
}

void check_backward_weight(const Tensor& grad, const Tensor& x, const Tensor& expert_offsets) {
  const char* op = "_grouped_mm_backward_weight";
  check_same_device(op, "x", x, "grad", grad);
  check_floating(op, "grad", grad);
  check_same_dtype(op, "x", x, "grad", grad);
  check_dim(op, "grad", grad, 2, "[N, M]");
  check_dim(op, "x", x, 2, "[N, K]");
  check_size(op, "x", x, 0, grad.size(0), "the rows of grad");
  check_same_device(op, "expert_offsets", expert_offsets, "grad", grad);
  check_offsets_tensor(op, expert_offsets);
}

void check_backward_weight_add(
    const Tensor& sum, const Tensor& grad, const Tensor& x, const Tensor& expert_offsets, bool transposed) {
  const char* op = "_grouped_mm_backward_weight_add_";
  check_backward_weight(grad, x, expert_offsets);
  const Tensor& rows = transposed ? x : grad;
  const Tensor& columns = transposed ? grad : x;
  check_dtype(op, "sum", sum, grad.scalar_type());
  check_same_device(op, "sum", sum, "grad", grad);
  MOE_CHECK(
      sum.dim() == 3 && sum.size(0) == num_experts_of(expert_offsets) && sum.size(1) == rows.size(1) &&
          sum.size(2) == columns.size(1) && sum.is_contiguous(),
      op, ": expected sum to be a contiguous tensor of the weight's shape, got shape ", shape_string(sum));
  check_apart(op, "sum", sum, "grad", grad);
  check_apart(op, "sum", sum, "x", x);
  check_apart(op, "sum", sum, "expert_offsets", expert_offsets);
}

void check_backward_bias(const Tensor& grad, const Tensor& expert_offsets) {
  const char* op = "_grouped_mm_backward_bias";
  check_floating(op, "grad", grad);
  check_dim(op, "grad", grad, 2, "[N, M]");
  check_same_device(op, "expert_offsets", expert_offsets, "grad", grad);
  check_offsets_tensor(op, expert_offsets);
}

} // namespace moe_ext::grouped_gemm
