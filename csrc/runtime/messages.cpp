// Messages of a collective: asked for early, sent while later parts compute, awaited when their bytes are needed.
#include "runtime/messages.h"

#include <c10/core/InferenceMode.h>

#include <deque>
#include <mutex>

namespace moe_ext::runtime {
namespace {

// First tag of messages, as in moe_ext/comm/workers.py; callers use other tags. The number of the message is added.
constexpr int kTag = 0x6d780000;

// torch 2.13 renames two collectives. These are templates so that the compiler checks the existing name only.
template <class T>
c10::intrusive_ptr<c10d::Work> start_all_gather(T& group, at::Tensor& out, at::Tensor& in) {
  if constexpr (requires { group.all_gather_single(out, in); }) {
    return group.all_gather_single(out, in);
  } else {
    return group._allgather_base(out, in);
  }
}

template <class T>
c10::intrusive_ptr<c10d::Work> start_all_to_all(T& group, at::Tensor& out, at::Tensor& in) {
  std::vector<int64_t> even;
  if constexpr (requires { group.all_to_all_single(out, in, even, even); }) {
    return group.all_to_all_single(out, in, even, even);
  } else {
    return group.alltoall_base(out, in, even, even);
  }
}

// Pool of CPU scratch memory. The system maps new memory page by page, which takes longer than the collective's work on
// it. An accelerator's allocator keeps a pool itself.
class Pool {
 public:
  static Pool& instance() {
    // Never destroyed, because a worker thread may outlive the end of main.
    static auto* pool = new Pool;
    return *pool;
  }

  at::Tensor take(int64_t num_bytes, const at::Tensor& like) {
    if (like.is_cpu()) {
      const std::lock_guard lock(mutex_);
      // The smallest row that suffices, unless it is more than twice as large as needed.
      auto best = free_.end();
      for (auto row = free_.begin(); row != free_.end(); ++row) {
        const int64_t size = row->numel();
        if (num_bytes <= size && size <= 2 * num_bytes && (best == free_.end() || size < best->numel())) {
          best = row;
        }
      }
      if (best != free_.end()) {
        at::Tensor found = *best;
        free_.erase(best);
        free_bytes_ -= found.numel();
        return found;
      }
    }
    // A row allocated in inference mode could not be written to outside of it later.
    const c10::InferenceMode off(false);
    return at::empty({num_bytes}, like.options().dtype(at::kByte));
  }

  // Frees the rows that have been unused for the longest time if the pool is too large.
  void give_back(const Tensors& rows) {
    const std::lock_guard lock(mutex_);
    for (const auto& row : rows) {
      if (row.is_cpu()) {
        free_.push_back(row);
        free_bytes_ += row.numel();
      }
    }
    while (free_bytes_ > kMostBytes) {
      free_bytes_ -= free_.front().numel();
      free_.pop_front();
    }
  }

  int64_t num_bytes() {
    const std::lock_guard lock(mutex_);
    return free_bytes_;
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{1} << 27;
  std::mutex mutex_;
  std::deque<at::Tensor> free_;
  int64_t free_bytes_ = 0;
};

} // namespace

const at::Tensor& Message::wait() {
  for (const auto& work : works_) {
    work->wait();
  }
  works_.clear();
  return received_;
}

// Gloo's own collectives request data behind the data that they send, so that receives wait for sends: twice the time
// on a slow link. On a CPU each part is therefore a message of its own, and all are requested first.
Message Messages::ask(int64_t num_bytes, const at::Tensor& like) {
  Message message;
  message.tag_ = kTag + num_asked_++;
  message.received_ = scratch(size() * num_bytes, like);
  if (num_bytes > 0 && like.is_cpu()) {
    for (int64_t step = 1; step < size(); ++step) {
      const int64_t from = (rank() - step + size()) % size();
      Tensors theirs{message.received_.narrow(0, from * num_bytes, num_bytes)};
      message.works_.push_back(group_.recv(theirs, static_cast<int>(from), message.tag_));
    }
  }
  return message;
}

template <class PartOf>
void Messages::send(Message& message, const at::Tensor& row, const PartOf& part_of) {
  message.sent_ = row;
  for (int64_t step = 1; step < size(); ++step) {
    const int64_t to = (rank() + step) % size();
    Tensors mine{part_of(to)};
    message.works_.push_back(group_.send(mine, static_cast<int>(to), message.tag_));
  }
  const at::Tensor own = part_of(rank());
  message.received_.narrow(0, rank() * own.numel(), own.numel()).copy_(own);
}

void Messages::all_to_all(Message& message, const at::Tensor& row) {
  TORCH_CHECK(row.numel() == message.received_.numel(), "all_to_all: expected as many bytes as were asked for");
  const int64_t part = row.numel() / size();
  if (row.is_cpu() && part > 0) {
    send(message, row, [&](int64_t to) { return row.narrow(0, to * part, part); });
  } else if (part > 0) {
    message.sent_ = row;
    message.works_.push_back(start_all_to_all(group_, message.received_, message.sent_));
  }
  note("all_to_all", (size() - 1) * part);
}

void Messages::all_gather(Message& message, const at::Tensor& row) {
  TORCH_CHECK(
      size() * row.numel() == message.received_.numel(), "all_gather: expected as many bytes as were asked for");
  if (row.is_cpu() && row.numel() > 0) {
    send(message, row, [&](int64_t) { return row; });
  } else if (row.numel() > 0) {
    message.sent_ = row;
    message.works_.push_back(start_all_gather(group_, message.received_, message.sent_));
  }
  note("all_gather", (size() - 1) * row.numel());
}

at::Tensor Messages::all_gather(const at::Tensor& row) {
  Message message = ask(row.numel(), row);
  all_gather(message, row);
  return message.wait();
}

void Messages::all_reduce(at::Tensor x) {
  if (x.numel() > 0) {
    const auto num_bytes = static_cast<int64_t>(x.nbytes());
    note("all_reduce", 2 * (size() - 1) * num_bytes / size());
    Tensors tensors{std::move(x)};
    group_.allreduce(tensors)->wait();
  }
}

at::Tensor Messages::scratch(int64_t num_bytes, const at::Tensor& like) {
  borrowed_.push_back(Pool::instance().take(num_bytes, like));
  return borrowed_.back().narrow(0, 0, num_bytes);
}

void Messages::keep(const at::Tensor& x) {
  const at::Tensor saved = scratch(static_cast<int64_t>(x.nbytes()), x).view(x.scalar_type());
  saved.copy_(x);
  kept_.emplace_back(x, saved);
}

void Messages::undo() {
  for (const auto& [changed, saved] : kept_) {
    changed.copy_(saved);
  }
}

void Messages::give_back() {
  Pool::instance().give_back(borrowed_);
}

void Messages::note(const char* kind, int64_t num_bytes) const {
  if (on_sent_) {
    on_sent_(kind, num_bytes);
  }
}

int64_t pooled_bytes() {
  return Pool::instance().num_bytes();
}

} // namespace moe_ext::runtime
