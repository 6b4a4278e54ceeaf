// StageProgram and StageWorker: the stages of a collective (operators, and messages between ranks), run without the
// GIL.
//
// moe_ext/compression/stages.py describes the stages and holds the same interpreter in Python: both call the same
// operators, through the dispatcher, on the same tensors. A program is made once and runs any number of times, in the
// caller's thread or in that of a worker, one program after the other.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/runtime.h"
#include "runtime/stage_messages.h"
#include "runtime/task_queue.h"

namespace moe_ext::runtime {
namespace {

namespace py = pybind11;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// An argument: a constant, a tensor of a slot, or a list of those.
struct SlotIndex {
  size_t index;
};
using SlotList = std::vector<SlotIndex>;
using Argument = std::variant<c10::IValue, SlotIndex, SlotList>;

struct Step {
  Kind kind = Kind::kOperator;
  std::string name;
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> args;
  std::vector<size_t> outputs;
  std::optional<int64_t> expects; // bytes of what comes, where that is known beforehand
};

// Told the kind and the bytes of every message; takes the GIL for it.
class OnSent {
 public:
  explicit OnSent(py::object function) : function_(function.release().ptr()) {
  }
  OnSent(const OnSent&) = delete;
  OnSent& operator=(const OnSent&) = delete;
  ~OnSent() {
    if (function_ != nullptr && Py_IsInitialized() != 0) {
      py::gil_scoped_acquire held;
      Py_DECREF(function_);
    }
  }

  void operator()(const std::string& name, int64_t num_bytes) const {
    if (function_ != nullptr) {
      py::gil_scoped_acquire held;
      py::reinterpret_borrow<py::object>(function_)(name, num_bytes);
    }
  }

 private:
  PyObject* function_;
};

std::shared_ptr<OnSent> on_sent_of(const py::object& function) {
  return function.is_none() ? nullptr : std::make_shared<OnSent>(function);
}

Kind kind_of(const std::string& name) {
  if (name == "all_gather") {
    return Kind::kAllGather;
  }
  if (name == "all_to_all") {
    return Kind::kAllToAll;
  }
  if (name == "wait") {
    return Kind::kWait;
  }
  return name == "scratch" ? Kind::kScratch : Kind::kAllReduce;
}

bool is_message(Kind kind) {
  return kind == Kind::kAllToAll || kind == Kind::kAllGather || kind == Kind::kAllReduce;
}

class StageProgram {
 public:
  // steps: (name, args, outputs), an argument being (0, constant), (1, slot) or (2, slots).
  StageProgram(
      const py::list& steps, size_t num_slots, std::vector<std::pair<size_t, size_t>> undo, std::vector<size_t> results)
      : num_slots_(num_slots), undo_(std::move(undo)), results_(std::move(results)) {
    for (const auto& entry : steps) {
      steps_.push_back(parse(entry.cast<py::tuple>()));
    }
  }

  Tensors run(const Tensors& inputs, c10d::ProcessGroup& group, const OnSent* on_sent) const {
    const at::NoGradGuard no_grad;
    Tensors slots(num_slots_);
    std::copy(inputs.begin(), inputs.end(), slots.begin());
    Borrowed borrowed;
    // Gone before the memory that they fill.
    Messages messages(group, borrowed);
    try {
      size_t number = 0;
      for (const auto& step : steps_) {
        if (step.expects) {
          messages.expect(step.kind, number, *step.expects, inputs.at(0));
        }
        number += static_cast<size_t>(is_message(step.kind));
      }
      for (const auto& step : steps_) {
        take(step, slots, messages, on_sent, borrowed);
      }
      messages.wait();
    } catch (...) {
      for (const auto& [changed, saved] : undo_) {
        if (slots[saved].defined()) {
          slots[changed].copy_(slots[saved]);
        }
      }
      // What was borrowed is not given back: a backend may still write to it.
      throw;
    }
    borrowed.give_back();
    Tensors found;
    for (const size_t index : results_) {
      found.push_back(slots[index]);
    }
    return found;
  }

 private:
  static Step parse(const py::tuple& entry) {
    Step step;
    step.name = entry[0].cast<std::string>();
    step.outputs = entry[2].cast<std::vector<size_t>>();
    const auto args = entry[1].cast<py::list>();
    const auto colons = step.name.find("::");
    if (colons == std::string::npos) {
      step.kind = kind_of(step.name);
      if (step.kind == Kind::kWait) {
        return step;
      }
      step.args.emplace_back(argument(args[0].cast<py::tuple>(), c10::TensorType::get()));
      if (step.kind == Kind::kScratch) {
        step.args.emplace_back(argument(args[1].cast<py::tuple>(), c10::IntType::get()));
      } else if (args.size() > 1) {
        step.expects = args[1].cast<py::tuple>()[1].cast<std::optional<int64_t>>();
      }
      return step;
    }
    const auto dot = step.name.find('.', colons);
    const auto overload = dot == std::string::npos ? "" : step.name.substr(dot + 1);
    step.op = c10::Dispatcher::singleton().findSchemaOrThrow(step.name.substr(0, dot).c_str(), overload.c_str());
    const auto& expected = step.op->schema().arguments();
    for (size_t index = 0; index < expected.size(); ++index) {
      if (index < args.size()) {
        step.args.push_back(argument(args[index].cast<py::tuple>(), expected[index].type()));
      } else {
        step.args.emplace_back(expected[index].default_value().value());
      }
    }
    return step;
  }

  static Argument argument(const py::tuple& arg, const c10::TypePtr& type) {
    switch (arg[0].cast<int>()) {
      case 1:
        return SlotIndex{arg[1].cast<size_t>()};
      case 2: {
        SlotList slots;
        for (const size_t index : arg[1].cast<std::vector<size_t>>()) {
          slots.push_back(SlotIndex{index});
        }
        return slots;
      }
      default:
        return torch::jit::toIValue(arg[1], type);
    }
  }

  static void take(const Step& step, Tensors& slots, Messages& messages, const OnSent* on_sent, Borrowed& borrowed) {
    if (step.kind == Kind::kWait) {
      messages.wait();
      return;
    }
    if (step.kind == Kind::kScratch) {
      const at::Tensor& like = slots[std::get<SlotIndex>(step.args[0]).index];
      slots[step.outputs[0]] = borrowed.take(std::get<c10::IValue>(step.args[1]).toInt(), like);
      return;
    }
    wait_for(step, slots, messages);
    if (step.kind != Kind::kOperator) {
      const at::Tensor& x = slots[std::get<SlotIndex>(step.args[0]).index];
      const auto found = messages.post(step.kind, x);
      if (on_sent != nullptr) {
        (*on_sent)(step.name, sent_bytes(step.kind, static_cast<int64_t>(x.nbytes()), messages.num_ranks()));
      }
      if (found) {
        slots[step.outputs[0]] = *found;
      }
      return;
    }
    torch::jit::Stack stack;
    for (const auto& arg : step.args) {
      stack.push_back(value(arg, slots));
    }
    step.op->callBoxed(stack);
    for (size_t index = 0; index < step.outputs.size(); ++index) {
      slots[step.outputs[index]] = stack[index].toTensor();
    }
  }

  static void wait_for(const Step& step, const Tensors& slots, Messages& messages) {
    for (const auto& arg : step.args) {
      if (const auto* slot = std::get_if<SlotIndex>(&arg)) {
        messages.wait_for(slots[slot->index]);
      } else if (const auto* list = std::get_if<SlotList>(&arg)) {
        for (const auto& entry : *list) {
          messages.wait_for(slots[entry.index]);
        }
      }
    }
  }

  static c10::IValue value(const Argument& arg, const Tensors& slots) {
    if (const auto* slot = std::get_if<SlotIndex>(&arg)) {
      return slots[slot->index];
    }
    if (const auto* list = std::get_if<SlotList>(&arg)) {
      Tensors tensors;
      for (const auto& slot : *list) {
        tensors.push_back(slots[slot.index]);
      }
      return tensors;
    }
    return std::get<c10::IValue>(arg);
  }

  std::vector<Step> steps_;
  size_t num_slots_;
  std::vector<std::pair<size_t, size_t>> undo_;
  std::vector<size_t> results_;
};

class StageWorker {
 public:
  explicit StageWorker(Group group) : group_(std::move(group)), tasks_(std::make_shared<TaskQueue>()) {
    // Detached: a message whose peer is gone may block for as long as the group's timeout, which must not keep the
    // process from ending.
    std::thread([tasks = tasks_] { tasks->serve(); }).detach();
  }
  StageWorker(const StageWorker&) = delete;
  StageWorker& operator=(const StageWorker&) = delete;
  ~StageWorker() {
    tasks_->close();
  }

  std::shared_ptr<torch::jit::PythonFutureWrapper> submit(
      std::shared_ptr<const StageProgram> program, Tensors inputs, const py::object& on_sent) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    auto task = [program = std::move(program), inputs = std::move(inputs), sent = on_sent_of(on_sent), group = group_,
                 future, num_threads = at::get_num_threads()]() mutable {
      if (at::get_num_threads() != num_threads) {
        at::set_num_threads(num_threads);
      }
      Tensors found;
      try {
        found = program->run(inputs, *group, sent.get());
      } catch (...) {
        inputs.clear();
        future->setError(std::current_exception());
        return;
      }
      inputs.clear();
      future->markCompleted(c10::IValue(std::move(found)));
    };
    // std::function wants what can be copied.
    auto shared = std::make_shared<decltype(task)>(std::move(task));
    {
      py::gil_scoped_release others_run;
      tasks_->push([shared] { (*shared)(); });
    }
    return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
  }

 private:
  Group group_;
  std::shared_ptr<TaskQueue> tasks_;
};

} // namespace

void bind_stages(py::module_& module) {
  py::class_<StageProgram, std::shared_ptr<StageProgram>>(module, "StageProgram", "Operators and messages, in order.")
      .def(
          py::init<const py::list&, size_t, std::vector<std::pair<size_t, size_t>>, std::vector<size_t>>(),
          py::arg("steps"), py::arg("num_slots"), py::arg("undo"), py::arg("results"))
      .def(
          "run",
          [](const StageProgram& program, const Tensors& inputs, const Group& group, const py::object& on_sent) {
            const auto sent = on_sent_of(on_sent);
            py::gil_scoped_release others_run;
            return program.run(inputs, *group, sent.get());
          },
          "Runs in this thread, without the GIL; returns the tensors of the results.", py::arg("inputs"),
          py::arg("group"), py::arg("on_sent"));
  py::class_<StageWorker>(module, "StageWorker", "A thread that runs programs one after the other.")
      .def(py::init<Group>(), py::arg("group"))
      .def(
          "submit", &StageWorker::submit, "Queues a program; returns a future of the tensors of its results.",
          py::arg("program"), py::arg("inputs"), py::arg("on_sent"));
  module.def(
      "wait_for_workers", [](double seconds) { return wait_for_tasks(std::chrono::duration<double>(seconds)); },
      "For the exit of the process: waits until no worker has anything left to do, and says whether that is so.",
      py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
}

} // namespace moe_ext::runtime
