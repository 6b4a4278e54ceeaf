// Tasks that a thread takes one after the other, and how the exit of the process waits for them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace moe_ext::runtime {

// The tasks of one thread; they outlive whoever has queued them until the last one has run.
class TaskQueue {
 public:
  void push(std::function<void()> task);

  // No task comes after those that are queued.
  void close();

  // Takes tasks until the queue is closed and empty.
  void serve();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
};

// For the exit of the process: waits until no task of any queue is left, at most so long, and says whether that is so.
bool wait_for_tasks(std::chrono::duration<double> limit);

} // namespace moe_ext::runtime
