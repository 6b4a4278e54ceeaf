// Runs CUDA kernels on a CPU. A thread is a fiber, blocks run one after another, and a warp as far as it can before the
// next one, so that a missing barrier lets it overtake the others. include/ shadows the headers that touch a device.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

inline struct dim3 {
  unsigned x = 1, y = 1, z = 1;
} threadIdx, blockIdx, blockDim, gridDim;

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
inline std::vector<unsigned char> dynamic_shared;
inline std::vector<std::pair<const unsigned char*, size_t>> declared_shared; // of the block
inline size_t num_grids, num_blocks;
inline size_t own_shared_bytes; // of the last grid: what its kernel declares

// An array that a kernel declares. AddressSanitizer guards its end.
struct SharedArray {
  std::vector<unsigned char> bytes;
  size_t grid = 0, block = 0; // that came here last

  explicit SharedArray(size_t size) : bytes(size) {
  }
  void enter() {
    if (std::exchange(grid, num_grids) != num_grids) {
      own_shared_bytes += bytes.size();
    }
    if (std::exchange(block, num_blocks) != num_blocks) {
      std::fill(bytes.begin(), bytes.end(), kPoison);
      declared_shared.emplace_back(bytes.data(), bytes.size());
    }
  }
};

[[noreturn]] void fail(const std::string& what, Site site);
// Fails where a pointer to shared memory or to a local variable comes to an instruction that names global memory.
void check_global(const char* op, const void* place, Site site);
// Fails where 16 bytes from there on are not shared memory, or begin at no multiple of 16.
void check_shared(const char* op, const void* place, Site site);
// Copies of 16 bytes to shared memory by the calling thread, of zeros from null: made at once, or when it waits.
void start_copy(void* shared, const void* from, Site site);
void commit_copies();
void wait_copies(size_t pending_groups);
// Waits until every lane of the mask has come with the same call; what each gave, until the next one.
const std::array<uint64_t, kWarpSize>& exchange(const Call& call);
} // namespace simt
