// Queues of tasks. A count of tasks over all queues tells the exit of the process when it may continue.
#include "runtime/task_queue.h"

#include <cstddef>
#include <utility>

namespace moe_ext::runtime {
namespace {

struct Tally {
  std::mutex mutex;
  std::condition_variable changed;
  size_t num_tasks = 0;
};

Tally& tally() {
  // Never destroyed, because a thread may outlive the end of main.
  static auto* found = new Tally;
  return *found;
}

} // namespace

void TaskQueue::push(std::function<void()> task) {
  {
    const std::lock_guard lock(tally().mutex);
    ++tally().num_tasks;
  }
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void TaskQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
}

void TaskQueue::serve() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) {
        return;
      }
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    // The task may hold Python objects, whose destruction needs the interpreter: drop it before the count says that it
    // is done.
    task = nullptr;
    {
      const std::lock_guard lock(tally().mutex);
      --tally().num_tasks;
    }
    tally().changed.notify_all();
  }
}

bool wait_for_tasks(std::chrono::duration<double> limit) {
  std::unique_lock lock(tally().mutex);
  return tally().changed.wait_for(lock, limit, [] { return tally().num_tasks == 0; });
}

} // namespace moe_ext::runtime
