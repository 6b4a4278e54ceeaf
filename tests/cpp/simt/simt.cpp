#include "simt.h"

#include <algorithm>
#include <csetjmp>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <ucontext.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {
namespace {

constexpr int kWarpSize = 32;
constexpr unsigned char kPoison = 0xFF;
constexpr int64_t kMaxAtomics = 10'000'000;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 * 1024; // the sanitizer pads every local variable
constexpr size_t kGuardBytes = 0;          // and guards the end of every allocation
#else
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kGuardBytes = 256;
#endif

// One side of a switch: the scheduler or a thread. _setjmp saves no signal mask and so makes no system call, which
// swapcontext does; AddressSanitizer must be told of each switch, and follows swapcontext alone.
struct Context {
  ucontext_t context;
  jmp_buf jump;
  const void* stack = nullptr;
  size_t bytes = 0;
  bool entered = true;

  void start(void (*entry)(), void* memory) {
    getcontext(&context);
    stack = context.uc_stack.ss_sp = memory;
    bytes = context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    entered = false;
    makecontext(&context, entry, 0);
  }

  void switch_to(Context& to) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, to.stack, to.bytes);
    swapcontext(&context, &to.context);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    if (_setjmp(jump) == 0) {
      if (std::exchange(to.entered, true)) {
        _longjmp(to.jump, 1);
      }
      setcontext(&to.context);
    }
#endif
  }
};

enum class State : uint8_t { kReady, kInWarpOp, kAtBarrier, kDone };

struct Thread {
  Context context;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  State state = State::kDone;
  dim3 idx;
  Site site;
  WarpOp op = WarpOp::kSync;
  unsigned mask = 0;
  uint64_t value = 0, result = 0;
  int source = 0;
  int64_t num_atomics = 0;
};

std::mutex one_grid;
std::mt19937_64 generator;
std::vector<std::unique_ptr<Thread>> threads; // kept between launches: a stack is costly to make
std::vector<std::pair<void*, size_t>> static_shared;
std::unique_ptr<unsigned char[]> dynamic;
Context scheduler;
Thread* current = nullptr;
const std::function<void()>* running = nullptr;
std::string thrown;

std::string describe(const dim3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

std::string describe(const Thread& t) {
  const std::string at = t.site.file ? " at " + std::string(t.site.file) + ":" + std::to_string(t.site.line) : "";
  return "thread " + describe(t.idx) + (t.state == State::kDone ? ", which has returned" : at);
}

[[noreturn]] void raise(const std::string& what, const Thread& t) {
  throw Error("simt: " + what + ": block " + describe(here.block) + ", " + describe(t));
}

std::vector<int> ordered(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (schedule.order == Schedule::Order::kReverse) {
    std::reverse(order.begin(), order.end());
  } else if (schedule.order == Schedule::Order::kRandom) {
    std::shuffle(order.begin(), order.end(), generator);
  }
  return order;
}

// A fiber lives on after its kernel returns, and runs the next one that it is given.
void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.bytes);
#endif
  for (;;) {
    Thread* const self = current;
    try {
      (*running)();
    } catch (const std::exception& error) {
      thrown = error.what();
    }
    self->state = State::kDone;
    self->context.switch_to(scheduler);
  }
}

void resume(Thread& t) {
  current = &t;
  t.num_atomics = 0;
  here.thread = t.idx;
  scheduler.switch_to(t.context);
  if (!thrown.empty()) {
    throw Error(std::exchange(thrown, {}));
  }
}

void wait(State state, Site site) {
  Thread& self = *current;
  self.state = state;
  self.site = site;
  self.context.switch_to(scheduler);
}

struct Warp {
  int first, num_lanes;

  Thread& operator[](int lane) const {
    return *threads[first + lane];
  }

  void run() const {
    do {
      for (int lane : ordered(num_lanes)) {
        if ((*this)[lane].state == State::kReady) {
          resume((*this)[lane]);
        }
      }
    } while (release());
  }

  // Completes every operation whose lanes have all come. A lane that waits for one that cannot come is an error.
  bool release() const {
    bool released = false;
    const Thread* stuck = nullptr;
    std::string absent;
    for (int lane = 0; lane < num_lanes; ++lane) {
      const Thread& t = (*this)[lane];
      if (t.state != State::kInWarpOp) {
        continue;
      }
      if ((t.mask >> lane & 1u) == 0) {
        raise("the mask does not name the calling lane", t);
      }
      const std::string missing = missing_lane(t);
      if (missing.empty()) {
        complete(t.mask);
        released = true;
      } else {
        stuck = &t;
        absent = missing;
      }
    }
    if (!released && stuck != nullptr) {
      raise("a warp operation waits for " + absent, *stuck);
    }
    return released;
  }

  // A lane of the mask that has not come to the same operation with the same mask.
  std::string missing_lane(const Thread& t) const {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (t.mask >> lane & 1u) {
        if (lane >= num_lanes) {
          return "a lane outside the block";
        }
        const Thread& other = (*this)[lane];
        if (other.state != State::kInWarpOp || other.mask != t.mask || other.op != t.op) {
          return describe(other);
        }
      }
    }
    return {};
  }

  void complete(unsigned mask) const {
    for (int lane = 0; lane < num_lanes; ++lane) {
      if (mask >> lane & 1u) {
        (*this)[lane].result = result_of((*this)[lane]);
      }
    }
    for (int lane = 0; lane < num_lanes; ++lane) {
      if (mask >> lane & 1u) {
        (*this)[lane].state = State::kReady;
      }
    }
  }

  uint64_t result_of(const Thread& t) const {
    if (t.op == WarpOp::kShuffle) {
      if ((t.mask >> t.source & 1u) == 0) {
        raise("a shuffle reads lane " + std::to_string(t.source) + ", which its mask does not name", t);
      }
      return (*this)[t.source].value;
    }
    unsigned lanes = 0;
    for (int lane = 0; lane < num_lanes; ++lane) {
      const uint64_t value = (*this)[lane].value;
      lanes |= unsigned{t.op == WarpOp::kMatch ? value == t.value : value != 0} << lane;
    }
    return lanes & t.mask;
  }
};

// Every thread waits at a barrier or has returned. False: all have returned.
bool release_barrier(int num_threads) {
  const Thread* first = nullptr;
  const Thread* returned = nullptr;
  for (int i = 0; i < num_threads; ++i) {
    const Thread& t = *threads[i];
    if (t.state == State::kDone) {
      returned = &t;
    } else if (first == nullptr) {
      first = &t;
    } else if (first->site.line != t.site.line || std::strcmp(first->site.file, t.site.file) != 0) {
      raise("threads wait at different barriers: " + describe(t) + "; and", *first);
    }
  }
  if (first != nullptr && returned != nullptr) {
    raise("a barrier waits for " + describe(*returned), *first);
  }
  for (int i = 0; first != nullptr && i < num_threads; ++i) {
    threads[i]->state = State::kReady;
  }
  return first != nullptr;
}

void run_block(dim3 block, int num_threads) {
  while (static_cast<int>(threads.size()) < num_threads) {
    threads.push_back(std::make_unique<Thread>());
    threads.back()->context.start(fiber_main, threads.back()->stack.get());
  }
  for (int i = 0; i < num_threads; ++i) {
    threads[i]->state = State::kReady;
    threads[i]->site = {};
    threads[i]->idx = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
  }
  do {
    for (int warp : ordered((num_threads + kWarpSize - 1) / kWarpSize)) {
      Warp{warp * kWarpSize, std::min(kWarpSize, num_threads - warp * kWarpSize)}.run();
    }
  } while (release_barrier(num_threads));
}

} // namespace

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  const std::lock_guard lock(one_grid);
  generator.seed(schedule.seed);
  running = &kernel;
  here = {{}, {}, block, grid};
  const size_t dynamic_bytes = shared_bytes + kGuardBytes;
  dynamic.reset(new unsigned char[dynamic_bytes]);
  try {
    for (int i : ordered(static_cast<int>(grid.x * grid.y * grid.z))) {
      here.block = dim3(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));
      for (const auto& [bytes, size] : static_shared) {
        std::memset(bytes, kPoison, size);
      }
      std::memset(dynamic.get(), kPoison, dynamic_bytes);
      run_block(block, static_cast<int>(block.x * block.y * block.z));
      const unsigned char* const end = dynamic.get() + dynamic_bytes;
      if (std::any_of(end - kGuardBytes, end, [](unsigned char byte) { return byte != kPoison; })) {
        throw Error("simt: a store past the end of dynamic shared memory: block " + describe(here.block));
      }
    }
  } catch (...) {
    // Threads that wait inside the failed kernel never come back: their stacks are given up with them.
    threads.clear();
    throw;
  }
}

void sync_threads(Site site) {
  wait(State::kAtBarrier, site);
}

uint64_t warp_op(WarpOp op, unsigned mask, uint64_t value, int source, Site site) {
  Thread& self = *current;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.source = source;
  wait(State::kInWarpOp, site);
  return self.result;
}

int lane() {
  const dim3 &at = here.thread, &size = here.block_size;
  return static_cast<int>((at.x + size.x * (at.y + size.y * at.z)) % kWarpSize);
}

void* dynamic_shared() {
  return dynamic.get();
}

void fail(const std::string& what, Site site) {
  current->site = site;
  raise(what, *current);
}

void count_atomic(Site site) {
  if (++current->num_atomics > kMaxAtomics) {
    fail("deadlock: a thread spins on atomics and waits for nothing that lets others run", site);
  }
}

void register_shared(void* bytes, size_t size) {
  static_shared.emplace_back(bytes, size);
  std::memset(bytes, kPoison, size);
}

} // namespace simt
