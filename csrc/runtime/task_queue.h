// Queue of tasks for a thread, and the wait for all tasks at the exit of the process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace moe_ext::runtime {

// The tasks of one thread. Thread and owner share the queue, which lives until the last queued task has run.
class TaskQueue {
 public:
  void push(std::function<void()> task);

  // Ends `serve` after the queued tasks. No `push` may follow.
  void close();

  // Runs tasks, in their order, until the queue is closed and empty.
  void serve();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
};

// Wait until no task of any queue is left, at most `limit`. Return True if none is left. The exit of the process calls
// it.
bool wait_for_tasks(std::chrono::duration<double> limit);

} // namespace moe_ext::runtime
