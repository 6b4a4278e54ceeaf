#include "adam/adam.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::adam {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "adam_step_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? copy, int "
      "step, "
      "float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale, bool follow_copy=False) -> "
      "()");
}

namespace {

constexpr const char* kOp = "adam_step_";

void check_like_param(const char* name, const Tensor& t, const Tensor& param) {
  MOE_CHECK(t.is_cpu(), kOp, ": expected ", name, " to be on cpu, got ", device_string(t));
  MOE_CHECK(
      t.numel() == param.numel(), kOp, ": expected ", name, " to have ", param.numel(),
      " elements as param, got shape ", shape_string(t));
  MOE_CHECK(
      t.is_contiguous(), kOp, ": expected ", name, " to be contiguous, got a strided tensor of shape ",
      shape_string(t));
}

} // namespace

void check_adam_step(
    const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const std::optional<Tensor>& copy, int64_t step) {
  check_like_param("param", param, param);
  check_like_param("grad", grad, param);
  check_like_param("exp_avg", exp_avg, param);
  check_like_param("exp_avg_sq", exp_avg_sq, param);
  check_dtype(kOp, "param", param, ScalarType::Float);
  check_dtype(kOp, "exp_avg", exp_avg, ScalarType::Float);
  check_dtype(kOp, "exp_avg_sq", exp_avg_sq, ScalarType::Float);
  const auto is_16bit = [](const Tensor& t) {
    return t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half;
  };
  MOE_CHECK(
      grad.scalar_type() == ScalarType::Float || is_16bit(grad), kOp,
      ": expected grad to be float32, bfloat16 or float16, got ", dtype_string(grad));
  MOE_CHECK(step >= 1, kOp, ": expected step to be at least 1, got ", step);
  check_apart(kOp, "grad", grad, "param", param);
  check_apart(kOp, "exp_avg", exp_avg, "param", param);
  check_apart(kOp, "exp_avg", exp_avg, "grad", grad);
  check_apart(kOp, "exp_avg_sq", exp_avg_sq, "param", param);
  check_apart(kOp, "exp_avg_sq", exp_avg_sq, "grad", grad);
  check_apart(kOp, "exp_avg_sq", exp_avg_sq, "exp_avg", exp_avg);
  if (copy) {
    check_like_param("copy", *copy, param);
    MOE_CHECK(is_16bit(*copy), kOp, ": expected copy to be bfloat16 or float16, got ", dtype_string(*copy));
    check_apart(kOp, "copy", *copy, "param", param);
    check_apart(kOp, "copy", *copy, "grad", grad);
    check_apart(kOp, "copy", *copy, "exp_avg", exp_avg);
    check_apart(kOp, "copy", *copy, "exp_avg_sq", exp_avg_sq);
  }
}

} // namespace moe_ext::adam
