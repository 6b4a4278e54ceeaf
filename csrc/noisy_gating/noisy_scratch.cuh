// Helpers of the kernels of the noisy gates: the shared memory of a warp, ranking, and sums over blocks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "gating/gating_kernels.cuh"

namespace moe_ext::noisy_gating {

using gating::first_token;
using gating::GatePlan;
using gating::kInfinity;
using gating::kMaxWarps;
using gating::kMinBlocks;
using gating::kNoExpert;
using gating::lane_best;
using gating::token_stride;
using gating::widen;

// Part of shared memory of one warp. The widest type comes first, for alignment.
template <typename Acc>
struct NoisyScratch {
  Acc* key;    // [E] keys of the ranking; gradients of the deviations in the backward pass
  Acc* score;  // [E] exp(x - max), or deviations
  Acc* normal; // [E] normals, or gradients
  Acc* grad;   // [E] gradients of the clean logits
  Acc* sums;   // [2, E]
  Acc* list;   // [ranked] keys of the ranked experts, descending
  int* ranked; // [ranked] the experts; -1 for none
  int* chosen; // [E] non-zero for the K best experts
  int* counts; // [2, E]

  static int64_t bytes(int64_t num_experts, int64_t num_ranked) {
    const int64_t size = static_cast<int64_t>(sizeof(Acc)) * (6 * num_experts + num_ranked) +
                         static_cast<int64_t>(sizeof(int)) * (3 * num_experts + num_ranked);
    return ceil_div(size, int64_t{16}) * 16;
  }

  __device__ __forceinline__
  NoisyScratch(unsigned char* shared, int64_t num_experts, int64_t num_ranked, int64_t bytes_per_warp, int warp) {
    Acc* next = reinterpret_cast<Acc*>(shared + warp * bytes_per_warp);
    key = next;
    score = next += num_experts;
    normal = next += num_experts;
    grad = next += num_experts;
    sums = next += num_experts;
    list = next += 2 * num_experts;
    ranked = reinterpret_cast<int*>(next + num_ranked);
    chosen = ranked + num_ranked;
    counts = chosen + num_experts;
  }
};

// Plans the launch. `num_warps` is 0 if the device has too little shared memory for so many experts.
template <typename Acc>
GatePlan plan_noisy(int64_t num_tokens, int64_t num_experts, int64_t num_ranked, const DeviceProperties& device) {
  const int64_t bytes = NoisyScratch<Acc>::bytes(num_experts, num_ranked);
  const int64_t limit =
      bytes <= device.shared_bytes_per_block ? device.shared_bytes_per_block : device.shared_bytes_per_block_opt_in;
  const int warps = static_cast<int>(std::min<int64_t>(kMaxWarps, limit / bytes));
  if (warps == 0) {
    return {0, bytes, 0};
  }
  return {warps, bytes, persistent_grid(ceil_div(num_tokens, warps), warps * kWarpSize, device).x};
}

// Partial sums [blocks, 2, E] and counts [blocks, 2, E].
template <typename Acc>
struct Partials {
  Acc* sums;
  int* counts;
};

template <typename Acc>
__device__ __forceinline__ void clear_sums(const NoisyScratch<Acc>& scratch, int num_experts) {
  for (int i = lane_id(); i < 2 * num_experts; i += kWarpSize) {
    scratch.sums[i] = 0;
    scratch.counts[i] = 0;
  }
  __syncwarp();
}

template <typename Acc>
__device__ void write_partials(
    unsigned char* shared, int num_experts, int64_t num_ranked, int64_t bytes_per_warp, const Partials<Acc>& partials) {
  __syncthreads();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * num_experts; i += static_cast<int>(blockDim.x)) {
    Acc sum = 0;
    int count = 0;
    for (int warp = 0; warp < num_warps; ++warp) {
      const NoisyScratch<Acc> other(shared, num_experts, num_ranked, bytes_per_warp, warp);
      sum += other.sums[i];
      count += other.counts[i];
    }
    partials.sums[int64_t{blockIdx.x} * 2 * num_experts + i] = sum;
    partials.counts[int64_t{blockIdx.x} * 2 * num_experts + i] = count;
  }
}

// Results [E]; null pointers for those that are not wanted.
template <typename Acc>
struct Totals {
  Acc* sums[2];
  int64_t* counts[2];
  bool first_count_as_second_sum; // without noise, the load is the number of choices
};

// Adds the partial results of all blocks, in a fixed order. Launched with one warp per expert.
template <typename Acc>
__global__ void add_totals_kernel(Partials<Acc> partials, int num_blocks, int num_experts, Totals<Acc> totals) {
  const int expert = static_cast<int>(blockIdx.x);
  for (int i = 0; i < 2; ++i) {
    double sum = 0;
    int64_t count = 0;
    for (int block = lane_id(); block < num_blocks; block += kWarpSize) {
      const int64_t place = (int64_t{block} * 2 + i) * num_experts + expert;
      sum += static_cast<double>(partials.sums[place]);
      count += partials.counts[place];
    }
    sum = warp_sum(sum);
    count = warp_sum(count);
    if (lane_id() == 0 && totals.counts[i] != nullptr) {
      totals.counts[i][expert] = count;
    }
    if (lane_id() == 0 && totals.sums[i] != nullptr) {
      const bool as_count = i == 1 && totals.first_count_as_second_sum;
      totals.sums[i][expert] = as_count ? static_cast<Acc>(totals.counts[0][expert]) : static_cast<Acc>(sum);
    }
  }
}

// Writes the `num_ranked` largest keys to scratch.list and their experts to scratch.ranked. Ranked keys become -inf.
template <typename Acc, bool kCheck>
__device__ void rank_experts(const NoisyScratch<Acc>& scratch, int num_experts, int num_ranked, int num_needed) {
  Candidate<Acc> mine = lane_best(scratch.key, num_experts);
  for (int k = 0; k < num_ranked; ++k) {
    const Candidate<Acc> best = warp_best(mine);
    const bool exists = best.idx != kNoExpert;
    if constexpr (kCheck) {
      if (!exists && k < num_needed) {
        __trap();
      }
    }
    if (exists && lane_id() == best.idx % kWarpSize) {
      scratch.key[best.idx] = -kInfinity<Acc>;
      mine = lane_best(scratch.key, num_experts);
    }
    if (lane_id() == 0) {
      scratch.list[k] = best.key;
      scratch.ranked[k] = exists ? best.idx : -1;
    }
  }
  __syncwarp();
}

template <typename T, bool kCheck>
__device__ __forceinline__ acc_t<T> checked_logit(T logit) {
  const acc_t<T> x = widen(logit);
  if constexpr (kCheck) {
    if (!(x < kInfinity<acc_t<T>>)) {
      __trap();
    }
  }
  return x;
}

// Bytes of the partial sums and counts of all blocks.
template <typename Acc>
int64_t noisy_workspace_bytes(const GatePlan& plan, int64_t num_experts) {
  return plan.num_blocks * 2 * num_experts * static_cast<int64_t>(sizeof(Acc) + sizeof(int));
}

template <typename Acc>
Partials<Acc> partials_in(void* workspace, const GatePlan& plan, int64_t num_experts) {
  Acc* const sums = static_cast<Acc*>(workspace);
  return {sums, reinterpret_cast<int*>(sums + plan.num_blocks * 2 * num_experts)};
}

template <typename Acc>
void launch_add_totals(
    const Partials<Acc>& partials, const GatePlan& plan, int64_t num_experts, const Totals<Acc>& totals,
    cudaStream_t stream) {
  launch(
      {Dim3(num_experts), Dim3(kWarpSize), 0, stream}, add_totals_kernel<Acc>, partials,
      static_cast<int>(plan.num_blocks), static_cast<int>(num_experts), totals);
}

} // namespace moe_ext::noisy_gating
