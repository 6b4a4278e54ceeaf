#include "selection/topk.h"

#include <cmath>
#include <utility>

#include "common/dispatch.h"
#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::topk {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "topk_compress_(Tensor grad, Tensor(a!) residual, SymInt k, SymInt scope_size=0, Tensor(b!)? velocity=None, "
      "float momentum=0.0, float residual_scale=1.0, bool check_finite=True, Tensor? residual_in=None, "
      "Tensor? velocity_in=None) -> (Tensor values, Tensor indices)");
  m.def(
      "threshold_compress_(Tensor grad, Tensor(a!) residual, Tensor(b!) threshold, SymInt capacity, SymInt target=0, "
      "Tensor(c!)? velocity=None, float momentum=0.0, float residual_scale=1.0, bool check_finite=True, "
      "SymInt scope_size=0, Tensor? residual_in=None, Tensor? velocity_in=None) "
      "-> (Tensor values, Tensor indices, Tensor count)");
}

namespace {

// Checks residual or velocity: contiguous, in the accumulation dtype, with the shape and device of the gradient.
void check_state(const char* op, const char* name, const Tensor& state, const Tensor& grad) {
  check_same_device(op, name, state, "grad", grad);
  check_dtype(op, name, state, acc_dtype(grad.scalar_type()));
  MOE_CHECK(
      shape_string(state) == shape_string(grad), op, ": expected ", name, " to be of shape ", shape_string(grad),
      ", that of grad, got shape ", shape_string(state));
  MOE_CHECK(
      state.is_contiguous(), op, ": expected ", name, " to be contiguous, got a strided tensor of shape ",
      shape_string(state));
}

// Checks `residual_in` and `velocity_in`, from which the old state is read if they are given.
void check_state_in(const char* op, const FeedbackTensors& x) {
  MOE_CHECK(
      x.velocity_in.has_value() == (x.residual_in.has_value() && x.velocity.has_value()), op,
      ": expected velocity_in to be given where residual_in and velocity are, and only there, got ",
      x.velocity_in ? "a tensor" : "None");
  const auto check = [&](const char* name, const std::optional<Tensor>& state) {
    if (state) {
      check_state(op, name, *state, x.grad);
      check_apart(op, name, *state, "residual", x.residual);
      if (x.velocity) {
        check_apart(op, name, *state, "velocity", *x.velocity);
      }
    }
  };
  check("residual_in", x.residual_in);
  check("velocity_in", x.velocity_in);
}

void check_feedback(const char* op, const FeedbackTensors& x) {
  check_floating(op, "grad", x.grad);
  check_state(op, "residual", x.residual, x.grad);
  check_apart(op, "residual", x.residual, "grad", x.grad);
  if (x.velocity) {
    check_state(op, "velocity", *x.velocity, x.grad);
    check_apart(op, "velocity", *x.velocity, "grad", x.grad);
    check_apart(op, "velocity", *x.velocity, "residual", x.residual);
  }
  check_state_in(op, x);
  MOE_CHECK(x.momentum >= 0 && x.momentum < 1, op, ": expected momentum to be in [0, 1), got ", x.momentum);
  MOE_CHECK(
      x.residual_scale >= 0 && std::isfinite(x.residual_scale), op,
      ": expected residual_scale to be finite and at least 0, got ", x.residual_scale);
}

int64_t scope_elements(const char* op, int64_t numel, int64_t scope_size) {
  MOE_CHECK(scope_size >= 0, op, ": expected scope_size to be at least 0, got ", scope_size);
  return scope_size == 0 ? numel : scope_size;
}

} // namespace

Scopes check_topk_compress(const FeedbackTensors& state, int64_t k, int64_t scope_size) {
  const char* op = "topk_compress_";
  check_feedback(op, state);
  const Tensor& grad = state.grad;
  const int64_t size = scope_elements(op, grad.numel(), scope_size);
  MOE_CHECK(
      k >= 0 && k <= size, op, ": expected k to be in [0, ", size, "], the elements of a ",
      scope_size == 0 ? "gradient" : "scope", ", got ", k);
  return {grad.numel(), size, k};
}

Scopes check_threshold_compress(
    const FeedbackTensors& state,
    const Tensor& threshold, // [], or [num_scopes]
    int64_t capacity, int64_t target, int64_t scope_size) {
  const char* op = "threshold_compress_";
  check_feedback(op, state);
  const Tensor& grad = state.grad;
  check_same_device(op, "threshold", threshold, "grad", grad);
  check_dtype(op, "threshold", threshold, acc_dtype(grad.scalar_type()));
  check_apart(op, "threshold", threshold, "grad", grad);
  check_apart(op, "threshold", threshold, "residual", state.residual);
  const std::pair<const char*, const std::optional<Tensor>*> others[] = {
      {"velocity", &state.velocity}, {"residual_in", &state.residual_in}, {"velocity_in", &state.velocity_in}};
  for (const auto& [name, tensor] : others) {
    if (*tensor) {
      check_apart(op, "threshold", threshold, name, **tensor);
    }
  }
  const Scopes scopes{grad.numel(), scope_elements(op, grad.numel(), scope_size), capacity};
  if (scope_size == 0) {
    check_dim(op, "threshold", threshold, 0, "[]");
  } else {
    check_dim(op, "threshold", threshold, 1, "[num_scopes]");
    MOE_CHECK(
        threshold.size(0) == scopes.count(), op, ": expected threshold to be of shape [", scopes.count(),
        "], one of each scope, got shape ", shape_string(threshold));
    MOE_CHECK(threshold.is_contiguous(), op, ": expected threshold to be contiguous, got a strided tensor");
  }
  MOE_CHECK(
      capacity >= 0 && capacity <= scopes.size, op, ": expected capacity to be in [0, ", scopes.size,
      "], the elements of ", scope_size == 0 ? "grad" : "a scope", ", got ", capacity);
  MOE_CHECK(target >= 0, op, ": expected target to be at least 0, got ", target);
  return scopes;
}

} // namespace moe_ext::topk
