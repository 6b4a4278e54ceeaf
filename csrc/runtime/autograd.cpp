// Autograd kernels that record an operator by its derivatives, which are calls of other operators.
//
// moe_ext/ops/autograd.py parses the derivatives, documents them, and has the same kernel in Python. Arguments stay on
// the dispatcher's stack from call to call, because operators of the stable ABI take them from a stack.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/derivatives.h"
#include "runtime/late_gradient.h"
#include "runtime/runtime.h"

namespace moe_ext::runtime {
namespace {

// Passes the gradient on to its first input, and gives the other inputs (the losses) the gradients that it holds.
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

// Refuse tangents of forward mode, which the derivatives would silently drop.
void refuse_tangent(const Formula& formula, const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(tensor), formula.name,
      ": expected reverse-mode gradients alone, got a tangent of forward mode");
}

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
    for (const Tensor& grad : grads) {
      refuse_tangent(formula, grad);
    }
    variable_list unpacked = unpack();
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    if (!keep) {
      // The engine would release the saved tensors after this call. Released here, `unpacked` holds the only reference,
      // so that an operator may own the memory.
      for (auto& tensor : tensors) {
        tensor.reset_data();
      }
    }
    // A TorchDispatchMode may keep tensors that it sees, and a graph of the backward pass saves them. Neither may find
    // them overwritten.
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

  // Compiled autograd sees the backward call as a function of tensors and values.
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
    // A compiled graph calls the function after this node is gone, so that it may capture the formula but not the node.
    const auto function = [&formula = formula, options](
                              const variable_list& inputs, const std::vector<IValue>& arguments) {
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
    // Torch registers each bound function of the process under a name, which must be unique.
    static std::atomic<uint64_t> number{0};
    const std::string bound =
        python->bind_function(saved.get_py_compiler(), name() + std::to_string(number++), function, types);
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

// Refuse second derivatives by torch.func if an operator of the backward pass has no derivative. The outer transform
// sees only that operator's calls, and would drop the contribution of a call without a graph.
void refuse_second_derivative(const Formula& formula, const std::vector<bool>& needed) {
  if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode)) {
    return; // no transform is active
  }
  {
    const pybind11::gil_scoped_acquire gil;
    const auto transforms = pybind11::module_::import("moe_ext.ops.autograd").attr("transforms")();
    if (transforms.attr("count")("grad").cast<int>() < 2) {
      return;
    }
  }
  for (const Derivative& derivative : formula.derivatives) {
    TORCH_CHECK(
        !derivative.is_any_needed(needed) || derivative.op.hasKernelForDispatchKey(c10::DispatchKey::Autograd),
        formula.name, ": expected the result to be differentiated once, got a second derivative by torch.func");
  }
}

// Autograd kernel of an operator. It has one formula, or two: `formula_given` is for calls that give argument `given`.
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
        refuse_tangent(formula, value.toTensor());
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
    refuse_second_derivative(formula, needed);
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

  // Return the indices of the saved tensors that the derivatives of the needed inputs read.
  static std::vector<size_t> wanted_tensors(const Formula& formula, const std::vector<bool>& needed) {
    std::vector<size_t> wanted;
    for (size_t i = 0; i < formula.tensors.size(); ++i) {
      const bool is_read =
          std::any_of(formula.derivatives.begin(), formula.derivatives.end(), [&](const Derivative& derivative) {
            return derivative.is_any_needed(needed) &&
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

// Types that moe_ext/ops/autograd.py passes, in the order of the fields of the structs in derivatives.h.
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
  // A registration ends with its library object. This one is never destroyed, and lasts as long as the process.
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

// Let every node behind a tensor run on the stream that is current on the device now, except nodes of leaves; if the
// tensor is a leaf, its node. The engine runs a node on the stream of its forward pass, which is part of the node's
// input metadata. The metadata is built anew, because its stream cannot be set. A node with nested tensors keeps its
// stream.
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
    std::vector<std::optional<Input>> inputs; // nullopt if the node knows nothing of the input
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

// Return an alias of the tensor in a graph in which each loss has the gradient `coefficient * scale`.
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
  // A view made by a custom node could not be written to. The alias is a plain tensor with this node as its history.
  Tensor alias(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/false));
  torch::autograd::set_history(alias, node);
  return alias;
}

} // namespace

void bind_autograd(pybind11::module_& module) {
  module.def("inject_losses", &inject_losses);
  module.def("move_to_current_stream", &move_to_current_stream);
  module.def("register_derivatives", &register_derivatives);
  bind_late_gradients(module);
}

} // namespace moe_ext::runtime
