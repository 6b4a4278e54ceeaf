#include "simt.h"

#include <ucontext.h>
#include <algorithm>
#include <csetjmp>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#endif

namespace simt {

Coordinates here;

namespace {

constexpr int kWarpSize = 32;
constexpr unsigned char kPoison = 0xFF;
constexpr size_t kGuardBytes = 256;
constexpr int64_t kMaxAtomics = 10'000'000;
// AddressSanitizer pads every local variable.
#if defined(SIMT_ASAN)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

enum class State : uint8_t { kReady, kInWarpOp, kAtBarrier, kDone };

// One side of a switch: the scheduler or a thread. _setjmp saves no signal mask and so makes no system call, which
// swapcontext does; AddressSanitizer must be told of each switch, and follows swapcontext alone.
class Context {
 public:
  void start(void (*entry)(), void* stack, size_t bytes) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_ = stack;
    context_.uc_stack.ss_size = bytes_ = bytes;
    context_.uc_link = nullptr;
    entered_ = false;
    makecontext(&context_, entry, 0);
  }

  void switch_to(Context& to) {
#if defined(SIMT_ASAN)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, to.stack_, to.bytes_);
    swapcontext(&context_, &to.context_);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    if (_setjmp(jump_) != 0) {
      return;
    }
    if (!to.entered_) {
      to.entered_ = true;
      setcontext(&to.context_);
    }
    _longjmp(to.jump_, 1);
#endif
  }

  // First thing on a new stack; `from` is where the switch came from.
  static void entered([[maybe_unused]] Context& from) {
#if defined(SIMT_ASAN)
    const void* stack = nullptr;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &from.bytes_);
    from.stack_ = const_cast<void*>(stack);
#endif
  }

  bool entered_ = true;

 private:
  ucontext_t context_;
  jmp_buf jump_;
  void* stack_ = nullptr;
  size_t bytes_ = 0;
};

struct Thread {
  Context context;
  std::unique_ptr<unsigned char[]> stack;
  State state = State::kDone;
  dim3 idx;
  Site site;
  WarpOp op;
  unsigned mask;
  uint64_t value, result;
  int source;
  int64_t num_atomics;
};

struct Shared {
  void* bytes;
  size_t size;
};

struct Machine {
  std::mutex mutex;
  Schedule schedule;
  Device device;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Thread>> threads; // kept between launches: a stack is costly to make
  std::vector<Shared> static_shared;
  std::unique_ptr<unsigned char[]> dynamic;
  size_t dynamic_bytes = 0;
  Context scheduler;
  Thread* current = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::string error;
};

Machine& machine() {
  static Machine instance;
  return instance;
}

std::string describe(const dim3& at) {
  std::ostringstream out;
  out << "(" << at.x << ", " << at.y << ", " << at.z << ")";
  return out.str();
}

std::string describe(const Thread& thread) {
  std::ostringstream out;
  out << "thread " << describe(thread.idx);
  if (thread.state == State::kDone) {
    out << ", which has returned";
  } else if (thread.site.file != nullptr) {
    out << " at " << thread.site.file << ":" << thread.site.line;
  }
  return out.str();
}

[[noreturn]] void raise(const std::string& what, const Thread& thread) {
  throw Error("simt: " + what + ": block " + describe(here.block) + ", " + describe(thread));
}

std::vector<int> ordered(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (machine().schedule.order == Schedule::Order::kReverse) {
    std::reverse(order.begin(), order.end());
  } else if (machine().schedule.order == Schedule::Order::kRandom) {
    std::shuffle(order.begin(), order.end(), machine().random);
  }
  return order;
}

// A fiber lives on after its kernel returns, and runs the next one that it is given.
void fiber_main() {
  Machine& m = machine();
  Context::entered(m.scheduler);
  for (;;) {
    Thread* self = m.current;
    try {
      (*m.kernel)();
    } catch (const std::exception& error) {
      m.error = error.what();
    }
    self->state = State::kDone;
    self->context.switch_to(m.scheduler);
  }
}

void resume(Thread& thread) {
  Machine& m = machine();
  m.current = &thread;
  thread.num_atomics = 0;
  here.thread = thread.idx;
  m.scheduler.switch_to(thread.context);
  m.current = nullptr;
  if (!m.error.empty()) {
    throw Error(std::exchange(m.error, {}));
  }
}

void wait(State state, Site site) {
  Thread& self = *machine().current;
  self.state = state;
  self.site = site;
  self.context.switch_to(machine().scheduler);
}

class Block {
 public:
  explicit Block(int num_threads) : num_threads_(num_threads), num_warps_((num_threads + kWarpSize - 1) / kWarpSize) {
  }

  void run() {
    while (true) {
      for (int warp : ordered(num_warps_)) {
        run_warp(warp);
      }
      if (count(State::kDone) == num_threads_) {
        return;
      }
      release_barrier();
    }
  }

 private:
  static Thread& thread(int i) {
    return *machine().threads[i];
  }

  int count(State state) const {
    int n = 0;
    for (int i = 0; i < num_threads_; ++i) {
      n += thread(i).state == state;
    }
    return n;
  }

  void run_warp(int warp) {
    do {
      for (int lane : ordered(kWarpSize)) {
        const int i = warp * kWarpSize + lane;
        if (i < num_threads_ && thread(i).state == State::kReady) {
          resume(thread(i));
        }
      }
    } while (release_lanes(warp));
  }

  // Completes every warp operation whose lanes have all come. A lane that waits for one that cannot come is an error.
  bool release_lanes(int warp) {
    bool released = false;
    const Thread* stuck = nullptr;
    const Thread* absent = nullptr;
    for (int lane = 0; lane < kWarpSize && warp * kWarpSize + lane < num_threads_; ++lane) {
      Thread& first = thread(warp * kWarpSize + lane);
      if (first.state != State::kInWarpOp) {
        continue;
      }
      if ((first.mask >> lane & 1u) == 0) {
        raise("the mask does not name the calling lane", first);
      }
      if (const Thread* missing = missing_lane(warp, first)) {
        stuck = &first;
        absent = missing;
        continue;
      }
      complete(warp, first.mask);
      released = true;
    }
    if (!released && stuck != nullptr) {
      raise("a warp operation waits for " + (absent == stuck ? "a lane outside the block" : describe(*absent)), *stuck);
    }
    return released;
  }

  // A lane of the mask that has not come to the same operation with the same mask; `first` itself if it does not exist.
  const Thread* missing_lane(int warp, const Thread& first) const {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((first.mask >> lane & 1u) == 0) {
        continue;
      }
      const int i = warp * kWarpSize + lane;
      if (i >= num_threads_) {
        return &first;
      }
      const Thread& other = thread(i);
      if (other.state != State::kInWarpOp || other.mask != first.mask || other.op != first.op) {
        return &other;
      }
    }
    return nullptr;
  }

  void complete(int warp, unsigned mask) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (mask >> lane & 1u) {
        Thread& self = thread(warp * kWarpSize + lane);
        self.result = self.op == WarpOp::kShuffle ? shuffled(warp, self) : vote(warp, self);
      }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (mask >> lane & 1u) {
        thread(warp * kWarpSize + lane).state = State::kReady;
      }
    }
  }

  uint64_t shuffled(int warp, const Thread& self) const {
    if ((self.mask >> self.source & 1u) == 0) {
      raise("a shuffle reads lane " + std::to_string(self.source) + ", which its mask does not name", self);
    }
    return thread(warp * kWarpSize + self.source).value;
  }

  uint64_t vote(int warp, const Thread& self) const {
    unsigned lanes = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (self.mask >> lane & 1u) {
        const uint64_t value = thread(warp * kWarpSize + lane).value;
        lanes |= unsigned{self.op == WarpOp::kMatch ? value == self.value : value != 0} << lane;
      }
    }
    return lanes;
  }

  // Every thread waits or has returned, and none of them inside a warp operation.
  void release_barrier() {
    const Thread* first = nullptr;
    const Thread* returned = nullptr;
    for (int i = 0; i < num_threads_; ++i) {
      const Thread& other = thread(i);
      if (other.state == State::kDone) {
        returned = &other;
      } else if (first == nullptr) {
        first = &other;
      } else if (first->site.line != other.site.line || std::strcmp(first->site.file, other.site.file) != 0) {
        raise("threads wait at different barriers: " + describe(other) + "; and", *first);
      }
    }
    if (returned != nullptr) {
      raise("a barrier waits for " + describe(*returned), *first);
    }
    for (int i = 0; i < num_threads_; ++i) {
      thread(i).state = State::kReady;
    }
  }

  int num_threads_;
  int num_warps_;
};

void prepare_threads(dim3 block, int num_threads) {
  Machine& m = machine();
  while (static_cast<int>(m.threads.size()) < num_threads) {
    auto thread = std::make_unique<Thread>();
    thread->stack.reset(new unsigned char[kStackBytes]);
    thread->context.start(fiber_main, thread->stack.get(), kStackBytes);
    m.threads.push_back(std::move(thread));
  }
  for (int i = 0; i < num_threads; ++i) {
    Thread& thread = *m.threads[i];
    thread.state = State::kReady;
    thread.site = {};
    thread.idx = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
  }
}

void poison_shared() {
  Machine& m = machine();
  for (const Shared& shared : m.static_shared) {
    std::memset(shared.bytes, kPoison, shared.size);
  }
  std::memset(m.dynamic.get(), kPoison, m.dynamic_bytes);
}

} // namespace

Schedule& schedule() {
  return machine().schedule;
}

Device& device() {
  return machine().device;
}

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.random.seed(m.schedule.seed);
  m.kernel = &kernel;
  here = {{}, {}, block, grid};
  const int num_threads = static_cast<int>(block.x * block.y * block.z);
#if defined(SIMT_ASAN)
  // The sanitizer guards the end of the allocation.
  m.dynamic_bytes = shared_bytes;
#else
  m.dynamic_bytes = shared_bytes + kGuardBytes;
#endif
  m.dynamic.reset(new unsigned char[m.dynamic_bytes]);
  try {
    for (int linear : ordered(static_cast<int>(grid.x * grid.y * grid.z))) {
      here.block = dim3(linear % grid.x, linear / grid.x % grid.y, linear / (grid.x * grid.y));
      prepare_threads(block, num_threads);
      poison_shared();
      Block(num_threads).run();
      for (size_t i = shared_bytes; i < m.dynamic_bytes; ++i) {
        if (m.dynamic[i] != kPoison) {
          throw Error("simt: a store past the end of dynamic shared memory: block " + describe(here.block));
        }
      }
    }
  } catch (...) {
    // Threads that wait inside the failed kernel never come back: their stacks are given up with them.
    m.threads.clear();
    throw;
  }
}

void sync_threads(Site site) {
  wait(State::kAtBarrier, site);
}

uint64_t warp_op(WarpOp op, unsigned mask, uint64_t value, int source, Site site) {
  Thread& self = *machine().current;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.source = source;
  wait(State::kInWarpOp, site);
  return self.result;
}

int lane() {
  const unsigned linear = here.thread.x + here.block_size.x * (here.thread.y + here.block_size.y * here.thread.z);
  return static_cast<int>(linear % kWarpSize);
}

void* dynamic_shared() {
  return machine().dynamic.get();
}

void fail(const std::string& what, Site site) {
  Thread& self = *machine().current;
  self.site = site;
  raise(what, self);
}

void count_atomic(Site site) {
  if (++machine().current->num_atomics > kMaxAtomics) {
    fail("deadlock: a thread spins on atomics and waits for nothing that lets others run", site);
  }
}

void register_shared(void* bytes, size_t size) {
  machine().static_shared.push_back({bytes, size});
  std::memset(bytes, kPoison, size);
}

} // namespace simt
