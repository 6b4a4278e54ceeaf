#include "simt.h"

#include <ucontext.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <ranges>
#include <span>
#include <utility>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define __asan_unpoison_memory_region(...)
#define __sanitizer_start_switch_fiber(...)
#define __sanitizer_finish_switch_fiber(...)
#endif

namespace simt {
namespace {
constexpr size_t kStackBytes = 256 * 1024;    // AddressSanitizer pads every local variable
using Stack = std::pair<const void*, size_t>; // lowest byte, size
using Jump = void* [5];                       // of __builtin_setjmp

struct Thread {
  ucontext_t context;
  const ucontext_t* entry = nullptr; // until it has run
  Jump jump;
  std::unique_ptr<unsigned char[]> stack = std::make_unique_for_overwrite<unsigned char[]>(kStackBytes);
  dim3 idx;
  enum State : uint8_t { kReady, kWaiting, kGone } state = kReady;
  bool at_rest = false; // between two kernels
  Call call;
  std::vector<std::vector<std::pair<void*, const void*>>> copies; // to make at the wait: groups, the last still open
};

std::mt19937_64 generator;
std::vector<Thread> pool(1024); // as many as a block may have; kept, since a stack is costly to make
Jump scheduler;
Stack scheduler_stack;
Thread* current = nullptr;
std::array<uint64_t, kWarpSize> exchanged;
const std::function<void()>* running = nullptr;
std::exception_ptr thrown;
const auto is_ready = [](const Thread& t) { return t.state == Thread::kReady; };

std::string describe(const dim3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

std::string describe(const Thread& t) {
  const std::string at = std::string(" at ") + t.call.site.file_name() + ":" + std::to_string(t.call.site.line());
  const char* gone = t.idx.z < blockDim.z ? ", which has returned" : ", which is outside the block";
  return "thread " + describe(t.idx) + (t.state == Thread::kGone ? gone : at);
}

dim3 unflatten(unsigned i, const dim3& size) {
  return dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
}

std::vector<int> ordered(size_t count) {
  const auto all = std::views::iota(0, static_cast<int>(count));
  std::vector<int> order(all.begin(), all.end());
  if (schedule.order == Schedule::Order::kReverse) {
    std::ranges::reverse(order);
  } else if (schedule.order == Schedule::Order::kRandom) {
    std::ranges::shuffle(order, generator);
  }
  return order;
}

[[gnu::noinline, gnu::no_sanitize_address]] void jump(Jump& to) {
  __builtin_longjmp(to, 1);
}

// By jumps, since swapcontext makes a system call, and the compiler's own, since AddressSanitizer makes one of each
// longjmp. It must be told of each switch between stacks.
[[gnu::noinline, gnu::no_sanitize_address]] void switch_stack(
    Jump& from, Jump& to, const ucontext_t* entry, [[maybe_unused]] Stack stack) {
  [[maybe_unused]] void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack.first, stack.second);
  if (__builtin_setjmp(from) == 0) {
    entry == nullptr ? jump(to) : void(setcontext(entry));
  }
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void leave(Thread::State state) {
  current->state = state;
  switch_stack(current->jump, scheduler, nullptr, scheduler_stack);
}

// Body of a fiber: one kernel after another, since to make a context takes system calls.
void run_thread() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack.first, &scheduler_stack.second);
  while (true) {
    current->at_rest = false;
    try {
      (*running)();
    } catch (...) {
      thrown = std::current_exception();
    }
    current->at_rest = true;
    leave(Thread::kGone);
  }
}

void prepare(Thread& t, dim3 idx, bool exists) {
  t.idx = idx;
  t.copies.assign(1, {});
  t.state = exists ? Thread::kReady : Thread::kGone;
  if (t.at_rest || !exists) {
    return;
  }
  // New, or left in the middle of a kernel that failed.
  __asan_unpoison_memory_region(t.stack.get(), kStackBytes);
  getcontext(&t.context);
  t.context.uc_stack = {.ss_sp = t.stack.get(), .ss_flags = 0, .ss_size = kStackBytes};
  makecontext(&t.context, run_thread, 0);
  t.entry = &t.context;
}

void resume(Thread& t) {
  current = &t;
  threadIdx = t.idx;
  num_atomics = 0;
  switch_stack(scheduler, t.jump, std::exchange(t.entry, nullptr), {t.stack.get(), kStackBytes});
  if (thrown) {
    std::rethrow_exception(std::move(thrown)); // which is null from then on
  }
}

// Lets those go on whose whole mask, or block, has come. Where there are none, whoever waits does so for ever.
bool release(std::span<Thread> threads, bool is_block) {
  const Thread* missing = nullptr;
  for (Thread& first : threads) {
    const Call call = first.call;
    if (first.state != Thread::kWaiting || is_block == call.mask.has_value()) {
      continue;
    }
    const auto lane_of = [&](const Thread& t) { return (&t - threads.data()) % kWarpSize; };
    const auto awaited = [&](const Thread& t) { return (call.mask.value_or(~0u) >> lane_of(t) & 1u) != 0; };
    // Lanes may come to one operation from several lines; at a barrier the lines must agree.
    const auto meets = [&](const Thread& t) {
      const bool same_line = t.call.site.file_name() == call.site.file_name() && t.call.site.line() == call.site.line();
      return t.state == Thread::kWaiting && t.call.op == call.op && t.call.mask == call.mask &&
             (!is_block || same_line);
    };
    const auto absent = std::ranges::find_if(threads, [&](const Thread& t) { return awaited(t) && !meets(t); });
    if (absent != threads.end()) {
      current = &first;
      missing = &*absent;
    } else {
      for (Thread& t : threads | std::views::filter(awaited)) {
        exchanged[lane_of(t)] = t.call.value;
        t.state = Thread::kReady;
      }
    }
  }
  const bool released = std::ranges::any_of(threads, is_ready);
  if (!released && missing != nullptr) {
    fail(std::string(current->call.op) + " waits for " + describe(*missing), current->call.site);
  }
  return released;
}

void run_block(size_t num_threads) {
  const size_t num_warps = (num_threads + kWarpSize - 1) / kWarpSize;
  for (size_t i = 0; i < num_warps * kWarpSize; ++i) {
    prepare(pool[i], unflatten(i, blockDim), i < num_threads);
  }
  do {
    for (int warp : ordered(num_warps)) {
      const std::span lanes = std::span(pool).subspan(warp * kWarpSize, kWarpSize);
      do {
        for (int i : ordered(kWarpSize) | std::views::filter([&](int i) { return is_ready(lanes[i]); })) {
          lane = i;
          resume(lanes[i]);
        }
      } while (release(lanes, false));
    }
  } while (release(std::span(pool).first(num_threads), true));
}
} // namespace

// For Python, which counts launches.
extern "C" __attribute__((visibility("default"))) size_t simt_num_launches() {
  return num_grids;
}

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  generator.seed(schedule.seed);
  running = &kernel;
  ++num_grids;
  own_shared_bytes = 0;
  gridDim = grid;
  blockDim = block;
  for (int i : ordered(size_t{grid.x} * grid.y * grid.z)) {
    blockIdx = unflatten(i, grid);
    ++num_blocks;
    declared_shared.clear();
    // A new allocation, of just this size: AddressSanitizer guards its end.
    dynamic_shared = std::vector<unsigned char>(shared_bytes, kPoison);
    run_block(size_t{block.x} * block.y * block.z);
  }
}

void fail(const std::string& what, Site site) {
  current->call.site = site;
  throw Error("simt: " + what + ": block " + describe(blockIdx) + ", " + describe(*current));
}

namespace {
bool holds(const unsigned char* begin, size_t size, const void* place) {
  return std::less_equal<const void*>()(begin, place) && std::less<const void*>()(place, begin + size);
}

bool is_shared(const void* place) {
  return holds(dynamic_shared.data(), dynamic_shared.size(), place) ||
         std::ranges::any_of(
             declared_shared, [&](const auto& array) { return holds(array.first, array.second, place); });
}
} // namespace

#if !defined(__SANITIZE_ADDRESS__)
// The first argument of the call that -fsanitize=alignment puts before an access.
struct Access {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment, kind;
};

// A device faults where an address is no multiple of the width of the access. The compiler takes this call for one that
// does not throw: the thread stays here, and the scheduler throws.
extern "C" void __ubsan_handle_type_mismatch_v1(const Access* access, uintptr_t place) {
  const std::string what = "simt: an access of " + std::to_string(1u << access->log_alignment) +
                           " bytes takes a multiple of that as its address, got one that is " +
                           std::to_string(place % (1u << access->log_alignment)) + " beyond";
  const std::string where = std::string(" at ") + access->file + ":" + std::to_string(access->line);
  if (!holds(current->stack.get(), kStackBytes, __builtin_frame_address(0))) {
    std::fprintf(stderr, "%s%s\n", what.c_str(), where.c_str());
    std::abort();
  }
  thrown = std::make_exception_ptr(
      Error(what + ": block " + describe(blockIdx) + ", thread " + describe(current->idx) + where));
  leave(Thread::kGone);
}
#endif

void check_shared(const char* op, const void* place, Site site) {
  if (!is_shared(place) || !is_shared(static_cast<const unsigned char*>(place) + 15)) {
    fail(std::string(op) + " names shared memory, and its address lies elsewhere", site);
  }
  if (reinterpret_cast<uintptr_t>(place) % 16 != 0) {
    fail(std::string(op) + " takes a multiple of 16 as its address", site);
  }
}

namespace {
void copy_now(void* to, const void* from) {
  from != nullptr ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
}
} // namespace

void start_copy(void* shared, const void* from, Site site) {
  check_shared("cp.async", shared, site);
  if (from != nullptr) {
    check_global("cp.async", from, site);
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
      fail("cp.async takes a multiple of 16 as its address", site);
    }
  }
  // A device makes it at any time until the wait.
  const bool random = schedule.order == Schedule::Order::kRandom;
  if (random ? generator() % 2 == 0 : schedule.order == Schedule::Order::kReverse) {
    copy_now(shared, from);
  } else {
    current->copies.back().emplace_back(shared, from);
  }
}

void commit_copies() {
  current->copies.emplace_back();
}

void wait_copies(size_t pending_groups) {
  while (current->copies.size() > pending_groups + 1) {
    for (const auto& [to, from] : current->copies.front()) {
      copy_now(to, from);
    }
    current->copies.erase(current->copies.begin());
  }
}

void check_global(const char* op, const void* place, Site site) {
  if (is_shared(place)) {
    fail(std::string(op) + " names global memory, and its address lies in shared memory", site);
  }
  if (holds(current->stack.get(), kStackBytes, place)) {
    fail(std::string(op) + " names global memory, and its address is that of a local variable", site);
  }
}

const std::array<uint64_t, kWarpSize>& exchange(const Call& call) {
  if (!(call.mask.value_or(~0u) >> lane & 1u)) {
    fail("the mask does not name the calling lane", call.site);
  }
  current->call = call;
  leave(Thread::kWaiting);
  return exchanged;
}
} // namespace simt
