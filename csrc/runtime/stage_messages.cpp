// Messages of the stages of a collective: posted at once, awaited when their memory is wanted.
#include "runtime/stage_messages.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <mutex>
#include <utility>

namespace moe_ext::runtime {
namespace {

// Of messages that stages.py sends too, apart from the caller's; the number of the message is added.
constexpr int kExchangeTag = 0x6d780000;

// torch 2.13 renames two collectives; templates, so that only the one that exists is looked at.
template <class T>
c10::intrusive_ptr<c10d::Work> all_gather(T& group, at::Tensor& out, at::Tensor& in) {
  if constexpr (requires { group.all_gather_single(out, in); }) {
    return group.all_gather_single(out, in);
  } else {
    return group._allgather_base(out, in);
  }
}

template <class T>
c10::intrusive_ptr<c10d::Work> all_to_all(T& group, at::Tensor& out, at::Tensor& in) {
  std::vector<int64_t> even;
  if constexpr (requires { group.all_to_all_single(out, in, even, even); }) {
    return group.all_to_all_single(out, in, even, even);
  } else {
    return group.alltoall_base(out, in, even, even);
  }
}

// Memory for what stages need for a while. New memory has to be mapped page by page, which takes longer than what is
// done with it. An accelerator's allocator does the same by itself.
class Pool {
 public:
  static Pool& instance() {
    // Never destroyed: a worker may outlive the end of main.
    static auto* pool = new Pool;
    return *pool;
  }

  at::Tensor take(int64_t num_bytes, const at::Tensor& like) {
    if (like.is_cpu()) {
      const std::lock_guard lock(mutex_);
      // The least that is enough, and not more than twice of it.
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
    return at::empty({num_bytes}, like.options().dtype(at::kByte));
  }

  // Those unused for the longest time go.
  void give_back(const Tensors& rows) {
    const std::lock_guard lock(mutex_);
    for (const auto& row : rows) {
      if (row.is_cpu()) {
        free_.push_back(row);
        free_bytes_ += row.numel();
      }
    }
    while (free_bytes_ > kPooledBytes) {
      free_bytes_ -= free_.front().numel();
      free_.pop_front();
    }
  }

 private:
  static constexpr int64_t kPooledBytes = int64_t{1} << 27;
  std::mutex mutex_;
  std::deque<at::Tensor> free_;
  int64_t free_bytes_ = 0;
};

bool shares_memory(const at::Tensor& x, const Tensors& others) {
  return std::any_of(others.begin(), others.end(), [&](const auto& other) { return x.is_alias_of(other); });
}

} // namespace

int64_t sent_bytes(Kind kind, int64_t num_bytes, int64_t size) {
  switch (kind) {
    case Kind::kAllGather:
      return (size - 1) * num_bytes;
    case Kind::kAllToAll:
      return (size - 1) * num_bytes / size;
    default:
      return 2 * (size - 1) * num_bytes / size;
  }
}

at::Tensor Borrowed::take(int64_t num_bytes, const at::Tensor& like) {
  rows_.push_back(Pool::instance().take(num_bytes, like));
  return rows_.back().narrow(0, 0, num_bytes);
}

void Borrowed::give_back() {
  Pool::instance().give_back(rows_);
}

void Messages::expect(Kind kind, size_t number, int64_t num_bytes, const at::Tensor& like) {
  if (num_bytes > 0 && like.is_cpu() && (kind == Kind::kAllToAll || kind == Kind::kAllGather)) {
    Underway message{{borrowed_.take(num_bytes, like)}, {}};
    receive(message, number);
    expected_.emplace(number, std::move(message));
  }
}

std::optional<at::Tensor> Messages::post(Kind kind, at::Tensor x) {
  const size_t number = num_posted_++;
  if (kind == Kind::kAllReduce) {
    if (x.numel() > 0) {
      Tensors tensors{x};
      underway_.push_back({tensors, {group_.allreduce(tensors)}});
    }
    return std::nullopt;
  }
  x = x.view({-1});
  const auto num_bytes = static_cast<int64_t>(x.nbytes()) * (kind == Kind::kAllGather ? group_.getSize() : 1);
  Underway message;
  if (const auto found = expected_.find(number); found != expected_.end()) {
    message = std::move(found->second);
    expected_.erase(found);
    TORCH_CHECK(
        message.tensors[0].numel() == num_bytes, "stages: expected what comes to be of ", message.tensors[0].numel(),
        " bytes, got ", num_bytes);
  } else {
    message.tensors = {borrowed_.take(num_bytes, x)};
    if (x.numel() > 0 && x.is_cpu()) {
      receive(message, number);
    }
  }
  at::Tensor out = message.tensors[0].view(x.scalar_type());
  message.tensors.push_back(x);
  if (x.numel() > 0 && x.is_cpu()) {
    send(message, kind, number);
  } else if (x.numel() > 0) {
    message.works.push_back(kind == Kind::kAllGather ? all_gather(group_, out, x) : all_to_all(group_, out, x));
  }
  underway_.push_back(std::move(message));
  return out;
}

void Messages::wait_for(const at::Tensor& x) {
  // In the order in which they were posted.
  for (auto message = underway_.begin(); message != underway_.end();) {
    if (!shares_memory(x, message->tensors)) {
      ++message;
      continue;
    }
    for (const auto& work : message->works) {
      work->wait();
    }
    message = underway_.erase(message);
  }
}

void Messages::wait() {
  for (const auto& message : underway_) {
    for (const auto& work : message.works) {
      work->wait();
    }
  }
  underway_.clear();
}

// Gloo's own collectives ask for data behind the data that they send, so that what comes waits for what goes: twice
// the time on a slow link. Here all parts are asked for first.
void Messages::receive(Underway& message, size_t number) {
  const int size = group_.getSize(), rank = group_.getRank();
  const at::Tensor& out = message.tensors[0];
  const int64_t part = out.numel() / size;
  for (int step = 1; step < size; ++step) {
    const int from = (rank - step + size) % size;
    Tensors theirs{out.narrow(0, from * part, part)};
    message.works.push_back(group_.recv(theirs, from, kExchangeTag + static_cast<int>(number)));
  }
}

void Messages::send(Underway& message, Kind kind, size_t number) {
  const int size = group_.getSize(), rank = group_.getRank();
  const at::Tensor out = message.tensors[0], x = message.tensors[1].view(at::kByte);
  const int64_t part = out.numel() / size;
  const auto mine = [&](int to) { return kind == Kind::kAllGather ? x : x.narrow(0, to * part, part); };
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    Tensors sent{mine(to)};
    message.works.push_back(group_.send(sent, to, kExchangeTag + static_cast<int>(number)));
  }
  out.narrow(0, rank * part, part).copy_(mine(rank));
}

} // namespace moe_ext::runtime
