// Derivatives of an operator, given as calls of other operators. They may be added in place to the gradients of leaves.
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

// torch 2.11 and 2.12 hold nodes by std::shared_ptr. Later versions count references inside the node.
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

// Argument of an operator of the backward pass: the gradient of a result, a saved tensor or a saved value.
struct Argument {
  Source source;
  size_t index;
  // applied to tensors in the backward pass: "", "contiguous" or "transpose"; "owned" gives a bool
  std::string function;
};

// A call of an operator that computes the gradients of some inputs.
struct Derivative {
  c10::OperatorHandle op;
  std::vector<size_t> inputs; // indices into the node's edges
  std::vector<Argument> arguments;
  std::optional<c10::OperatorHandle> add; // "<op>_add_", if it exists: adds the result to its first argument

  bool is_any_needed(const std::vector<bool>& needed) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](size_t i) { return needed[i]; });
  }

  bool reads(Source source, size_t index) const {
    return std::any_of(arguments.begin(), arguments.end(), [&](const Argument& argument) {
      return argument.source == source && argument.index == index;
    });
  }
};

// A tensor or value to keep: argument `position` or, from `num_arguments` on, a result.
struct Kept {
  size_t position;
  std::string function; // applied to a value: "", "columns", "dtype" or "is_transposed"
};

struct Formula {
  std::string name;
  size_t num_arguments;
  size_t num_results;
  std::vector<size_t> inputs; // positions of arguments that have a derivative; each has an edge
  std::vector<Kept> tensors;
  std::vector<Kept> values;
  std::vector<bool> differentiable; // by result
  std::vector<Derivative> derivatives;
};

// Two Python functions for a leaf that is a DTensor, of which the graph holds this rank's part. They take the DTensor
// from the leaf's node. Another reference to the DTensor here would keep `Module.to` from swapping its values.
struct Part {
  c10::SafePyObject whole;    // (DTensor, gradient of the part) -> gradient of the DTensor
  c10::SafePyObject gradient; // DTensor -> (this rank's parts of its gradient and of itself), or None

  static c10::SafePyObject safe(const pybind11::object& object) {
    return {pybind11::object(object).release().ptr(), getPyInterpreter()};
  }

  static pybind11::object call(const c10::SafePyObject& function, const auto&... args) {
    return pybind11::reinterpret_borrow<pybind11::object>(function.ptr(getPyInterpreter()))(args...);
  }
};

// The node of a leaf; `part` is set if the leaf is a DTensor and the computed gradient is that of this rank's part.
struct Leaf {
  AccumulateGrad* node = nullptr;
  const Part* part = nullptr;
};

// Return True if an addition to `grad` here is ordered with the engine's own additions: always on a CPU; on CUDA if the
// current stream is the stream of the leaf's node.
bool is_here(const Tensor& grad, AccumulateGrad& leaf);

// Return True if this backward pass accumulates into the leaf and no hook, `autograd.grad` or graph of the backward
// pass can observe a single contribution.
bool is_unseen(AccumulateGrad* leaf);

// Access to the protected lock that the engine holds while it adds to a leaf's gradient. Another thread may run a
// backward pass to the same leaf.
struct Lock : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) {
    return node.*(&Lock::mutex_);
  }
};

// Compute the gradients of the inputs, by edge. `zeros(i)` makes the gradient of result i if none has arrived. If
// `leaf(edge)` has a node, the contribution may be added to that leaf's gradient at once, and is undefined in the
// result. With `may_own`, nobody else holds `grads` and `tensors`, so that operators may overwrite them.
variable_list differentiate(
    const Formula& formula, variable_list grads, variable_list tensors, const std::vector<IValue>& values,
    const std::vector<bool>& needed, bool may_own, const std::function<Tensor(size_t)>& zeros,
    const std::function<Leaf(size_t)>& leaf);

} // namespace moe_ext::runtime
