// Tables of the permutation: a stable counting sort of the slots by expert.
// Slots are cut into segments of a fixed size, one warp each. (1) A warp counts the slots of its segment per expert.
// (2) A block per expert scans the counts over the segments. (3) One block turns the totals into rows of each expert.
// (4) Each warp walks over its segment again, 32 slots at a time, and ranks equal experts by lane. With
// drop_policy "score", (4) sorts all slots and (5) a block per expert selects the largest weights by radix.
// For few slots without weights, a single block does all steps in one launch (place_few_slots_kernel). No block waits
// for another and no float is added by an atomic, so the result does not depend on the schedule.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/select.cuh"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::permutation {

constexpr int kNumThreads = 256;
static_assert(kNumThreads == kSelectThreads);
constexpr int kWarpsPerBlock = kNumThreads / kWarpSize;
constexpr int64_t kNone = -1;
// Number of slots up to which a single block takes less time than four launches.
constexpr int kFewSlots = 8192;
constexpr int kFewThreads = 1024;
constexpr int kFewWarps = kFewThreads / kWarpSize;

// Division of the slots into segments and blocks, by the properties of the device. The result of the sort does not
// depend on the division.
struct SortPlan {
  int num_slots;
  int num_experts;
  int num_segments;
  int slots_per_segment;
  int warps_per_block;
  bool shared_counters; // count in shared memory; false if there are too many experts for it
  bool few = false;     // few enough slots, and counters of experts, for a single block

  size_t shared_bytes() const {
    return shared_counters ? sizeof(int) * warps_per_block * num_experts : 0;
  }
  Dim3 grid() const {
    return Dim3(ceil_div(num_segments, warps_per_block));
  }
  Dim3 block() const {
    return Dim3(warps_per_block * kWarpSize);
  }
};

inline size_t few_slots_bytes(int num_experts) {
  return sizeof(int) * (kFewWarps + 1) * static_cast<size_t>(num_experts);
}

inline SortPlan plan_sort(int num_slots, int num_experts, const DeviceProperties& device) {
  constexpr int64_t kMinSlots = 256;
  // Bounds the memory for the counts of all segments to about eight times that of the slots in 64 bits.
  constexpr int64_t kMostCountsPerSlot = 16;
  const int64_t max_segments = int64_t{device.num_sms} * 32;
  const int64_t wanted = std::max(ceil_div(int64_t{num_slots}, max_segments), num_experts / kMostCountsPerSlot);
  const int slots = static_cast<int>(std::max(kMinSlots, ceil_div(wanted, int64_t{32}) * 32));
  SortPlan plan = {num_slots, num_experts,    std::max(1, static_cast<int>(ceil_div(int64_t{num_slots}, slots))),
                   slots,     kWarpsPerBlock, true};
  const int64_t shared = device.shared_bytes_per_block;
  while (plan.warps_per_block > 1 && int64_t{4} * plan.warps_per_block * num_experts > shared) {
    plan.warps_per_block /= 2;
  }
  plan.shared_counters = int64_t{4} * num_experts <= shared;
  if (!plan.shared_counters) {
    plan.warps_per_block = kWarpsPerBlock;
  }
  plan.few = num_slots <= kFewSlots && few_slots_bytes(num_experts) <= static_cast<size_t>(shared / 2);
  return plan;
}

// Counters of one warp; that of expert e is base[e * stride].
struct Counters {
  int* base;
  int64_t stride;

  __device__ int& operator[](int64_t expert) const {
    return base[expert * stride];
  }
};

template <bool kShared>
__device__ __forceinline__ Counters warp_counters(int* counts, int segment, const SortPlan& plan) {
  MOE_DYNAMIC_SHARED(int, shared);
  if constexpr (kShared) {
    return {shared + static_cast<int64_t>(warp_id()) * plan.num_experts, 1};
  } else {
    return {counts + segment, plan.num_segments};
  }
}

// Returns the expert of a slot, or -1 if it is not routed. An index outside of [-1, E) traps with kCheck; otherwise
// such a slot counts as not routed, so that it touches no memory.
template <bool kCheck, typename IndexT>
__device__ __forceinline__ int expert_of(const IndexT* idx, int64_t slot, int num_experts) {
  const int64_t expert = idx[slot];
  if constexpr (kCheck) {
    if (expert < kNone || expert >= num_experts) {
      __trap();
    }
  }
  return expert >= 0 && expert < num_experts ? static_cast<int>(expert) : -1;
}

// Counts the slots in [begin, end) per expert. Called by a whole warp.
template <bool kCheck, typename IndexT>
__device__ __forceinline__ void count_segment(
    const IndexT* idx, int64_t begin, int64_t end, int num_experts, const Counters& counters) {
  for (int expert = lane_id(); expert < num_experts; expert += kWarpSize) {
    counters[expert] = 0;
  }
  __syncwarp();
  for (int64_t slot = begin + lane_id(); slot < end; slot += kWarpSize) {
    const int expert = expert_of<kCheck>(idx, slot, num_experts);
    if (expert >= 0) {
      atomicAdd(&counters[expert], 1);
    }
  }
}

// Writes counts [E, num_segments], and marks every row as one without a slot.
template <typename IndexT, bool kShared, bool kCheck>
__global__ void count_slots_kernel(
    const IndexT* __restrict__ idx, SortPlan plan, int* __restrict__ counts, int64_t* __restrict__ slot_of_row,
    int64_t num_rows) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t row = thread; row < num_rows; row += int64_t{gridDim.x} * blockDim.x) {
    slot_of_row[row] = kNone;
  }
  const int segment = static_cast<int>(blockIdx.x) * plan.warps_per_block + warp_id();
  if (segment >= plan.num_segments) {
    return;
  }
  const Counters counters = warp_counters<kShared>(counts, segment, plan);
  const int64_t begin = int64_t{segment} * plan.slots_per_segment;
  const int64_t end = min(begin + plan.slots_per_segment, int64_t{plan.num_slots});
  count_segment<kCheck>(idx, begin, end, plan.num_experts, counters);
  if constexpr (kShared) {
    __syncwarp();
    for (int expert = lane_id(); expert < plan.num_experts; expert += kWarpSize) {
      counts[int64_t{expert} * plan.num_segments + segment] = counters[expert];
    }
  }
}

// Replaces counts [E, num_segments] by exclusive sums over segments; writes totals [E]. One block per expert.
static __global__ void scan_counts_kernel(int* __restrict__ counts, int num_segments, int* __restrict__ totals) {
  int* const of_expert = counts + int64_t{blockIdx.x} * num_segments;
  int carry = 0;
  for (int base = 0; base < num_segments; base += kNumThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    int total = 0;
    const int below = block_exclusive_scan<kNumThreads>(i < num_segments ? of_expert[i] : 0, total);
    if (i < num_segments) {
      of_expert[i] = carry + below;
    }
    carry += total;
  }
  if (threadIdx.x == 0) {
    totals[blockIdx.x] = carry;
  }
}

struct Offsets {
  int64_t* expert_offsets;        // [E + 1]
  int64_t* num_tokens_per_expert; // [E]
  int64_t* num_dropped;           // []
  int64_t* slot_offsets;          // [E + 1], offsets of all slots before any is dropped; may be null
};

// Computes the offsets of the experts' rows from totals [E]. Called by a whole block of kThreads threads.
template <int kThreads>
__device__ __forceinline__ void place_experts(
    const int* totals, int num_experts, int64_t capacity, uint32_t align, const Offsets& out) {
  int64_t row = 0, slot = 0, dropped = 0;
  for (int base = 0; base < num_experts; base += kThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    const int64_t slots = expert < num_experts ? totals[expert] : 0;
    const int64_t kept = min(slots, capacity);
    int64_t chunk_rows = 0, chunk_slots = 0, chunk_kept = 0;
    const int64_t rows_below =
        block_exclusive_scan<kThreads>(int64_t{ceil_div(static_cast<uint32_t>(kept), align)} * align, chunk_rows);
    const int64_t slots_below = block_exclusive_scan<kThreads>(slots, chunk_slots);
    block_exclusive_scan<kThreads>(kept, chunk_kept);
    if (expert < num_experts) {
      out.expert_offsets[expert] = row + rows_below;
      out.num_tokens_per_expert[expert] = kept;
      if (out.slot_offsets != nullptr) {
        out.slot_offsets[expert] = slot + slots_below;
      }
    }
    row += chunk_rows;
    slot += chunk_slots;
    dropped += chunk_slots - chunk_kept;
  }
  if (threadIdx.x == 0) {
    out.expert_offsets[num_experts] = row;
    *out.num_dropped = dropped;
    if (out.slot_offsets != nullptr) {
      out.slot_offsets[num_experts] = slot;
    }
  }
}

// Launched with one block.
static __global__ void place_experts_kernel(
    const int* __restrict__ totals, int num_experts, int64_t capacity, uint32_t align, Offsets out) {
  place_experts<kNumThreads>(totals, num_experts, capacity, align, out);
}

// Writes the rows of the slots in [begin, end), and their slots. Ranks from `capacity` on get no row. Called by a warp.
template <typename IndexT>
__device__ __forceinline__ void place_segment(
    const IndexT* idx, int64_t begin, int64_t end, int num_experts, const Counters& counters, const int64_t* offsets,
    int64_t capacity, int64_t* row_of_slot, int64_t* slot_of_row) {
  for (int64_t base = begin; base < end; base += kWarpSize) {
    const int64_t slot = base + lane_id();
    const int expert = slot < end ? expert_of<false>(idx, slot, num_experts) : -1;
    const unsigned peers = __match_any_sync(kFullMask, expert);
    const int below = __popc(peers & lanes_below());
    const int64_t rank = expert >= 0 ? counters[expert] + below : 0;
    __syncwarp();
    if (expert >= 0 && below == 0) {
      counters[expert] += __popc(peers);
    }
    __syncwarp();
    const bool kept = expert >= 0 && rank < capacity;
    const int64_t row = kept ? offsets[expert] + rank : kNone;
    if (slot < end) {
      row_of_slot[slot] = row;
    }
    if (kept) {
      slot_of_row[row] = slot;
    }
  }
}

template <typename IndexT, bool kShared>
__global__ void place_slots_kernel(
    const IndexT* __restrict__ idx, SortPlan plan, int* __restrict__ counts, const int64_t* __restrict__ offsets,
    int64_t capacity, int64_t* __restrict__ row_of_slot, int64_t* __restrict__ slot_of_row) {
  const int segment = static_cast<int>(blockIdx.x) * plan.warps_per_block + warp_id();
  if (segment >= plan.num_segments) {
    return;
  }
  const Counters counters = warp_counters<kShared>(counts, segment, plan);
  if constexpr (kShared) {
    for (int expert = lane_id(); expert < plan.num_experts; expert += kWarpSize) {
      counters[expert] = counts[int64_t{expert} * plan.num_segments + segment];
    }
    __syncwarp();
  }
  const int64_t begin = int64_t{segment} * plan.slots_per_segment;
  const int64_t end = min(begin + plan.slots_per_segment, int64_t{plan.num_slots});
  place_segment(idx, begin, end, plan.num_experts, counters, offsets, capacity, row_of_slot, slot_of_row);
}

// Keeps the slots of the `capacity` largest weights of an expert, ties to the earlier slot. One block per expert.
template <typename Weight, bool kCheck>
__global__ void __launch_bounds__(kNumThreads) keep_by_score_kernel(
    const Weight* __restrict__ weights, const int64_t* __restrict__ sorted_slots,
    const int64_t* __restrict__ slot_offsets, const int64_t* __restrict__ expert_offsets, int64_t capacity,
    int64_t* __restrict__ row_of_slot, int64_t* __restrict__ slot_of_row) {
  const int64_t* const slots = sorted_slots + slot_offsets[blockIdx.x];
  const int64_t num_slots = slot_offsets[blockIdx.x + 1] - slot_offsets[blockIdx.x];
  const int64_t first_row = expert_offsets[blockIdx.x];
  const bool overfull = num_slots > capacity;
  decltype(ordered_key(Weight())) threshold = 0;
  int64_t ties = 0;
  if (overfull) {
    if constexpr (kCheck) {
      for (int64_t i = threadIdx.x; i < num_slots; i += kNumThreads) {
        if (weights[slots[i]] != weights[slots[i]]) {
          __trap();
        }
      }
    }
    const auto key = [&](int64_t i) { return ordered_key(weights[slots[i]]); };
    threshold = block_select<decltype(threshold)>(key, num_slots, capacity, ties);
  }
  int64_t larger_before = 0, equal_before = 0;
  for (int64_t base = 0; base < num_slots; base += kNumThreads) {
    const int64_t i = base + threadIdx.x;
    const bool active = i < num_slots;
    const auto key = active && overfull ? ordered_key(weights[slots[i]]) : threshold;
    const bool larger = active && (!overfull || key > threshold);
    const bool equal = active && overfull && key == threshold;
    int num_larger = 0, num_equal = 0;
    const int64_t larger_below = larger_before + block_exclusive_scan<kNumThreads>(int{larger}, num_larger);
    const int64_t equal_below = equal_before + block_exclusive_scan<kNumThreads>(int{equal}, num_equal);
    if (active) {
      const bool kept = larger || (equal && equal_below < ties);
      const int64_t row = kept ? first_row + larger_below + min(equal_below, ties) : kNone;
      row_of_slot[slots[i]] = row;
      if (kept) {
        slot_of_row[row] = slots[i];
      }
    }
    larger_before += num_larger;
    equal_before += num_equal;
  }
}

struct Tables {
  int64_t* slot_of_row; // [num_rows]
  int64_t num_rows;
  int64_t* row_of_slot; // [num_slots]
  Offsets offsets;      // slot_offsets is set by the launcher
};

// Builds the tables for few slots, one segment per warp. Launched with one block, whose shared memory holds a row of
// counters for each warp, and a row of totals.
template <typename IndexT, bool kCheck>
__global__ void __launch_bounds__(kFewThreads) place_few_slots_kernel(
    const IndexT* __restrict__ idx, int num_slots, int num_experts, int64_t capacity, uint32_t align, Tables tables) {
  MOE_DYNAMIC_SHARED(int, shared);
  int* const totals = shared + int64_t{kFewWarps} * num_experts;
  for (int64_t row = threadIdx.x; row < tables.num_rows; row += kFewThreads) {
    tables.slot_of_row[row] = kNone;
  }
  const Counters counters = {shared + int64_t{warp_id()} * num_experts, 1};
  const int64_t per_warp = ceil_div(num_slots, kFewThreads) * kWarpSize;
  const int64_t begin = min(warp_id() * per_warp, int64_t{num_slots});
  const int64_t end = min(begin + per_warp, int64_t{num_slots});
  count_segment<kCheck>(idx, begin, end, num_experts, counters);
  __syncthreads();
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kFewThreads) {
    int below = 0;
    for (int warp = 0; warp < kFewWarps; ++warp) {
      int& count = shared[int64_t{warp} * num_experts + expert];
      const int own = count;
      count = below;
      below += own;
    }
    totals[expert] = below; // no barrier is needed: place_experts reads it in this thread
  }
  place_experts<kFewThreads>(totals, num_experts, capacity, align, tables.offsets);
  __syncthreads();
  place_segment(
      idx, begin, end, num_experts, counters, tables.offsets.expert_offsets, capacity, tables.row_of_slot,
      tables.slot_of_row);
}

// Bytes of scratch memory for launch_build_tables; its address must be a multiple of 8.
inline int64_t tables_workspace_bytes(const SortPlan& plan, bool by_score) {
  const int64_t ints = int64_t{plan.num_experts} * (plan.num_segments + 1);
  const int64_t longs = by_score ? int64_t{plan.num_slots} + plan.num_experts + 1 : 0;
  return 8 * longs + 4 * ints;
}

template <bool kCheck, bool kShared, typename IndexT, typename Weight>
void launch_build_tables(
    const IndexT* idx, const Weight* weights, const SortPlan& plan, int64_t capacity, int64_t align, void* workspace,
    Tables tables, cudaStream_t stream) {
  const bool by_score = weights != nullptr;
  if (plan.few && !by_score) {
    tables.offsets.slot_offsets = nullptr;
    launch(
        {Dim3(1), Dim3(kFewThreads), few_slots_bytes(plan.num_experts), stream}, place_few_slots_kernel<IndexT, kCheck>,
        idx, plan.num_slots, plan.num_experts, capacity, static_cast<uint32_t>(align), tables);
    return;
  }
  int64_t* const sorted_slots = static_cast<int64_t*>(workspace);
  tables.offsets.slot_offsets = by_score ? sorted_slots + plan.num_slots : nullptr;
  int* const counts =
      reinterpret_cast<int*>(by_score ? sorted_slots + plan.num_slots + plan.num_experts + 1 : sorted_slots);
  int* const totals = counts + int64_t{plan.num_experts} * plan.num_segments;
  const Dim3 one_per_expert(plan.num_experts);
  const Launch per_segment = {plan.grid(), plan.block(), plan.shared_bytes(), stream};
  launch(
      per_segment, count_slots_kernel<IndexT, kShared, kCheck>, idx, plan, counts, tables.slot_of_row, tables.num_rows);
  launch({one_per_expert, Dim3(kNumThreads), 0, stream}, scan_counts_kernel, counts, plan.num_segments, totals);
  launch(
      {Dim3(1), Dim3(kNumThreads), 0, stream}, place_experts_kernel, totals, plan.num_experts, capacity,
      static_cast<uint32_t>(align), tables.offsets);
  if (!by_score) {
    launch(
        per_segment, place_slots_kernel<IndexT, kShared>, idx, plan, counts, tables.offsets.expert_offsets, capacity,
        tables.row_of_slot, tables.slot_of_row);
    return;
  }
  launch(
      per_segment, place_slots_kernel<IndexT, kShared>, idx, plan, counts, tables.offsets.slot_offsets, INT64_MAX,
      tables.row_of_slot, sorted_slots);
  launch(
      {one_per_expert, Dim3(kNumThreads), 0, stream}, keep_by_score_kernel<Weight, kCheck>, weights, sorted_slots,
      tables.offsets.slot_offsets, tables.offsets.expert_offsets, capacity, tables.row_of_slot, tables.slot_of_row);
}

// Launches the kernels that build the tables on `stream`. `weights` is null unless the drop policy is "score".
template <bool kCheck, typename IndexT, typename Weight>
void launch_build_tables(
    const IndexT* idx,     // [num_slots]
    const Weight* weights, // [num_slots] or null
    const SortPlan& plan, int64_t capacity, int64_t align, void* workspace, const Tables& tables, cudaStream_t stream) {
  if (plan.shared_counters) {
    launch_build_tables<kCheck, true>(idx, weights, plan, capacity, align, workspace, tables, stream);
  } else {
    launch_build_tables<kCheck, false>(idx, weights, plan, capacity, align, workspace, tables, stream);
  }
}

} // namespace moe_ext::permutation
