// Deferred computation of a tensor's gradient, until the rest of the backward pass recorded after it has run.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "runtime/derivatives.h"

namespace moe_ext::runtime {

// Node that defers the products which contribute to a tensor's gradient. The engine runs the ready node that was
// recorded last first. Therefore this node runs after all nodes recorded after it, and before nodes recorded before it.
struct LateGradient : torch::autograd::Node {
  // A deferred call of a derivative with one input, and the backward pass (graph task) that it belongs to.
  struct Call {
    int graph_task;
    const Formula& formula;
    std::vector<bool> needed;
    variable_list grads;
    variable_list tensors;
    std::vector<IValue> values;
    bool may_own;
  };
  std::vector<Call> calls;
  std::optional<Part> part;

  std::string name() const override {
    return "LateGradient";
  }

  void put(Call call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls.push_back(std::move(call));
  }

  variable_list apply(variable_list&& grads) override;

  // Under compiled autograd no call is deferred, so that the node passes its gradient on.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !part,
        "compiled autograd: expected experts to be plain tensors, got DTensors; run the backward pass without it");
  }
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables&) override {
    return grads;
  }
};

void bind_late_gradients(pybind11::module_& module);

} // namespace moe_ext::runtime
