// Runs CUDA kernels on a CPU. A CUDA thread is a fiber; blocks run one after another, and within a block a warp runs as
// far as it can before the next one starts, so that a missing barrier lets it overtake the others.
// simt/include shadows <cuda_runtime.h> and the headers of csrc/common that touch a device; kernels need no test hook.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

// Order of blocks, warps and lanes. A kernel is right only if its results do not depend on it.
inline struct Schedule {
  enum class Order { kForward, kReverse, kRandom } order = Order::kForward;
  uint64_t seed = 0;
} schedule;

// What went wrong, then block, thread, file and line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);

// What follows is for the shadowing headers. A site is the line of the kernel that calls.
using Site = std::source_location;
constexpr int kWarpSize = 32;
constexpr unsigned char kPoison = 0xFF; // fills shared memory before every block: a NaN, an index out of range

struct Call {
  const char* op = nullptr;
  std::optional<unsigned> mask; // none: all threads of the block
  uint64_t value = 0;
  Site site;
};

inline int lane;
inline int64_t num_atomics; // of the thread, since it ran last
// Of one declaration in a kernel, or in a function that it calls.
struct StaticShared {
  std::vector<unsigned char> bytes;
  bool used; // by the last grid
};
inline std::vector<StaticShared> static_shared;
inline std::vector<unsigned char> dynamic_shared;

inline size_t declare_shared(size_t bytes) {
  static_shared.push_back({std::vector<unsigned char>(bytes, kPoison), false});
  return static_shared.size() - 1;
}

inline unsigned char* use_shared(size_t place) {
  static_shared[place].used = true;
  return static_shared[place].bytes.data();
}

inline size_t used_shared_bytes() {
  size_t sum = 0;
  for (const StaticShared& shared : static_shared) {
    sum += shared.used ? shared.bytes.size() : 0;
  }
  return sum;
}

[[noreturn]] void fail(const std::string& what, Site site);
// Waits until every lane of the mask has come with the same call; what each gave, until the next one.
const std::array<uint64_t, kWarpSize>& exchange(const Call& call);

} // namespace simt
