#include "runtime/derivatives.h"

#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

namespace moe_ext::runtime {
namespace {

// Raises an error in a second derivative: node of the results of a backward operator that has no derivative itself.
struct SecondDerivative : torch::autograd::Node {
  std::string forward_name;

  variable_list apply(variable_list&&) override {
    TORCH_CHECK(false, forward_name, ": expected the result to be differentiated once, got a second derivative");
  }
  std::string name() const override {
    return "SecondDerivative";
  }
};

void call(const Formula& formula, const Derivative& derivative, torch::jit::Stack& stack) {
  const bool once = at::GradMode::is_enabled() && !derivative.op.hasKernelForDispatchKey(c10::DispatchKey::Autograd);
  if (!once) {
    derivative.op.callBoxed(stack);
    return;
  }
  torch::autograd::edge_list edges;
  for (const IValue& value : stack) {
    if (value.isTensor() && value.toTensor().requires_grad()) {
      edges.push_back(torch::autograd::impl::gradient_edge(value.toTensor()));
    }
  }
  {
    const at::AutoGradMode off(false);
    derivative.op.callBoxed(stack);
  }
  if (!edges.empty()) {
    const auto node = make_node<SecondDerivative>();
    node->forward_name = formula.name;
    node->set_next_edges(std::move(edges));
    for (IValue& value : stack) {
      torch::autograd::set_history(value.toTensor(), node);
    }
  }
}

// Return True if the tensor's Python object holds a reference to the tensor, and nobody holds the Python object.
template <typename Slot>
bool is_held_by_python_alone(const Slot* slot) {
  if constexpr (requires { slot->has_unique_reference(); }) {
    return slot->has_unique_reference();
  }
  return false; // older versions of torch have no such reference
}

// Return True if no one else can see the memory of a tensor: torch's CPU allocator made it, and no other tensor holds
// it.
bool is_owned(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) {
    return false;
  }
  const bool of_python = is_held_by_python_alone(tensor.unsafeGetTensorImpl()->pyobj_slot());
  return tensor.use_count() == 1 + static_cast<size_t>(of_python) && tensor.storage().use_count() == 1 &&
         tensor.storage().data_ptr().get_deleter() == at::getCPUAllocator()->raw_deleter();
}

// Return the gradient to which the engine would add, or this rank's part of it, if an addition in place is invisible
// and possible; else an undefined tensor.
Tensor grad_to_add_to(const Leaf& leaf) {
  if (!is_unseen(leaf.node)) {
    return {};
  }
  Tensor grad = leaf.node->variable.mutable_grad(), variable = leaf.node->variable;
  if (leaf.part != nullptr && grad.defined()) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object parts = Part::call(leaf.part->gradient, leaf.node->variable);
    std::tie(grad, variable) =
        parts.is_none() ? std::tuple<Tensor, Tensor>() : parts.cast<std::tuple<Tensor, Tensor>>();
  }
  const bool plain = grad.defined() && is_here(grad, *leaf.node) && grad.layout() == at::kStrided &&
                     grad.is_contiguous() && variable.is_contiguous() && grad.sizes() == variable.sizes() &&
                     grad.scalar_type() == variable.scalar_type() && !grad.requires_grad() && !grad.is_neg() &&
                     !at::isTensorSubclassLike(grad) && !at::isTensorSubclassLike(variable);
  return plain ? grad : Tensor();
}

} // namespace

bool is_here(const Tensor& grad, AccumulateGrad& leaf) {
  if (grad.is_cpu()) {
    return true;
  }
  return grad.is_cuda() && leaf.stream() == c10::impl::VirtualGuardImpl(grad.device().type()).getStream(grad.device());
}

bool is_unseen(AccumulateGrad* leaf) {
  if (leaf == nullptr || at::GradMode::is_enabled()) {
    return false;
  }
  // The single contribution is visible if autograd.grad returns it, or if the parameter, its gradient or the node has a
  // hook.
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr) {
    return false;
  }
  const auto found = wanted->find(leaf);
  if (!wanted->empty() && (found == wanted->end() || found->second.captures_)) {
    return false;
  }
  return leaf->pre_hooks().empty() && leaf->post_hooks().empty() && leaf->tensor_pre_hooks().empty() &&
         leaf->retains_grad_hooks().empty() && !leaf->tensor_post_acc_grad_hooks();
}

variable_list differentiate(
    const Formula& formula, variable_list grads, variable_list tensors, const std::vector<IValue>& values,
    const std::vector<bool>& needed, bool may_own, const std::function<Tensor(size_t)>& zeros,
    const std::function<Leaf(size_t)>& leaf) {
  variable_list found(formula.inputs.size());
  for (size_t d = 0; d < formula.derivatives.size(); ++d) {
    const Derivative& derivative = formula.derivatives[d];
    if (!derivative.is_any_needed(needed)) {
      continue;
    }
    // The last derivative that reads a tensor gets the only reference to it, and may then own its memory.
    const auto is_read_later = [&](const Argument& argument) {
      return std::any_of(
          formula.derivatives.begin() + static_cast<int64_t>(d) + 1, formula.derivatives.end(),
          [&](const Derivative& later) {
            return later.is_any_needed(needed) && later.reads(argument.source, argument.index);
          });
    };
    const auto& schema = derivative.op.schema().arguments();
    torch::jit::Stack stack;
    bool has_grad = false;
    for (size_t i = 0; i < derivative.arguments.size(); ++i) {
      const Argument& argument = derivative.arguments[i];
      if (argument.source == Source::kValue) {
        stack.push_back(values[argument.index]);
        continue;
      }
      if (argument.function == "owned") {
        // An "owned" argument follows the argument of the same tensor, and says if that tensor may be overwritten.
        const auto of = std::find_if(derivative.arguments.begin(), derivative.arguments.end(), [&](const Argument& a) {
          return a.source == argument.source && a.index == argument.index;
        });
        const IValue& value = stack[of - derivative.arguments.begin()];
        stack.push_back(may_own && value.isTensor() && is_owned(value.toTensor()));
        continue;
      }
      Tensor& kept = argument.source == Source::kGrad ? grads[argument.index] : tensors[argument.index];
      Tensor tensor = kept;
      if (argument.source == Source::kGrad) {
        // Only an operator that can do without a gradient declares it as an optional argument.
        const bool optional = schema[i].type()->kind() == c10::TypeKind::OptionalType;
        if (!tensor.defined() && !optional) {
          tensor = zeros(argument.index);
        }
        has_grad |= tensor.defined();
        if (argument.function == "contiguous") {
          kept = tensor = tensor.contiguous();
        }
      }
      if (!is_read_later(argument)) {
        kept.reset();
      }
      if (argument.function == "transpose") {
        tensor = tensor.transpose(1, 2);
      }
      stack.push_back(tensor.defined() ? IValue(std::move(tensor)) : IValue());
    }
    if (!has_grad) {
      continue;
    }
    for (size_t i = stack.size(); i < schema.size(); ++i) {
      stack.push_back(*schema[i].default_value());
    }
    if (const Leaf at = derivative.add ? leaf(derivative.inputs.front()) : Leaf(); at.node != nullptr) {
      const std::lock_guard<std::mutex> lock(Lock::of(*at.node));
      if (const Tensor sum = grad_to_add_to(at); sum.defined()) {
        stack.insert(stack.begin(), sum);
        derivative.add->callBoxed(stack);
        torch::autograd::impl::bump_version(sum);
        continue;
      }
    }
    call(formula, derivative, stack);
    for (size_t i = 0; i < derivative.inputs.size(); ++i) {
      if (needed[derivative.inputs[i]]) {
        found[derivative.inputs[i]] = std::move(stack[i]).toTensor();
      }
    }
  }
  return found;
}

} // namespace moe_ext::runtime
