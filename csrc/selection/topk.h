// Gradient selection with error feedback: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/dispatch.h"
#include "selection/topk_tables.h"

namespace moe_ext::topk {

// Division of a tensor of `numel` elements into scopes of `size` neighbouring elements (the last may be smaller). Up to
// `k` elements are selected in each scope.
struct Scopes {
  int64_t numel;
  int64_t size;
  int64_t k;

  int64_t count() const {
    return numel == 0 ? 0 : (numel - 1) / size + 1;
  }
  int64_t length(int64_t scope) const {
    return scope + 1 < count() ? size : numel - scope * size;
  }
  int64_t kept(int64_t scope) const {
    return length(scope) < k ? length(scope) : k;
  }
  // Sum of `kept` over all scopes.
  int64_t total() const {
    return count() == 0 ? 0 : (count() - 1) * k + kept(count() - 1);
  }
};

// Arguments of a call. If `residual_in` is given, the old state is read from `residual_in` and `velocity_in`, and
// `residual` and `velocity` are only written.
struct FeedbackTensors {
  const Tensor& grad;
  const Tensor& residual;
  const std::optional<Tensor>& velocity;
  const std::optional<Tensor>& residual_in;
  const std::optional<Tensor>& velocity_in;
  double momentum;
  double residual_scale;
};

// Check all arguments of topk_compress_, except for the values of elements, and return the division into scopes.
Scopes check_topk_compress(const FeedbackTensors& state, int64_t k, int64_t scope_size);

// Check all arguments of threshold_compress_, except for the values of elements. The `k` of the result is `capacity`.
Scopes check_threshold_compress(
    const FeedbackTensors& state,
    const Tensor& threshold, // [], or [num_scopes]
    int64_t capacity, int64_t target, int64_t scope_size);

// Pointers and factors of a call, for the loops. `grad` is `state.grad` made contiguous, and owned by the caller.
template <typename T>
Feedback<T> feedback(const FeedbackTensors& state, const Tensor& grad) {
  using Acc = acc_t<T>;
  const auto of = [](const std::optional<Tensor>& tensor) { return tensor ? data<Acc>(*tensor) : nullptr; };
  Feedback<T> args{
      data<const T>(grad),
      data<Acc>(state.residual),
      of(state.velocity),
      data<Acc>(state.residual),
      of(state.velocity),
      static_cast<Acc>(state.residual_scale),
      static_cast<Acc>(state.momentum)};
  if (state.residual_in) {
    args.residual_in = data<const Acc>(*state.residual_in);
    args.velocity_in = of(state.velocity_in);
  }
  return args;
}

} // namespace moe_ext::topk
