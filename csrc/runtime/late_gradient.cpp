#include "runtime/late_gradient.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

namespace moe_ext::runtime {

variable_list LateGradient::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Gradients left by a backward pass that failed do not belong to this one.
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
    // As the engine, which would look at the DTensor alone.
    const bool is_alone = sum.use_count() == 1 && sum.has_storage() && sum.storage().use_count() == 1;
    if (!is_alone && !at::GradMode::is_enabled()) {
      sum = sum.clone();
    }
    const bool is_first = is_unseen(leaf.node) && is_here(sum, *leaf.node);
    {
      const pybind11::gil_scoped_acquire gil;
      sum = Part::call(part->whole, leaf.node->variable, sum).cast<Tensor>();
    }
    // The engine would detach it, for which DTensors ask their rules of sharding: thirty calls of Python.
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

// A tensor, in a graph in which the products of its gradient wait before they go to that of `input`.
Tensor with_late_gradient(const Tensor& tensor, const Tensor& input, std::optional<Part> part) {
  Tensor alias = tensor.detach();
  const auto node = make_node<LateGradient>();
  node->part = std::move(part);
  node->set_next_edges({torch::autograd::impl::gradient_edge(input)});
  torch::autograd::set_history(alias, node);
  return alias;
}

// The tensor, in a graph in which the products of its gradient wait.
Tensor late_gradient(const Tensor& tensor) {
  const bool waits = dynamic_cast<LateGradient*>(tensor.grad_fn().get()) != nullptr;
  return waits ? tensor : with_late_gradient(tensor, tensor, {});
}

// This rank's part of a parameter, a DTensor, in a graph in which the products of its gradient wait. The functions are
// in moe_ext/distributed/dtensor.py.
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
