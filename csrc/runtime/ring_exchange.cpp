// RingExchange: the hops of a ring over c10d, posted early and awaited late.
//
// post() starts to send rows of bytes and to fill one buffer, and returns a Hop at once. The Hop keeps the tensors
// alive, and its wait() blocks until all messages are done. Both release the GIL. While a hop is underway, post()
// refuses memory that the hop fills and a buffer from which it sends, which makes two buffers in turn safe. State
// changes only under the GIL. One thread at a time may use an exchange.
//
// moe_ext/comm/ring_exchange.py holds the same in Python, for a torch that this module is not built with.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "runtime/runtime.h"

namespace moe_ext::runtime {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
using Send = std::pair<at::Tensor, int>;

// pybind11 translates std::invalid_argument to Python's ValueError.
void require(bool condition, const char* argument, const std::string& rule, const std::string& value) {
  if (!condition) {
    throw std::invalid_argument(c10::str("RingExchange: expected ", argument, " to be ", rule, ", got ", value));
  }
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

class Hop {
 public:
  Hop(std::vector<at::Tensor> sent, std::optional<at::Tensor> received)
      : sent_(std::move(sent)), received_(std::move(received)) {
  }

  bool is_underway() const {
    return !works_.empty();
  }
  bool sends(const at::Tensor& memory) const {
    return std::any_of(sent_.begin(), sent_.end(), [&](const at::Tensor& message) { return overlap(message, memory); });
  }
  bool fills(const at::Tensor& memory) const {
    return received_ && overlap(*received_, memory);
  }
  void start(Works works) {
    works_ = std::move(works);
  }

  std::optional<at::Tensor> wait() {
    {
      pybind11::gil_scoped_release others_run;
      for (const auto& work : works_) {
        work->wait();
      }
    }
    works_.clear();
    sent_.clear();
    return received_;
  }

 private:
  std::vector<at::Tensor> sent_;
  std::optional<at::Tensor> received_;
  // Declared last, hence destroyed before the memory that they point into.
  Works works_;
};

class RingExchange {
 public:
  explicit RingExchange(Group group) : group_(std::move(group)) {
  }

  std::shared_ptr<Hop> post(
      const std::vector<Send>& sends, const std::optional<at::Tensor>& buffer, int source, int tag) {
    for (const auto& [message, rank] : sends) {
      check(message, "a message", rank, "a destination");
    }
    if (buffer) {
      check(*buffer, "the buffer", source, "the source");
    }
    const bool receives = buffer && buffer->numel() > 0;
    std::vector<Send> messages;
    std::vector<at::Tensor> sent;
    for (const auto& send : sends) {
      if (send.first.numel() > 0) {
        messages.push_back(send);
        sent.push_back(send.first);
      }
    }
    auto hop = std::make_shared<Hop>(std::move(sent), buffer);
    if (messages.empty() && !receives) {
      return hop;
    }
    check_free(messages, receives ? buffer : std::nullopt, tag);
    Works works;
    {
      pybind11::gil_scoped_release others_run;
      works = start(messages, receives ? &*buffer : nullptr, source, tag);
    }
    hop->start(std::move(works));
    underway_.push_back(hop);
    return hop;
  }

 private:
  void check(const at::Tensor& row, const char* name, int rank, const char* rank_name) const {
    const bool is_bytes = row.scalar_type() == at::kByte && row.dim() == 1 && row.is_contiguous();
    require(is_bytes, name, "a contiguous row of bytes (uint8)", c10::str(row.scalar_type(), " ", row.sizes()));
    const int size = group_->getSize();
    require(0 <= rank && rank < size, rank_name, c10::str("in [0, ", size, ")"), std::to_string(rank));
  }

  void check_free(const std::vector<Send>& sends, const std::optional<at::Tensor>& buffer, int tag) {
    std::erase_if(underway_, [](const std::weak_ptr<Hop>& hop) {
      const auto found = hop.lock();
      return !found || !found->is_underway();
    });
    const auto value = [&](const char* use) { return c10::str("one that a hop underway ", use, " at tag ", tag); };
    for (const auto& entry : underway_) {
      const auto hop = entry.lock();
      for (const auto& [message, rank] : sends) {
        require(!hop->fills(message), "a message", "free", value("fills"));
      }
      if (buffer) {
        require(!hop->fills(*buffer), "the buffer", "free", value("fills"));
        require(!hop->sends(*buffer), "the buffer", "free", value("sends"));
      }
    }
  }

  Works start(const std::vector<Send>& sends, const at::Tensor* buffer, int source, int tag) {
    const auto device = (buffer != nullptr ? *buffer : sends.front().first).device().type();
    const bool coalesces = group_->hasBackends() && group_->getBackend(device)->supportsCoalescing();
    if (!coalesces) {
      return start_each(sends, buffer, source, tag);
    }
    group_->startCoalescing(device);
    try {
      start_each(sends, buffer, source, tag);
    } catch (...) {
      group_->endCoalescing(device);
      throw;
    }
    // The work of endCoalescing stands for all messages of the hop.
    Works works;
    add(works, group_->endCoalescing(device));
    return works;
  }

  // A backend returns no work for a message that it coalesces.
  static void add(Works& works, c10::intrusive_ptr<c10d::Work> work) {
    if (work) {
      works.push_back(std::move(work));
    }
  }

  Works start_each(const std::vector<Send>& sends, const at::Tensor* buffer, int source, int tag) {
    Works works;
    const auto receive = [&] {
      if (buffer != nullptr) {
        std::vector<at::Tensor> tensors{*buffer};
        add(works, group_->recv(tensors, source, tag));
      }
    };
    // If sends of a backend block until they are received, a ring in which all ranks send first would deadlock.
    // Therefore odd ranks receive first.
    const bool receives_first = group_->getRank() % 2 == 1;
    if (receives_first) {
      receive();
    }
    for (const auto& [message, rank] : sends) {
      std::vector<at::Tensor> tensors{message};
      add(works, group_->send(tensors, rank, tag));
    }
    if (!receives_first) {
      receive();
    }
    return works;
  }

  Group group_;
  std::vector<std::weak_ptr<Hop>> underway_;
};

} // namespace

void bind_ring_exchange(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Hop, std::shared_ptr<Hop>>(module, "Hop", "Messages of one `post` that are underway.")
      .def("wait", &Hop::wait, "Waits for all messages, and returns the filled buffer; None if `post` had no buffer.");
  py::class_<RingExchange>(module, "RingExchange", "Posts the messages of one pass around a ring.")
      .def(py::init<Group>(), py::arg("group"))
      .def(
          "post", &RingExchange::post,
          "Starts to send each message of (message, rank) pairs, and to receive `buffer` from rank `source` of the "
          "group.",
          py::arg("sends"), py::arg("buffer"), py::arg("source"), py::arg("tag"));
}

} // namespace moe_ext::runtime
