// Kernels of the capacity limit. Slots are gathered in the order of service, with one number for each (group, expert).
// The tables of the permutation then rank them, and slots without a row are refused.
// Rerouting serves the refused slots one by one, because each takes room from the next. One warp for each group finds
// refused slots 32 at a time, and for each slot its first ranked expert with room, testing 32 experts at a time. The
// room left is in shared memory. When no room is left, the remaining slots are dropped at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"
#include "common/warp.cuh"
#include "permutation/permutation_kernels.cuh"

namespace moe_ext::capacity {

constexpr int kNumThreads = 256;

struct Slots {
  const int64_t* idx;    // [T K]
  const int64_t* order;  // [T K], or null for the order of the slots
  const int64_t* ranked; // [T, R], or null to drop
  int64_t* out;          // [T K]
  int num_slots;
  int top_k;
  int num_ranked;
  int num_experts;
  int num_groups;
  int per_group; // slots of a group; the last groups may have fewer
  int64_t capacity;

  // The i-th slot in the order of service; -1 if `order` points outside.
  __device__ __forceinline__ int slot(int64_t i) const {
    const int64_t s = order == nullptr ? i : order[i];
    return s >= 0 && s < num_slots ? static_cast<int>(s) : -1;
  }
};

// pairs [T K] = group * E + expert in the order of service, or -1 for no expert.
template <bool kCheck>
__global__ void gather_pairs_kernel(Slots slots, int* __restrict__ pairs) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < slots.num_slots;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int slot = slots.slot(i);
    const int64_t e = slot < 0 ? -1 : slots.idx[slot];
    if constexpr (kCheck) {
      if (slot < 0 || e < -1 || e >= slots.num_experts) {
        __trap();
      }
    }
    const int group = static_cast<int>(i) / slots.per_group;
    pairs[i] = e >= 0 && e < slots.num_experts ? group * slots.num_experts + static_cast<int>(e) : -1;
  }
}

// out = idx if the slot has a row, else -1.
static __global__ void mark_slots_kernel(Slots slots, const int64_t* __restrict__ row_of_slot) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < slots.num_slots;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int slot = slots.slot(i);
    if (slot >= 0) {
      slots.out[slot] = row_of_slot[i] < 0 ? -1 : slots.idx[slot];
    }
  }
}

// Returns the first ranked expert of a token that has room and is in none of its slots, or -1, in every lane.
__device__ __forceinline__ int next_expert(const Slots& slots, const int* room, int64_t token) {
  const int64_t* const own = slots.out + token * slots.top_k;
  for (int base = 0; base < slots.num_ranked; base += kWarpSize) {
    const int r = base + lane_id();
    const int64_t e = r < slots.num_ranked ? slots.ranked[token * slots.num_ranked + r] : -1;
    bool open = e >= 0 && e < slots.num_experts && room[e] > 0;
    for (int k = 0; open && k < slots.top_k; ++k) {
      open = own[k] != e;
    }
    const unsigned candidates = __ballot_sync(kFullMask, open);
    if (candidates != 0) {
      return static_cast<int>(__shfl_sync(kFullMask, e, __ffs(static_cast<int>(candidates)) - 1));
    }
  }
  return -1;
}

// rerouted [groups]: number of slots that found another expert. One warp for each group.
static __global__ void __launch_bounds__(kWarpSize)
    reroute_kernel(Slots slots, const int64_t* __restrict__ num_kept, int* __restrict__ rerouted) {
  MOE_DYNAMIC_SHARED(int, room);
  const int group = static_cast<int>(blockIdx.x);
  int64_t left = 0;
  for (int e = lane_id(); e < slots.num_experts; e += kWarpSize) {
    const int64_t free = slots.capacity - num_kept[int64_t{group} * slots.num_experts + e];
    room[e] = static_cast<int>(min(free, int64_t{INT32_MAX}));
    left += room[e];
  }
  left = warp_sum(left);
  __syncwarp();
  int found = 0;
  const int64_t begin = int64_t{group} * slots.per_group;
  const int64_t end = min(begin + slots.per_group, int64_t{slots.num_slots});
  for (int64_t base = begin; left > 0 && base < end; base += kWarpSize) {
    const int64_t i = base + lane_id();
    const int mine = i < end ? slots.slot(i) : -1;
    const bool refused = mine >= 0 && slots.out[mine] < 0 && slots.idx[mine] >= 0;
    for (unsigned waiting = __ballot_sync(kFullMask, refused); left > 0 && waiting != 0; waiting &= waiting - 1) {
      const int slot = __shfl_sync(kFullMask, mine, __ffs(static_cast<int>(waiting)) - 1);
      const int e = next_expert(slots, room, slot / slots.top_k);
      __syncwarp();
      if (e >= 0) {
        if (lane_id() == 0) {
          slots.out[slot] = e;
          --room[e];
        }
        ++found;
        --left;
      }
      __syncwarp();
    }
  }
  if (lane_id() == 0) {
    rerouted[group] = found;
  }
}

static __global__ void subtract_rerouted_kernel(
    const int* __restrict__ rerouted, int num_groups, int64_t* __restrict__ num_dropped) {
  int64_t sum = 0;
  for (int group = lane_id(); group < num_groups; group += kWarpSize) {
    sum += rerouted[group];
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) {
    *num_dropped -= sum;
  }
}

// Scratch memory of a call.
struct Workspace {
  permutation::Tables tables; // for T K slots and G E experts
  int* pairs;                 // [T K]
  int* rerouted;              // [G]
  void* sort;                 // tables_workspace_bytes(plan) bytes
};

template <bool kCheck>
void launch_limit_capacity(
    const Slots& slots, const permutation::SortPlan& plan, const Workspace& workspace, cudaStream_t stream) {
  const Dim3 grid = persistent_grid(ceil_div(slots.num_slots, kNumThreads), kNumThreads, device_properties());
  const Launch per_slot = {grid, Dim3(kNumThreads), 0, stream};
  launch(per_slot, gather_pairs_kernel<kCheck>, slots, workspace.pairs);
  permutation::launch_build_tables<false>(
      workspace.pairs, static_cast<const float*>(nullptr), plan, slots.capacity, int64_t{1}, workspace.sort,
      workspace.tables, stream);
  launch(per_slot, mark_slots_kernel, slots, workspace.tables.row_of_slot);
  if (slots.ranked != nullptr) {
    launch(
        {Dim3(slots.num_groups), Dim3(kWarpSize), sizeof(int) * slots.num_experts, stream}, reroute_kernel, slots,
        workspace.tables.offsets.num_tokens_per_expert, workspace.rerouted);
    launch(
        {Dim3(1), Dim3(kWarpSize), 0, stream}, subtract_rerouted_kernel, workspace.rerouted, slots.num_groups,
        workspace.tables.offsets.num_dropped);
  }
}

} // namespace moe_ext::capacity
