// Messages and memory of the stages of a collective, see stages.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace moe_ext::runtime {

using Tensors = std::vector<at::Tensor>;

enum class Kind { kOperator, kAllToAll, kAllGather, kAllReduce, kScratch, kWait };

// What leaves a rank of `size` for a message of `num_bytes`.
int64_t sent_bytes(Kind kind, int64_t num_bytes, int64_t size);

// What one run has taken from the process's pool of scratch memory.
class Borrowed {
 public:
  at::Tensor take(int64_t num_bytes, const at::Tensor& like);
  void give_back();

 private:
  Tensors rows_;
};

// The messages of one run. They are sent and received while later stages compute; whoever is about to touch their
// memory waits for them first. Destroying those underway gives them up: each keeps its own tensors until the backend
// has let go of them.
class Messages {
 public:
  Messages(c10d::ProcessGroup& group, Borrowed& borrowed) : group_(group), borrowed_(borrowed) {
  }

  // Asks for what the message of that number will bring before anything is sent: on Gloo a sender waits until it is
  // asked, and a question that is queued behind data waits for the data. Accelerators need none of it.
  void expect(Kind kind, size_t number, int64_t num_bytes, const at::Tensor& like);

  // The tensor that the message will fill; none for one in place.
  std::optional<at::Tensor> post(Kind kind, at::Tensor x);

  // Waits for the messages that read or fill memory of x.
  void wait_for(const at::Tensor& x);

  // Waits for all.
  void wait();

  int64_t num_ranks() const {
    return group_.getSize();
  }

 private:
  struct Underway {
    Tensors tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
  };

  void receive(Underway& message, size_t number);
  void send(Underway& message, Kind kind, size_t number);

  c10d::ProcessGroup& group_;
  Borrowed& borrowed_;
  size_t num_posted_ = 0;
  std::map<size_t, Underway> expected_;
  std::vector<Underway> underway_;
};

} // namespace moe_ext::runtime
