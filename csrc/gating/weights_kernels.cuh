// The gate for a given choice: gating_kernels.cuh without the selection. One warp per token computes the scores of all
// experts in shared memory, sums and counts, and the weights of the given experts. No token is refused: an index
// outside of [0, E) gets weight 0, and with kCheck an index below -1 or above E - 1 traps.
#pragma once

#include "gating/gating_kernels.cuh"

namespace moe_ext::gating {

template <typename T, bool kCheck>
__device__ void weigh_token(const GateWeightsArgs<T>& args, const WarpScratch<acc_t<T>>& scratch, int64_t token) {
  using Acc = acc_t<T>;
  const GateOptions& options = args.options;
  const int num_experts = static_cast<int>(options.num_experts);
  const T* const row = args.logits + token * num_experts;
  const int64_t* const idx = args.idx + token * options.top_k;
  const Acc factor = compute_scores(row, scratch.score, options.score_fn, num_experts);
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    if constexpr (kCheck) {
      if (!(widen(row[e]) < kInfinity<Acc>)) {
        __trap();
      }
    }
    scratch.score_sum[e] += scratch.score[e] * factor;
  }
  // The scores read below were written by other lanes.
  __syncwarp();
  const bool from_logits = options.softmax_of_chosen();
  for (int k = lane_id(); k < options.top_k; k += kWarpSize) {
    const bool exists = idx[k] >= 0 && idx[k] < num_experts;
    if constexpr (kCheck) {
      if (!exists && idx[k] != -1) {
        __trap();
      }
    }
    Acc value = from_logits ? -kInfinity<Acc> : Acc(0);
    if (exists) {
      value = from_logits ? widen(row[idx[k]]) : scratch.score[idx[k]];
      // Two lanes may add to one count if the choice names an expert twice. Integers are exact in any order.
      atomicAdd(&scratch.count[idx[k]], 1);
    }
    scratch.chosen[k] = value;
  }
  write_weights<T>(args, scratch, factor, token);
  __syncwarp();
}

// Also writes partial_sums and partial_counts [blocks, E], for add_partials_kernel.
template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks) gate_weights_kernel(
    GateWeightsArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp, acc_t<T>* partial_sums, int* partial_counts) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const GateOptions& options = args.options;
  const WarpScratch<Acc> scratch(shared, options, bytes_per_warp, warp_id());
  clear_sums(scratch, static_cast<int>(options.num_experts));
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    if (has_choice(args.idx + token * options.top_k, options.top_k)) {
      weigh_token<T, kCheck>(args, scratch, token);
      continue;
    }
    for (int k = lane_id(); k < options.top_k; k += kWarpSize) {
      args.weights[token * options.top_k + k] = 0;
    }
  }
  write_partials<Acc>(shared, options, bytes_per_warp, partial_sums, partial_counts);
}

template <bool kCheck, typename T>
void launch_gate_weights(
    const GateWeightsArgs<T>& args, int64_t num_tokens, const GatePlan& plan, void* workspace,
    acc_t<T>* score_sum, // [E]
    int64_t* counts,     // [E]
    cudaStream_t stream) {
  launch_gate_kernel<T>(gate_weights_kernel<T, kCheck>, args, num_tokens, plan, workspace, score_sum, counts, stream);
}

} // namespace moe_ext::gating
