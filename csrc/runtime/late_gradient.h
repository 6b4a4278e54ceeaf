// A tensor whose gradient waits for the products of its backward pass.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "runtime/derivatives.h"

namespace moe_ext::runtime {

// Gradients of a tensor that products of the backward pass wait here with, until nothing else is left to do: the
// engine takes the node that was recorded last first, so that this one comes when all has run that was recorded after
// it, and before what was recorded before it.
struct LateGradient : torch::autograd::Node {
  // The call of a derivative with one input, and the backward pass that it belongs to.
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

  // Compiled autograd computes all gradients where they are.
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
