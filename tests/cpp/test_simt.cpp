// What the emulation must catch: seeded bugs, each beside the kernel that is right.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/warp.cuh"
#include "schedules.h"

namespace moe_ext {
namespace {

constexpr int kThreads = 128;

template <typename F>
std::string error_of(F&& run) {
  try {
    run();
  } catch (const simt::Error& error) {
    return error.what();
  }
  return "no error";
}

template <typename... Params, typename... Args>
std::string error_of_launch(void (*kernel)(Params...), int num_blocks, Args... args) {
  return error_of([&] { launch({dim3(num_blocks), dim3(kThreads), 64, nullptr}, kernel, args...); });
}

// Runs `kernel(out)` under each schedule; how many of the schedules give `expected`.
int num_right(void (*kernel)(int*), int num_blocks, const std::vector<int>& expected) {
  int right = 0;
  for (const simt::Schedule& schedule : simt::all_schedules()) {
    const simt::Scoped scoped(simt::schedule, schedule);
    std::vector<int> out(expected.size(), 0);
    launch({dim3(num_blocks), dim3(kThreads), 0, nullptr}, kernel, out.data());
    right += out == expected;
  }
  return right;
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "got: " << (text)

std::vector<int> reversed_ids() {
  std::vector<int> expected(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    expected[i] = kThreads - 1 - i;
  }
  return expected;
}

// Each thread reads what another warp wrote.
template <bool kBug>
__global__ void reverse_block_kernel(int* out) {
  MOE_SHARED(int, values, kThreads);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (!kBug) {
    __syncthreads();
  }
  out[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

TEST(SeededBug, MissingSyncthreads) {
  EXPECT_EQ(num_right(reverse_block_kernel<false>, 1, reversed_ids()), 3);
  EXPECT_EQ(num_right(reverse_block_kernel<true>, 1, reversed_ids()), 0);
}

// The barrier between two rounds is missing: a warp overwrites what others have not read yet.
template <bool kBug>
__global__ void two_rounds_kernel(int* out) {
  MOE_SHARED(int, values, kThreads);
  int sum = 0;
  for (int round = 0; round < 2; ++round) {
    values[threadIdx.x] = round + 1;
    __syncthreads();
    sum += values[(threadIdx.x + 64) % kThreads];
    if constexpr (!kBug) {
      __syncthreads();
    }
  }
  out[threadIdx.x] = sum;
}

TEST(SeededBug, MissingSyncthreadsBeforeReuse) {
  EXPECT_EQ(num_right(two_rounds_kernel<false>, 1, std::vector<int>(kThreads, 3)), 3);
  EXPECT_EQ(num_right(two_rounds_kernel<true>, 1, std::vector<int>(kThreads, 3)), 0);
}

// Each lane reads what its lower neighbour wrote.
template <bool kBug>
__global__ void neighbour_kernel(int* out) {
  MOE_SHARED(int, values, kThreads);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (!kBug) {
    __syncwarp();
  }
  out[threadIdx.x] = lane_id() == 0 ? 0 : values[threadIdx.x - 1];
}

TEST(SeededBug, MissingSyncwarp) {
  std::vector<int> expected(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    expected[i] = i % kWarpSize == 0 ? 0 : i - 1;
  }
  EXPECT_EQ(num_right(neighbour_kernel<false>, 1, expected), 3);
  EXPECT_LT(num_right(neighbour_kernel<true>, 1, expected), 3);
}

__global__ void divergent_barrier_kernel() {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST(SeededBug, DivergentBarrier) {
  const std::string error = error_of_launch(divergent_barrier_kernel, 2);
  EXPECT_HAS(error, "__syncthreads waits for thread (0, 0, 0) at ");
  EXPECT_HAS(error, "block (0, 0, 0)");
  EXPECT_HAS(error, "thread (127, 0, 0) at ");
  EXPECT_HAS(error, "test_simt.cpp:");
}

__global__ void early_exit_kernel(int num_threads) {
  if (static_cast<int>(threadIdx.x) >= num_threads) {
    return;
  }
  __syncthreads();
}

TEST(SeededBug, ExitBeforeABarrier) {
  const std::string error = error_of_launch(early_exit_kernel, 1, 100);
  EXPECT_HAS(error, "__syncthreads waits for thread (100, 0, 0), which has returned");
  EXPECT_HAS(error, "test_simt.cpp:");
  EXPECT_EQ(error_of_launch(early_exit_kernel, 1, kThreads), "no error");
}

__global__ void absent_lanes_kernel(unsigned mask) {
  if (lane_id() < 16) {
    __shfl_xor_sync(mask, 1, 1);
  }
}

TEST(SeededBug, ShuffleMaskNamesAbsentLanes) {
  const std::string error = error_of_launch(absent_lanes_kernel, 1, kFullMask);
  EXPECT_HAS(error, "__shfl_xor_sync waits for thread (16, 0, 0), which has returned");
  EXPECT_HAS(error, "test_simt.cpp:");
  EXPECT_EQ(error_of_launch(absent_lanes_kernel, 1, 0xFFFFu), "no error");
  EXPECT_HAS(error_of_launch(absent_lanes_kernel, 1, 0xFF00u), "the mask does not name the calling lane");
}

__global__ void shuffle_outside_mask_kernel() {
  if (lane_id() < 16) {
    __shfl_sync(0xFFFFu, 1, 20);
  }
}

TEST(SeededBug, ShuffleReadsOutsideItsMask) {
  EXPECT_HAS(error_of_launch(shuffle_outside_mask_kernel, 1), "reads lane 20, which its mask does not name");
}

__global__ void different_masks_kernel() {
  __syncwarp(lane_id() < 16 ? kFullMask : 0xFFFF0000u);
}

TEST(SeededBug, LanesDisagreeOnTheMask) {
  EXPECT_HAS(error_of_launch(different_masks_kernel, 1), "__syncwarp waits for thread (16, 0, 0)");
}

__global__ void partial_warp_kernel() {
  __syncwarp();
}

TEST(SeededBug, MaskNamesLanesOutsideTheBlock) {
  EXPECT_HAS(
      error_of([] { launch({dim3(1), dim3(20), 0, nullptr}, partial_warp_kernel); }), "which is outside the block");
}

__global__ void barrier_and_shuffle_kernel() {
  if (lane_id() < 16) {
    __syncthreads();
  } else {
    __shfl_sync(kFullMask, 1, 0);
  }
}

TEST(SeededBug, DeadlockOfBarrierAndShuffle) {
  EXPECT_HAS(error_of_launch(barrier_and_shuffle_kernel, 1), "__shfl_sync waits for thread (0, 0, 0) at ");
}

// Waits for another block: legal only where all blocks are resident, and never here.
__global__ void wait_for_next_block_kernel(int* flag) {
  if (threadIdx.x == 0) {
    while (blockIdx.x == 0 && atomicAdd(flag, 0) == 0) {
    }
    atomicExch(flag, 1);
  }
}

TEST(SeededBug, BlockWaitsForABlock) {
  int flag = 0;
  const std::string error = error_of_launch(wait_for_next_block_kernel, 2, &flag);
  EXPECT_HAS(error, "deadlock: a thread spins on atomics");
  EXPECT_HAS(error, "block (0, 0, 0), thread (0, 0, 0) at ");
}

// Each block reads what the block before it wrote.
template <bool kBug>
__global__ void block_chain_kernel(int* out) {
  if (threadIdx.x == 0) {
    const int below = kBug && blockIdx.x > 0 ? out[blockIdx.x - 1] : static_cast<int>(blockIdx.x);
    out[blockIdx.x] = below + 1;
  }
}

TEST(SeededBug, RaceBetweenBlocks) {
  EXPECT_EQ(num_right(block_chain_kernel<false>, 4, {1, 2, 3, 4}), 3);
  EXPECT_LT(num_right(block_chain_kernel<true>, 4, {1, 2, 3, 4}), 3);
}

// Without a sum of its own each block reads what the former left in shared memory.
template <bool kBug, bool kDynamic>
__global__ void leftover_kernel(int* out) {
  MOE_SHARED(int, fixed, 1);
  MOE_DYNAMIC_SHARED(int, dynamic);
  int* const sum = kDynamic ? dynamic : fixed;
  if (threadIdx.x == 0 && (!kBug || blockIdx.x == 0)) {
    *sum = 0;
  }
  __syncthreads();
  atomicAdd(sum, 1);
  __syncthreads();
  out[blockIdx.x] = *sum;
}

TEST(SeededBug, SharedMemoryIsNotCarriedBetweenBlocks) {
  std::vector<int> out(2);
  EXPECT_EQ(error_of_launch(leftover_kernel<true, false>, 2, out.data()), "no error");
  EXPECT_NE(out, (std::vector<int>{kThreads, 2 * kThreads}));
  EXPECT_EQ(error_of_launch(leftover_kernel<true, true>, 2, out.data()), "no error");
  EXPECT_NE(out, (std::vector<int>{kThreads, 2 * kThreads}));
  error_of_launch(leftover_kernel<false, true>, 2, out.data());
  EXPECT_EQ(out, (std::vector<int>{kThreads, kThreads}));
}

enum class Space { kGlobal, kDeclared, kDynamic, kLocal };

// An instruction that names global memory gets the address of another space.
template <Space kSpace>
__global__ void named_space_kernel(int* out, bool loads) {
  MOE_SHARED(int, declared, 1);
  MOE_DYNAMIC_SHARED(int, dynamic);
  int local = 0;
  int* const places[] = {out, declared, dynamic, &local};
  int* const place = places[static_cast<int>(kSpace)];
  if (loads) {
    out[1] = __ldg(place) + __ldcs(place);
  } else {
    __stwb(place, 1);
  }
}

TEST(SeededBug, AddressOfAnotherSpace) {
  int out[2] = {};
  for (const bool loads : {false, true}) {
    const std::string op = loads ? "__ldg" : "__stwb";
    EXPECT_EQ(error_of_launch(named_space_kernel<Space::kGlobal>, 1, out, loads), "no error");
    EXPECT_HAS(
        error_of_launch(named_space_kernel<Space::kDeclared>, 1, out, loads),
        op + " names global memory, and its address lies in shared memory: block (0, 0, 0), thread (0, 0, 0) at ");
    EXPECT_HAS(error_of_launch(named_space_kernel<Space::kDynamic>, 1, out, loads), "lies in shared memory");
    EXPECT_HAS(error_of_launch(named_space_kernel<Space::kLocal>, 1, out, loads), "is that of a local variable");
  }
}

__global__ void store_past_shared_kernel(int last) {
  MOE_DYNAMIC_SHARED(int, values);
  if (static_cast<int>(threadIdx.x) <= last) {
    values[threadIdx.x] = 0;
  }
}

__global__ void store_past_global_kernel(int* out, int last) {
  if (static_cast<int>(threadIdx.x) <= last) {
    out[threadIdx.x] = 0;
  }
}

TEST(SeededBug, OutOfBoundsStore) {
  std::vector<int> out(10);
  EXPECT_EQ(error_of_launch(store_past_shared_kernel, 1, 15), "no error");
  EXPECT_EQ(error_of_launch(store_past_global_kernel, 1, out.data(), 9), "no error");
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(error_of_launch(store_past_shared_kernel, 1, 16), "heap-buffer-overflow");
  EXPECT_DEATH(error_of_launch(store_past_global_kernel, 1, out.data(), 10), "heap-buffer-overflow");
#endif
}

#if defined(__SANITIZE_ADDRESS__)
__global__ void misaligned_kernel(int* out) {
  *reinterpret_cast<uint4*>(out + threadIdx.x % 2) = uint4{};
}

TEST(SeededBug, MisalignedVectorAccess) {
  alignas(16) int out[8] = {};
  EXPECT_DEATH(error_of_launch(misaligned_kernel, 1, static_cast<int*>(out)), "misaligned address");
}
#endif

TEST(Launch, RefusesWhatADeviceRefuses) {
  const auto refuses = [](Launch config, const std::string& message) {
    try {
      launch(config, partial_warp_kernel);
    } catch (const std::runtime_error& error) {
      EXPECT_HAS(std::string(error.what()), message);
      return true;
    }
    return false;
  };
  EXPECT_TRUE(refuses({dim3(1), dim3(1025)}, "expected the block to have 1 to 1024 threads, got 1025"));
  EXPECT_TRUE(refuses({dim3(0), dim3(32)}, "expected grid.x to be in [1, 2^31 - 1], got 0"));
  EXPECT_TRUE(refuses({dim3(1, 65536), dim3(32)}, "expected grid.y and grid.z to be in [1, 65535], got 65536"));
  EXPECT_TRUE(refuses({dim3(1), dim3(32), 1 << 20}, "bytes of dynamic shared memory, got 1048576"));
  EXPECT_FALSE(refuses({dim3(1), dim3(32)}, ""));
}

TEST(Launch, CountsTheKernelsOwnSharedMemory) {
  const size_t most = device_properties().shared_bytes_per_block_opt_in;
  std::vector<int> out(kThreads);
  const auto run = [&](size_t dynamic) {
    launch({dim3(1), dim3(kThreads), dynamic, nullptr}, reverse_block_kernel<false>, out.data());
  };
  run(most - kThreads * sizeof(int));
  EXPECT_THROW(run(most - kThreads * sizeof(int) + 1), std::runtime_error);
}

__global__ void primitives_kernel(int* out) {
  const int value = static_cast<int>(threadIdx.x);
  int total = 0;
  const int below = block_exclusive_scan<kThreads>(value, total);
  const bool right =
      below == value * (value - 1) / 2 && total == kThreads * (kThreads - 1) / 2 && warp_sum(1) == kWarpSize &&
      __ballot_sync(kFullMask, lane_id() % 2) == 0xAAAAAAAAu && __any_sync(kFullMask, lane_id() == 7) &&
      !__all_sync(kFullMask, lane_id() == 7) &&
      __match_any_sync(kFullMask, lane_id() / 16) == (lane_id() < 16 ? 0xFFFFu : 0xFFFF0000u) &&
      __shfl_sync(kFullMask, value, 3, 8) == value / 8 * 8 + 3 &&
      __shfl_down_sync(kFullMask, lane_id(), 1u) == (lane_id() == 31 ? 31 : lane_id() + 1) &&
      __shfl_up_sync(kFullMask, lane_id() * 0.5, 2u) == (lane_id() < 2 ? lane_id() : lane_id() - 2) * 0.5;
  out[value] = right;
}

TEST(Primitives, AreRightUnderEverySchedule) {
  EXPECT_EQ(num_right(primitives_kernel, 1, std::vector<int>(kThreads, 1)), 3);
}

} // namespace
} // namespace moe_ext
