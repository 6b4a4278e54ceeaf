// Autograd kernels that record an operator by its derivatives, given as calls of other operators.
//
// moe_ext/ops/autograd.py parses the derivatives and says what they mean; it has the same kernel in Python. Arguments
// stay on the dispatcher's stack from call to call: operators of the stable ABI take them from one.
#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/runtime.h"

namespace moe_ext::runtime {
namespace {

using at::IValue;
using at::Tensor;
using torch::autograd::variable_list;

// torch 2.11 and 2.12 hold nodes by std::shared_ptr, later ones count references inside the node.
#if __has_include(<torch/csrc/autograd/node.h>)
template <typename T>
using NodePtr = c10::intrusive_ptr<T>;
template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}
#else
template <typename T>
using NodePtr = std::shared_ptr<T>;
template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  return NodePtr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

enum class Source { kGrad, kTensor, kValue };

// Arguments of an operator of the backward pass: the gradient of a result, a saved tensor or a saved value.
struct Argument {
  Source source;
  size_t index;
  std::string function; // on tensors in the backward pass: "", "contiguous" or "transpose"; "owned" is a bool
};

// A call that gives the gradients of some inputs.
struct Derivative {
  c10::OperatorHandle op;
  std::vector<size_t> inputs; // by the node's edges
  std::vector<Argument> arguments;
  std::optional<c10::OperatorHandle> add; // "<op>_add_": adds the result to its first argument

  bool reads(Source source, size_t index) const {
    return std::any_of(arguments.begin(), arguments.end(), [&](const Argument& argument) {
      return argument.source == source && argument.index == index;
    });
  }
};

// Values to keep of the arguments or, from `num_arguments` on, of the results.
struct Kept {
  size_t position;
  std::string function; // of values: "", "columns", "dtype" or "is_transposed"
};

struct Formula {
  std::string name;
  size_t num_arguments;
  size_t num_results;
  std::vector<size_t> inputs; // positions of the arguments that have a derivative, an edge each
  std::vector<Kept> tensors;
  std::vector<Kept> values;
  std::vector<bool> differentiable; // results
  std::vector<Derivative> derivatives;
};

bool is_any_needed(const Derivative& derivative, const std::vector<bool>& needed) {
  return std::any_of(derivative.inputs.begin(), derivative.inputs.end(), [&](size_t i) { return needed[i]; });
}

// An error is all there is to the gradient of a derivative that has no derivative itself.
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

// True if the tensor's object in Python holds a reference, and nobody holds the object.
template <typename Slot>
bool is_held_by_python_alone(const Slot* slot) {
  if constexpr (requires { slot->has_unique_reference(); }) {
    return slot->has_unique_reference();
  }
  return false; // older versions have no such reference
}

// True if nobody else can see the memory of a tensor: torch's allocator gave it, and no other tensor holds it.
bool is_owned(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) {
    return false;
  }
  const bool of_python = is_held_by_python_alone(tensor.unsafeGetTensorImpl()->pyobj_slot());
  return tensor.use_count() == 1 + static_cast<size_t>(of_python) && tensor.storage().use_count() == 1 &&
         tensor.storage().data_ptr().get_deleter() == at::getCPUAllocator()->raw_deleter();
}

using torch::autograd::AccumulateGrad;

// True if additions to the gradient come in the order of the engine's additions: on a device with streams, those
// of the node's stream alone do.
bool is_here(const Tensor& grad, AccumulateGrad& leaf) {
  if (grad.is_cpu()) {
    return true;
  }
  return grad.is_cuda() && leaf.stream() == c10::impl::VirtualGuardImpl(grad.device().type()).getStream(grad.device());
}

// Two functions of Python for a leaf that is a DTensor, of which a graph has this rank's part. The node of the leaf
// holds it: another reference would keep torch from giving it other values, as `Module.to` does.
struct Part {
  c10::SafePyObject whole;    // (DTensor, gradient of the part) to the gradient of the DTensor
  c10::SafePyObject gradient; // DTensor to the parts of its gradient and of itself, or None

  static c10::SafePyObject safe(const pybind11::object& object) {
    return {pybind11::object(object).release().ptr(), getPyInterpreter()};
  }

  static pybind11::object call(const c10::SafePyObject& function, const auto&... args) {
    return pybind11::reinterpret_borrow<pybind11::object>(function.ptr(getPyInterpreter()))(args...);
  }
};

// A leaf, and where its gradient is that of a DTensor the part that is computed.
struct Leaf {
  AccumulateGrad* node = nullptr;
  const Part* part = nullptr;
};

// True if the engine would give a leaf what comes now, and nobody would see what comes by itself.
bool is_unseen(AccumulateGrad* leaf) {
  if (leaf == nullptr || at::GradMode::is_enabled()) {
    return false;
  }
  // autograd.grad hands the gradient out, and so may a hook of the parameter, of its gradient or of the node.
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

// The gradient that the engine would add to, where nobody sees what is added by itself; else undefined.
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

// Lock that the engine holds while it adds to a leaf's gradient: other threads may run backward passes to the same one.
struct Lock : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) {
    return node.*(&Lock::mutex_);
  }
};

// The gradients of the inputs, by edge. `zeros(i)` is what stands for a gradient of result i that is not there;
// `leaf(edge)` is whose gradient an edge's may be added to at once, and undefined in the result, or none. With
// `may_own` the gradients and tensors are nobody else's.
template <typename Zeros, typename LeafOf>
variable_list differentiate(
    const Formula& formula, variable_list grads, variable_list tensors, const std::vector<IValue>& values,
    const std::vector<bool>& needed, bool may_own, const Zeros& zeros, const LeafOf& leaf) {
  variable_list found(formula.inputs.size());
  for (size_t d = 0; d < formula.derivatives.size(); ++d) {
    const Derivative& derivative = formula.derivatives[d];
    if (!is_any_needed(derivative, needed)) {
      continue;
    }
    // The last to read a tensor has it for its own.
    const auto is_read_later = [&](const Argument& argument) {
      return std::any_of(
          formula.derivatives.begin() + static_cast<int64_t>(d) + 1, formula.derivatives.end(),
          [&](const Derivative& later) {
            return is_any_needed(later, needed) && later.reads(argument.source, argument.index);
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
        // The argument before it, which it asks about.
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
        // An operator that can do without a gradient has it as an optional argument.
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

  variable_list apply(variable_list&& grads) override {
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

// Passes the gradient of its first input on, and gives the others the gradients that it holds.
struct InjectLosses : torch::autograd::Node {
  variable_list gradients;

  std::string name() const override {
    return "InjectLosses";
  }

  variable_list apply(variable_list&& grads) override {
    variable_list result = gradients;
    result.insert(result.begin(), std::move(grads.front()));
    return result;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(gradients);
  }
  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(gradients);
    variable_list result = apply(variable_list(grads));
    saved.after(gradients);
    return result;
  }
};

using torch::dynamo::autograd::PackedArgs;

struct FormulaNode : torch::autograd::Node {
  explicit FormulaNode(const Formula& formula) : formula(formula), tensors(formula.tensors.size()) {
  }

  const Formula& formula;
  std::vector<torch::autograd::SavedVariable> tensors;
  std::vector<IValue> values;

  std::string name() const override {
    return formula.name + "_backward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& tensor : tensors) {
      tensor.reset_data();
    }
  }

  variable_list unpack() {
    variable_list unpacked;
    unpacked.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      unpacked.push_back(tensor.unpack(getptr()));
    }
    return unpacked;
  }

  std::vector<bool> needed() const {
    std::vector<bool> result(num_outputs());
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = task_should_compute_output(i);
    }
    return result;
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list unpacked = unpack();
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    if (!keep) {
      // As the engine does next. Until then nothing could be owned.
      for (auto& tensor : tensors) {
        tensor.reset_data();
      }
    }
    // A mode of torch may keep what it sees, and so does a graph of the backward pass.
    const bool may_own = !keep && !at::GradMode::is_enabled() && c10::impl::TorchDispatchModeTLS::stack_len() == 0;
    std::vector<bool> now = needed();
    for (const Derivative& derivative : formula.derivatives) {
      const size_t input = derivative.inputs.front();
      auto* const late = dynamic_cast<LateGradient*>(next_edge(input).function.get());
      if (late == nullptr || !now[input] || derivative.inputs.size() > 1 || at::GradMode::is_enabled() ||
          !std::all_of(grads.begin(), grads.end(), [](const Tensor& grad) { return grad.defined(); })) {
        continue;
      }
      std::vector<bool> alone(now.size());
      alone[input] = true;
      now[input] = false;
      const int graph_task = torch::autograd::get_current_graph_task_id();
      late->put({graph_task, formula, std::move(alone), grads, unpacked, values, may_own});
    }
    return differentiate(
        formula, std::move(grads), std::move(unpacked), values, now, may_own,
        [&](size_t i) { return input_metadata(i).zeros_like(); },
        [&](size_t i) { return Leaf{dynamic_cast<AccumulateGrad*>(next_edge(i).function.get())}; });
  }

  // Compiled autograd sees the call as a function of tensors and values.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(formula.name);
    args.collect(tensors, true);
    args.collect(values);
  }

  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(tensors);
    saved.before(values);
    PackedArgs packed(values);
    packed.pack(unpack());
    packed.pack(needed());
    std::vector<at::TensorOptions> options(num_inputs());
    for (uint32_t i = 0; i < num_inputs(); ++i) {
      const bool differentiable = formula.differentiable[i];
      const auto shape = differentiable ? input_metadata(i).shape_as_dim_vector() : c10::SymIntArrayRef();
      packed.pack(shape.vec());
      options[i] = differentiable ? input_metadata(i).options() : at::TensorOptions();
    }
    std::vector<at::TypePtr> types;
    for (const IValue& value : packed.vec()) {
      types.push_back(value.isTensor() ? at::TensorType::get() : value.type());
    }
    const auto function = [this, options](const variable_list& inputs, const std::vector<IValue>& arguments) {
      const auto rest = arguments.begin() + static_cast<int64_t>(formula.values.size());
      PackedArgs unpacked(std::vector<IValue>(rest, arguments.end()));
      const auto of_tensors = unpacked.unpack<variable_list>();
      const std::vector<IValue> of_values(arguments.begin(), rest);
      const auto wanted = unpacked.unpack<std::vector<bool>>();
      std::vector<std::vector<c10::SymInt>> shapes;
      for (size_t i = 0; i < options.size(); ++i) {
        shapes.push_back(unpacked.unpack<std::vector<c10::SymInt>>());
      }
      return differentiate(
          formula, inputs, of_tensors, of_values, wanted, false,
          [&](size_t i) { return at::zeros_symint(shapes[i], options[i]); }, [](size_t) { return Leaf(); });
    };
    const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string bound = python->bind_function(saved.get_py_compiler(), name(), function, types);
    const auto of_inputs =
        torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges()));
    variable_list results =
        python->call_function(saved.get_py_compiler(), "apply_functional", bound, grads, packed.vec(), of_inputs);
    saved.after(tensors);
    saved.after(values);
    return results;
  }
};

IValue value_of(const IValue& argument, const std::string& function) {
  if (function.empty()) {
    return argument;
  }
  const Tensor& tensor = argument.toTensor();
  if (function == "columns") {
    return tensor.sym_size(1);
  }
  if (function == "dtype") {
    return tensor.scalar_type();
  }
  TORCH_INTERNAL_ASSERT(function == "is_transposed", function);
  return tensor.sym_stride(1) == 1 && tensor.sym_stride(2) != 1;
}

// An operator has one formula, or two: the second for calls that give a certain argument.
struct Kernel : c10::OperatorKernel {
  Formula formula;
  std::optional<Formula> formula_given;
  size_t given = 0;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto argument = [&](size_t i) -> const IValue& { return torch::jit::peek(*stack, i, formula.num_arguments); };
    const Formula& used = formula_given && argument(given).isTensor() ? *formula_given : formula;
    std::vector<bool> needed;
    NodePtr<FormulaNode> node = record(used, argument, needed);
    {
      const at::AutoDispatchBelowAutograd below;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
    if (node) {
      keep_results(*stack, used, node, needed);
    }
  }

  template <typename Get>
  static NodePtr<FormulaNode> record(const Formula& formula, const Get& argument, std::vector<bool>& needed) {
    bool any = false;
    for (size_t position : formula.inputs) {
      const IValue& value = argument(position);
      if (value.isTensor()) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            !torch::autograd::isFwGradDefined(value.toTensor()), formula.name,
            ": expected reverse-mode gradients alone, got a tangent of forward mode");
        any |= value.toTensor().requires_grad();
      }
    }
    if (!any || !at::GradMode::is_enabled()) {
      return {};
    }
    auto node = make_node<FormulaNode>(formula);
    torch::autograd::edge_list edges;
    edges.reserve(formula.inputs.size());
    for (size_t position : formula.inputs) {
      const IValue& value = argument(position);
      const bool wants = value.isTensor() && value.toTensor().requires_grad();
      needed.push_back(wants);
      edges.push_back(wants ? torch::autograd::impl::gradient_edge(value.toTensor()) : torch::autograd::Edge());
    }
    node->set_next_edges(std::move(edges));
    node->values.reserve(formula.values.size());
    for (const Kept& kept : formula.values) {
      node->values.push_back(value_of(argument(kept.position), kept.function));
    }
    for (size_t i : wanted_tensors(formula, needed)) {
      const size_t position = formula.tensors[i].position;
      if (position < formula.num_arguments && argument(position).isTensor()) {
        node->tensors[i] = torch::autograd::SavedVariable(argument(position).toTensor(), false);
      }
    }
    return node;
  }

  static void keep_results(
      const torch::jit::Stack& stack, const Formula& formula, const NodePtr<FormulaNode>& node,
      const std::vector<bool>& needed) {
    const auto result = [&](size_t i) -> const Tensor& {
      return torch::jit::peek(stack, i, formula.num_results).toTensor();
    };
    for (size_t i = 0; i < formula.num_results; ++i) {
      if (formula.differentiable[i]) {
        torch::autograd::set_history(result(i), node);
      } else {
        node->add_input_metadata(torch::autograd::Node::undefined_input());
      }
    }
    for (size_t i : wanted_tensors(formula, needed)) {
      const size_t position = formula.tensors[i].position;
      if (position >= formula.num_arguments) {
        node->tensors[i] = torch::autograd::SavedVariable(result(position - formula.num_arguments), true);
      }
    }
  }

  // The tensors that the derivatives of these inputs read.
  static std::vector<size_t> wanted_tensors(const Formula& formula, const std::vector<bool>& needed) {
    std::vector<size_t> wanted;
    for (size_t i = 0; i < formula.tensors.size(); ++i) {
      const bool is_read =
          std::any_of(formula.derivatives.begin(), formula.derivatives.end(), [&](const Derivative& derivative) {
            return is_any_needed(derivative, needed) &&
                   std::any_of(derivative.arguments.begin(), derivative.arguments.end(), [&](const Argument& read) {
                     return read.source == Source::kTensor && read.index == i;
                   });
          });
      if (is_read) {
        wanted.push_back(i);
      }
    }
    return wanted;
  }
};

// As moe_ext/ops/autograd.py has them, in the order of the fields above.
using PyArgument = std::tuple<std::string, size_t, std::string>;
using PyDerivative = std::tuple<std::string, std::vector<size_t>, std::vector<PyArgument>>;
using PyKept = std::vector<std::pair<size_t, std::string>>;
using PyFormula = std::tuple<std::vector<size_t>, PyKept, PyKept, std::vector<bool>, std::vector<PyDerivative>>;

Formula read_formula(const c10::OperatorHandle& op, const PyFormula& from) {
  const auto& [inputs, tensors, values, differentiable, derivatives] = from;
  const auto& schema = op.schema();
  Formula formula{
      schema.name(), schema.arguments().size(), schema.returns().size(), inputs, {}, {}, differentiable, {}};
  for (const auto& [position, function] : tensors) {
    formula.tensors.push_back({position, function});
  }
  for (const auto& [position, function] : values) {
    formula.values.push_back({position, function});
  }
  formula.name = formula.name.substr(formula.name.find("::") + 2);
  for (const auto& [name, edges, arguments] : derivatives) {
    auto& dispatcher = c10::Dispatcher::singleton();
    const std::string full_name = "moe_ext::" + name;
    Derivative derivative{
        dispatcher.findSchemaOrThrow(full_name.c_str(), ""),
        edges,
        {},
        dispatcher.findSchema({full_name + "_add_", ""})};
    for (const auto& [source, index, function] : arguments) {
      const Source kind = source == "grad" ? Source::kGrad : source == "tensor" ? Source::kTensor : Source::kValue;
      derivative.arguments.push_back({kind, index, function});
    }
    formula.derivatives.push_back(std::move(derivative));
  }
  return formula;
}

void register_derivatives(
    const std::string& name, const PyFormula& formula, const std::optional<std::pair<size_t, PyFormula>>& given) {
  // A registration lasts as long as its library object: as long as the process.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "moe_ext", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("moe_ext::" + name).c_str(), "");
  auto kernel = std::make_unique<Kernel>();
  kernel->formula = read_formula(op, formula);
  if (given) {
    kernel->given = given->first;
    kernel->formula_given = read_formula(op, given->second);
  }
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor<Kernel>(std::move(kernel)));
}

// Let every node that a tensor's gradient goes through run on the stream that is current on its device now, but for
// those of leaves; that of a leaf where the tensor is one. The engine runs a node on the stream of its forward pass,
// which stands in what the node keeps of each input; that is made anew here, since it cannot be set. A node with
// nested tensors keeps its stream.
void move_to_current_stream(const Tensor& tensor) {
  using torch::autograd::Node;
  struct Input {
    at::TensorOptions options;
    std::vector<c10::SymInt> shape;
    bool is_subclass;
    std::optional<at::ScalarType> grad_dtype;
  };
  std::unordered_set<Node*> found;
  std::vector<Node*> next;
  const auto visit = [&](Node* node) {
    if (node != nullptr && found.insert(node).second) {
      next.push_back(node);
    }
  };
  visit(torch::autograd::impl::gradient_edge(tensor).function.get());
  while (!next.empty()) {
    Node& node = *next.back();
    next.pop_back();
    for (const auto& edge : node.next_edges()) {
      if (dynamic_cast<AccumulateGrad*>(edge.function.get()) == nullptr) {
        visit(edge.function.get());
      }
    }
    std::vector<std::optional<Input>> inputs; // none for one that nothing is known of
    bool is_nested = false;
    for (uint32_t i = 0; i < node.num_inputs(); ++i) {
      const auto& input = node.input_metadata(i);
      if (input.was_default_constructed()) {
        inputs.emplace_back();
        continue;
      }
      is_nested |= input.is_nested_tensor() || input.is_cpp_nested_tensor();
      if (is_nested) {
        break;
      }
      inputs.push_back(
          Input{input.options(), input.shape_as_dim_vector().vec(), input.is_tensor_subclass(), input.grad_dtype()});
    }
    if (is_nested) {
      continue;
    }
    node.clear_input_metadata();
    for (const auto& input : inputs) {
      if (input) {
        node.add_input_metadata(
            input->options, input->shape, input->is_subclass, /*is_nested=*/false, input->grad_dtype);
      } else {
        node.add_input_metadata(Node::undefined_input());
      }
    }
  }
}

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

// The tensor, in a graph in which each loss has the gradient `coefficient * scale`.
Tensor inject_losses(
    const Tensor& tensor, const variable_list& losses, const std::vector<double>& coefs,
    const std::variant<double, Tensor>& scale) {
  variable_list inputs = losses;
  inputs.insert(inputs.begin(), tensor);
  if (!torch::autograd::compute_requires_grad(inputs)) {
    return tensor;
  }
  auto node = make_node<InjectLosses>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  {
    const at::AutoDispatchBelowAutograd below;
    const auto* const number = std::get_if<double>(&scale);
    for (size_t i = 0; i < losses.size(); ++i) {
      const at::TensorOptions options = losses[i].options();
      node->gradients.push_back(
          number != nullptr ? at::full({}, coefs[i] * *number, options)
                            : at::full({}, coefs[i], options) * std::get<Tensor>(scale));
    }
  }
  // Not a view, which nobody could write to: the node is all that leads to the tensor from here on.
  Tensor alias(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/false));
  torch::autograd::set_history(alias, node);
  return alias;
}

} // namespace

void bind_autograd(pybind11::module_& module) {
  module.def("inject_losses", &inject_losses);
  module.def("late_gradient", &late_gradient);
  module.def("move_to_current_stream", &move_to_current_stream);
  module.def("part_in_graph", &part_in_graph);
  module.def("register_derivatives", &register_derivatives);
}

} // namespace moe_ext::runtime
