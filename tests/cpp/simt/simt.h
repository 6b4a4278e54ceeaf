// Runs CUDA kernels on a CPU. A CUDA thread is a fiber; blocks run one after another, and within a block a warp runs as
// far as it can before the next one starts, so that a missing barrier lets it overtake the others.
// simt/include shadows <cuda_runtime.h> and the headers of csrc/common that touch a device; kernels need no test hook.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {
  }
};

namespace simt {

// Order of blocks, warps and lanes. A kernel is right only if its results do not depend on it.
struct Schedule {
  enum class Order { kForward, kReverse, kRandom } order = Order::kForward;
  uint64_t seed = 0;
};

// Small, so that kernels walk over their work with a stride already in small tests.
struct Device {
  int num_sms = 2;
  int max_threads_per_sm = 512;
  int shared_bytes_per_block = 48 * 1024;
  int shared_bytes_per_block_opt_in = 99 * 1024;
  int compute_capability = 9;
};

inline Schedule schedule;
inline Device device;

// What went wrong, then block, thread, file and line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Site {
  const char* file = nullptr;
  int line = 0;
};

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

// What follows is called by the shadowing headers, from within a kernel.
struct Coordinates {
  dim3 thread, block, block_size, grid_size;
};
inline Coordinates here;

enum class WarpOp : uint8_t { kSync, kShuffle, kBallot, kMatch };

void sync_threads(Site site);
// Gives `value` to the lanes of `mask`; returns what the operation makes of theirs, for kShuffle that of lane `source`.
uint64_t warp_op(WarpOp op, unsigned mask, uint64_t value, int source, Site site);
int lane();
void* dynamic_shared();
[[noreturn]] void fail(const std::string& what, Site site);
// A thread that spins on atomics would never give way to the others.
void count_atomic(Site site);
// Static shared memory is registered at its first use, and filled with 0xFF before every block.
void register_shared(void* bytes, size_t size);

template <typename T, size_t kSize>
struct SharedArray {
  alignas(16) unsigned char bytes[sizeof(T) * kSize];
  SharedArray() {
    register_shared(bytes, sizeof(bytes));
  }
};

template <typename To, typename From>
To bits(From from) {
  static_assert(sizeof(From) <= sizeof(uint64_t) && sizeof(To) <= sizeof(uint64_t));
  uint64_t word = 0;
  To to;
  std::memcpy(&word, &from, sizeof(from));
  std::memcpy(&to, &word, sizeof(to));
  return to;
}

} // namespace simt
