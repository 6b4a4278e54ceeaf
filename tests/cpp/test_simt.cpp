// What the emulation must catch: seeded bugs, each beside the kernel that is right.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/tensor_cores.cuh"
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
  return error_of([&] { launch({Dim3(num_blocks), Dim3(kThreads), 64, nullptr}, kernel, args...); });
}

// Runs `kernel(out)` under each schedule; how many of the schedules give `expected`.
int num_right(void (*kernel)(int*), int num_blocks, const std::vector<int>& expected) {
  int right = 0;
  for (const simt::Schedule& schedule : simt::all_schedules()) {
    const simt::Scoped scoped(simt::schedule, schedule);
    std::vector<int> out(expected.size(), 0);
    launch({Dim3(num_blocks), Dim3(kThreads), 0, nullptr}, kernel, out.data());
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
      error_of([] { launch({Dim3(1), Dim3(20), 0, nullptr}, partial_warp_kernel); }), "which is outside the block");
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
  EXPECT_TRUE(refuses({Dim3(1), Dim3(1025)}, "expected the block to have 1 to 1024 threads, got 1025"));
  EXPECT_TRUE(refuses({Dim3(0), Dim3(32)}, "expected grid.x to be in [1, 2^31 - 1], got 0"));
  EXPECT_TRUE(refuses({Dim3(1, 65536), Dim3(32)}, "expected grid.y and grid.z to be in [1, 65535], got 65536"));
  EXPECT_TRUE(refuses({Dim3(1), Dim3(32), 1 << 20}, "bytes of dynamic shared memory, got 1048576"));
  EXPECT_FALSE(refuses({Dim3(1), Dim3(32)}, ""));
}

TEST(Launch, CountsTheKernelsOwnSharedMemory) {
  const size_t most = device_properties().shared_bytes_per_block_opt_in;
  std::vector<int> out(kThreads);
  const auto run = [&](size_t dynamic) {
    launch({Dim3(1), Dim3(kThreads), dynamic, nullptr}, reverse_block_kernel<false>, out.data());
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

// Matrices of numbers that their products and sums of 16 hold exactly.
float number(int row, int col) {
  return static_cast<float>((row * 7 + col * 3) % 11 - 5);
}

// The place of a thread's numbers as section "Matrix Fragments for mma.m16n8k16 with floating point type" of the PTX
// manual gives it.
template <typename T>
__global__ void manual_fragments_kernel(float* out) {
  const int group = lane_id() >> 2, thread = lane_id() % 4;
  T a[8], b[4];
  for (int i = 0; i < 8; ++i) {
    const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
    const int col = i < 4 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
    a[i] = static_cast<T>(number(row, col));
  }
  for (int i = 0; i < 4; ++i) {
    const int row = i < 2 ? thread * 2 + (i & 1) : thread * 2 + (i & 1) + 8;
    b[i] = static_cast<T>(number(row, group + 20));
  }
  uint32_t of_a[4], of_b[2];
  memcpy(of_a, a, sizeof(of_a));
  memcpy(of_b, b, sizeof(of_b));
  float c[4] = {};
  multiply_add<T>(c[0], c[1], c[2], c[3], of_a, of_b[0], of_b[1]);
  for (int i = 0; i < 4; ++i) {
    const int row = i < 2 ? group : group + 8, col = thread * 2 + (i & 1);
    out[row * 8 + col] = c[i];
  }
}

// The same product of operands that ldmatrix lays out; b comes as its transpose, or as it is.
template <bool kTransposed>
__global__ void loaded_fragments_kernel(float* out) {
  MOE_SHARED(c10::BFloat16, a, 16 * 16);
  MOE_SHARED(c10::BFloat16, b, 16 * 16);
  for (int i = lane_id(); i < 256; i += kWarpSize) {
    a[i] = number(i / 16, i % 16);
    const int row = kTransposed ? i / 16 : i % 16, col = kTransposed ? i % 16 : i / 16;
    b[i] = number(row, col + 20);
  }
  __syncwarp();
  const int lane = lane_id();
  uint32_t of_a[4], of_b[4];
  load_matrices<false>(of_a, a + lane % 16 * 16 + lane / 16 * 8);
  if constexpr (kTransposed) {
    load_matrices<true>(of_b, b + lane % 16 * 16 + lane / 16 * 8);
  } else {
    load_matrices<false>(of_b, b + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8);
  }
  float c[4] = {};
  multiply_add<c10::BFloat16>(c[0], c[1], c[2], c[3], of_a, of_b[0], of_b[1]);
  for (int i = 0; i < 4; ++i) {
    out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
  }
}

TEST(TensorCores, FragmentsLieWhereTheManualSays) {
  std::vector<float> expected(16 * 8, 0);
  for (int i = 0; i < 16 * 8 * 16; ++i) {
    const int row = i / 128, col = i / 16 % 8, k = i % 16;
    expected[row * 8 + col] += number(row, k) * number(k, col + 20);
  }
  for (const simt::Schedule& schedule : simt::all_schedules()) {
    const simt::Scoped scoped(simt::schedule, schedule);
    for (void (*kernel)(float*) :
         {manual_fragments_kernel<c10::BFloat16>, manual_fragments_kernel<c10::Half>, loaded_fragments_kernel<false>,
          loaded_fragments_kernel<true>}) {
      std::vector<float> out(16 * 8, -1);
      launch({Dim3(1), Dim3(kWarpSize), 0, nullptr}, kernel, out.data());
      EXPECT_EQ(out, expected);
    }
  }
}

struct alignas(16) Sixteen {
  int v[4];
};

enum class CopyBug { kNone, kNoWait, kNoBarrier, kWaitsForTooFew };

// Two groups of copies; each thread reads what another one copied in the second.
template <CopyBug kBug>
__global__ void copy_kernel(int* out, const int* from) {
  MOE_SHARED(Sixteen, first, kThreads);
  MOE_SHARED(Sixteen, second, kThreads);
  copy_async(first + threadIdx.x, from, true);
  commit_copies();
  copy_async(second + threadIdx.x, from + 4 * threadIdx.x, true);
  commit_copies();
  if constexpr (kBug != CopyBug::kNoWait) {
    wait_copies<kBug == CopyBug::kWaitsForTooFew ? 1 : 0>();
  }
  if constexpr (kBug != CopyBug::kNoBarrier) {
    __syncthreads();
  }
  out[threadIdx.x] = second[kThreads - 1 - threadIdx.x].v[0];
}

TEST(SeededBug, CopiesThatAreStillUnderway) {
  alignas(16) static std::array<int, 4 * kThreads> from;
  for (int i = 0; i < 4 * kThreads; ++i) {
    from[i] = i / 4;
  }
  const auto right = [&](void (*kernel)(int*, const int*)) {
    int right = 0;
    for (const simt::Schedule& schedule : simt::all_schedules()) {
      const simt::Scoped scoped(simt::schedule, schedule);
      std::vector<int> out(kThreads, 0);
      launch({Dim3(1), Dim3(kThreads), 0, nullptr}, kernel, out.data(), from.data());
      right += out == reversed_ids();
    }
    return right;
  };
  EXPECT_EQ(right(copy_kernel<CopyBug::kNone>), 3);
  EXPECT_LT(right(copy_kernel<CopyBug::kNoWait>), 3);
  EXPECT_LT(right(copy_kernel<CopyBug::kNoBarrier>), 3);
  EXPECT_LT(right(copy_kernel<CopyBug::kWaitsForTooFew>), 3);
}

// A copy or a load of matrices that does not begin at a multiple of 16 bytes of shared memory.
__global__ void place_kernel(unsigned char* memory, int offset, bool loads) {
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const place = (memory != nullptr ? memory : shared) + offset;
  if (loads) {
    uint32_t unused[4];
    load_matrices<false>(unused, place);
  } else {
    copy_async(place, nullptr, false);
  }
}

TEST(SeededBug, PlacesThatTensorCoresDoNotTake) {
  alignas(16) unsigned char elsewhere[32];
  unsigned char* const shared = nullptr;
  for (const bool loads : {false, true}) {
    EXPECT_EQ(error_of_launch(place_kernel, 1, shared, 16, loads), "no error");
    EXPECT_HAS(error_of_launch(place_kernel, 1, shared, 8, loads), "takes a multiple of 16 as its address");
    EXPECT_HAS(error_of_launch(place_kernel, 1, elsewhere, 0, loads), "names shared memory, and its address lies");
    EXPECT_HAS(error_of_launch(place_kernel, 1, shared, 64, loads), "names shared memory, and its address lies");
  }
}

} // namespace
} // namespace moe_ext
