// Messages between the ranks of a collective, and the memory that it needs for a while.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace moe_ext::runtime {

using Tensors = std::vector<at::Tensor>;

// A message underway. Destroying one gives it up: the backend keeps its tensors until it has let go of them.
class Message {
 public:
  // Returns the bytes that came from all ranks, in rank order. Blocks until it is there and what was sent has left.
  const at::Tensor& wait();

 private:
  friend class Messages;

  at::Tensor received_, sent_;
  int tag_ = 0;
  // Last, so that they go before the memory that they read and fill.
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// Messages, borrowed memory and changed tensors of one collective. All ranks of the group ask for the same messages in
// the same order.
class Messages {
 public:
  // Told the kind and the bytes of each message, as they leave a rank.
  using OnSent = std::function<void(const char* kind, int64_t num_bytes)>;

  Messages(c10d::ProcessGroup& group, OnSent on_sent) : group_(group), on_sent_(std::move(on_sent)) {
  }

  int64_t size() const {
    return group_.getSize();
  }
  int64_t rank() const {
    return group_.getRank();
  }

  // Asks for so many bytes from every rank. On Gloo a sender waits until it is asked, and a question that is queued
  // behind data waits for the data: so messages are asked for before anything is sent. Accelerators need none of it.
  Message ask(int64_t num_bytes, const at::Tensor& like);

  // Sends part p of P equal parts of a row of bytes to rank p.
  void all_to_all(Message& message, const at::Tensor& row);

  // Sends a row of bytes to all ranks; the second form waits, and returns what came.
  void all_gather(Message& message, const at::Tensor& row);
  at::Tensor all_gather(const at::Tensor& row);

  // Adds up over the ranks, in place, and waits.
  void all_reduce(at::Tensor x);

  // A row of bytes on the device of `like` that is given back at the end: no result may be in it.
  at::Tensor scratch(int64_t num_bytes, const at::Tensor& like);

  // Remembers a tensor that is about to change, for `undo` to put it back.
  void keep(const at::Tensor& x);

  // After a failure. What was borrowed is not given back then: a backend may still write to it.
  void undo();

  // At the end.
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
