// Messages between the ranks of a collective, and its scratch memory.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace moe_ext::runtime {

using Tensors = std::vector<at::Tensor>;

// A message underway. Destroying a message abandons it; the backend keeps its tensors until it no longer uses them.
class Message {
 public:
  // Returns the bytes of all ranks, in rank order. Blocks until they have arrived and the sent bytes have left.
  const at::Tensor& wait();

 private:
  friend class Messages;

  at::Tensor received_, sent_;
  int tag_ = 0;
  // Declared last, hence destroyed before the memory that they read and fill.
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// Messages, borrowed memory and changed tensors of one collective. All ranks of the group must ask for the same
// messages in the same order.
class Messages {
 public:
  // Called with the kind of each message and the bytes that leave this rank.
  using OnSent = std::function<void(const char* kind, int64_t num_bytes)>;

  Messages(c10d::ProcessGroup& group, OnSent on_sent) : group_(group), on_sent_(std::move(on_sent)) {
  }

  int64_t size() const {
    return group_.getSize();
  }
  int64_t rank() const {
    return group_.getRank();
  }

  // Posts receives of `num_bytes` from every rank. Gloo's sender waits for the receiver's request, and a request queued
  // behind data waits for the data; hence all messages are asked for before anything is sent. On accelerators it only
  // allocates.
  Message ask(int64_t num_bytes, const at::Tensor& like);

  // Sends part p of P equal parts of a row of bytes to rank p.
  void all_to_all(Message& message, const at::Tensor& row);

  // Sends a row of bytes to all ranks. The second form also waits, and returns the rows of all ranks.
  void all_gather(Message& message, const at::Tensor& row);
  at::Tensor all_gather(const at::Tensor& row);

  // Sums x over the ranks, in place, and waits.
  void all_reduce(at::Tensor x);

  // Borrows a row of bytes on the device of `like` until `give_back`: no result may lie in it.
  at::Tensor scratch(int64_t num_bytes, const at::Tensor& like);

  // Copies a tensor that is about to change, so that `undo` can restore it.
  void keep(const at::Tensor& x);

  // Restores the tensors of `keep`, after a failure. Borrowed rows are then dropped instead of given back, because a
  // backend may still write to them.
  void undo();

  // Returns borrowed rows to the pool, after success.
  void give_back();

 private:
  template <class PartOf>
  void send(Message& message, const at::Tensor& row, const PartOf& part_of);
  void note(const char* kind, int64_t num_bytes) const;

  c10d::ProcessGroup& group_;
  OnSent on_sent_;
  int num_asked_ = 0;
  Tensors borrowed_;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

// Bytes that the process's pool of scratch memory holds for later collectives.
int64_t pooled_bytes();

} // namespace moe_ext::runtime
