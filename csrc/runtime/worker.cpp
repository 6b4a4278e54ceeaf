// CollectiveWorker: runs the collectives of collectives.h without the GIL, in the caller's thread or in a thread of its
// own.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/collectives.h"
#include "runtime/runtime.h"
#include "runtime/task_queue.h"

namespace moe_ext::runtime {
namespace {

namespace py = pybind11;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Collective = std::function<Tensors(Messages&)>;

// Wrap a Python function that gets the kind and the bytes of every message. Only its calls take the GIL.
Messages::OnSent on_sent_of(const py::object& function) {
  if (function.is_none()) {
    return nullptr;
  }
  const std::shared_ptr<PyObject> held(function.inc_ref().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() != 0) {
      py::gil_scoped_acquire gil;
      Py_DECREF(object);
    }
  });
  return [held](const char* kind, int64_t num_bytes) {
    py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::object>(held.get())(kind, num_bytes);
  };
}

Tensors run(const Collective& collective, c10d::ProcessGroup& group, const Messages::OnSent& on_sent) {
  const at::NoGradGuard no_grad;
  Messages messages(group, on_sent);
  Tensors found;
  try {
    found = collective(messages);
  } catch (...) {
    messages.undo();
    throw;
  }
  messages.give_back();
  return found;
}

class CollectiveWorker {
 public:
  CollectiveWorker(Group group, bool beside) : group_(std::move(group)) {
    if (beside) {
      tasks_ = std::make_shared<TaskQueue>();
      // The thread is detached. A message to a dead peer may block for the group's timeout, which must not keep the
      // process from ending.
      std::thread([tasks = tasks_] { tasks->serve(); }).detach();
    }
  }
  CollectiveWorker(const CollectiveWorker&) = delete;
  CollectiveWorker& operator=(const CollectiveWorker&) = delete;
  ~CollectiveWorker() {
    if (tasks_) {
      tasks_->close();
    }
  }

  // Returns tensors, or a future of tensors if the worker has a thread.
  py::object start(Collective collective, const py::object& on_sent) {
    if (!tasks_) {
      const auto sent = on_sent_of(on_sent);
      Tensors found;
      {
        py::gil_scoped_release others_run;
        found = run(collective, *group_, sent);
      }
      return py::cast(std::move(found));
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    auto task = [collective = std::move(collective), on_sent = on_sent_of(on_sent), group = group_, future,
                 num_threads = at::get_num_threads(), is_inference = c10::InferenceMode::is_enabled()]() mutable {
      if (at::get_num_threads() != num_threads) {
        at::set_num_threads(num_threads);
      }
      const c10::InferenceMode of_caller(is_inference);
      Tensors found;
      std::exception_ptr error;
      try {
        found = run(collective, *group, on_sent);
      } catch (...) {
        error = std::current_exception();
      }
      // Drops the arguments before the future completes, because the caller may then reuse the tensors.
      collective = nullptr;
      if (error) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(std::move(found)));
      }
    };
    {
      py::gil_scoped_release others_run;
      tasks_->push(std::move(task));
    }
    return py::cast(std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future)));
  }

 private:
  Group group_;
  std::shared_ptr<TaskQueue> tasks_;
};

using Binding = py::class_<CollectiveWorker>;

// Bind a method with the arguments of the function, and last the Python function for messages, or None.
template <class... Args>
void def(Binding& worker, const char* name, Tensors (*function)(Messages&, Args...)) {
  worker.def(name, [function](CollectiveWorker& self, std::decay_t<Args>... args, const py::object& on_sent) {
    return self.start(
        [function, ... args = std::move(args)](Messages& messages) { return function(messages, args...); }, on_sent);
  });
}

} // namespace

void bind_worker(py::module_& module) {
  Binding worker(
      module, "CollectiveWorker",
      "Runs collectives one after the other, in a thread of its own or in the thread of the caller.");
  worker.def(py::init<Group, bool>(), py::arg("group"), py::arg("beside"));
  def(worker, "quantized_all_reduce", &quantized_all_reduce);
  def(worker, "quantized_reduce_scatter", &quantized_reduce_scatter);
  def(worker, "quantized_all_gather", &quantized_all_gather);
  def(worker, "sparse_all_gather_sum", &sparse_all_gather_sum);
  def(worker, "sparse_split_sum", &sparse_split_sum);
  def(worker, "sparse_dense_sum", &sparse_dense_sum);
  def(worker, "block_sum", &block_sum);
  def(worker, "masked_sum", &masked_sum);
  def(worker, "row_sum", &row_sum);
  module.def(
      "pooled_bytes", &pooled_bytes,
      "Returns the number of bytes of scratch memory that are kept for later collectives.");
  module.def(
      "wait_for_workers", [](double seconds) { return wait_for_tasks(std::chrono::duration<double>(seconds)); },
      "Waits before the process exits. Returns True once no worker has work left, and False after `seconds`.",
      py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
}

} // namespace moe_ext::runtime
