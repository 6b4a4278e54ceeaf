#include "runtime/late_gradient.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

namespace moe_ext::runtime {

variable_list LateGradient::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Calls left behind by a failed backward pass belong to another graph task, and are dropped.
  const int graph_task = torch::autograd::get_current_graph_task_id();
  Tensor sum = std::move(grads.front());
  const Leaf leaf{dynamic_cast<AccumulateGrad*>(next_edge(0).function.get()), part ? &*part : nullptr};
  for (Call& call : std::exchange(calls, {})) {
    if (call.graph_task != graph_task) {
      continue;
    }
    const variable_list found = differentiate(
        call.formula, std::move(call.grads), std::move(call.tensors), call.values, call.needed, call.may_own,
        [](size_t) { return Tensor(); }, [&](size_t) { return leaf; });
    for (const Tensor& gradient : found) {
      if (gradient.defined()) {
        sum = sum.defined() ? sum + gradient : gradient;
      }
    }
  }
  if (part && sum.defined()) {
    // AccumulateGrad clones a gradient that others hold. It would check the DTensor only, and miss references to `sum`.
    const bool is_alone = sum.use_count() == 1 && sum.has_storage() && sum.storage().use_count() == 1;
    if (!is_alone && !at::GradMode::is_enabled()) {
      sum = sum.clone();
    }
    const bool is_first = is_unseen(leaf.node) && is_here(sum, *leaf.node);
    {
      const pybind11::gil_scoped_acquire gil;
      sum = Part::call(part->whole, leaf.node->variable, sum).cast<Tensor>();
    }
    // The first gradient is stored here. AccumulateGrad would detach the DTensor, which runs DTensor's sharding rules:
    // thirty calls of Python.
    if (is_first) {
      const std::lock_guard<std::mutex> of_leaf(Lock::of(*leaf.node));
      if (Tensor& grad = leaf.node->variable.mutable_grad(); !grad.defined()) {
        grad = std::exchange(sum, Tensor());
      }
    }
  }
  return {std::move(sum)};
}

namespace {

// Alias of `tensor` behind a LateGradient node, whose gradient goes to `input`.
Tensor with_late_gradient(const Tensor& tensor, const Tensor& input, std::optional<Part> part) {
  Tensor alias = tensor.detach();
  const auto node = make_node<LateGradient>();
  node->part = std::move(part);
  node->set_next_edges({torch::autograd::impl::gradient_edge(input)});
  torch::autograd::set_history(alias, node);
  return alias;
}

// Alias of `tensor` behind a LateGradient node; `tensor` itself if it has one.
Tensor late_gradient(const Tensor& tensor) {
  const bool waits = dynamic_cast<LateGradient*>(tensor.grad_fn().get()) != nullptr;
  return waits ? tensor : with_late_gradient(tensor, tensor, {});
}

// Alias of this rank's part of a parameter (a DTensor), behind a LateGradient node. The functions are those of `Part`,
// from moe_ext/distributed/dtensor.py.
Tensor part_in_graph(
    const Tensor& local, const Tensor& parameter, const pybind11::object& whole, const pybind11::object& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(parameter),
      "experts: expected reverse-mode gradients alone, got a tangent of forward mode");
  TORCH_CHECK(
      parameter.is_leaf() && parameter.requires_grad(),
      "experts: expected a parameter to be a leaf that requires gradients, got another tensor");
  return with_late_gradient(local, parameter, Part{Part::safe(whole), Part::safe(gradient)});
}

} // namespace

void bind_late_gradients(pybind11::module_& module) {
  module.def("late_gradient", &late_gradient);
  module.def("part_in_graph", &part_in_graph);
}

} // namespace moe_ext::runtime
