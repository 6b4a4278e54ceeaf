// Derivatives of an operator, given as calls of other operators, and leaves whose gradients are added to at once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moe_ext::runtime {

using at::IValue;
using at::Tensor;
using torch::autograd::AccumulateGrad;
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

  bool is_any_needed(const std::vector<bool>& needed) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](size_t i) { return needed[i]; });
  }

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

// True if additions to the gradient come in the order of the engine's additions: on a device with streams, those
// of the node's stream alone do.
bool is_here(const Tensor& grad, AccumulateGrad& leaf);

// True if the engine would give a leaf what comes now, and nobody would see what comes by itself.
bool is_unseen(AccumulateGrad* leaf);

// Lock that the engine holds while it adds to a leaf's gradient: other threads may run backward passes to the same one.
struct Lock : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) {
    return node.*(&Lock::mutex_);
  }
};

// The gradients of the inputs, by edge. `zeros(i)` is what stands for a gradient of result i that is not there;
// `leaf(edge)` is whose gradient an edge's may be added to at once, and undefined in the result, or none. With
// `may_own` the gradients and tensors are nobody else's.
variable_list differentiate(
    const Formula& formula, variable_list grads, variable_list tensors, const std::vector<IValue>& values,
    const std::vector<bool>& needed, bool may_own, const std::function<Tensor(size_t)>& zeros,
    const std::function<Leaf(size_t)>& leaf);

} // namespace moe_ext::runtime
