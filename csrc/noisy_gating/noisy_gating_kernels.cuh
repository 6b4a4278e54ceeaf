// The noisy gates, one warp per token. Lane l holds the experts l, l + 32, ... in shared memory. Experts are ranked by
// rounds of the warp's best key, as in topk_gate. Sums and counts are added by warp, by block, and by a second kernel
// over blocks, each in a fixed order. A backward pass draws and ranks again. No token is refused: a missing choice
// becomes -1 with weight 0, or traps with kCheck.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "noisy_gating/noisy_gating_math.h"
#include "noisy_gating/noisy_gating_tables.h"
#include "noisy_gating/noisy_scratch.cuh"

namespace moe_ext::noisy_gating {

// Computes scratch.score = exp(x - max) of the keys. Returns 1 / sum.
template <typename Acc>
__device__ Acc softmax_of_keys(const NoisyScratch<Acc>& scratch, int num_experts) {
  Acc top = -kInfinity<Acc>, sum = 0;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    top = scratch.key[e] > top ? scratch.key[e] : top;
  }
  top = warp_max(top);
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    scratch.score[e] = exp_acc(scratch.key[e] - top);
    sum += scratch.score[e];
  }
  return Acc(1) / warp_sum(sum);
}

// exp(second - first) of the two best logits, or 0 without a second expert.
template <typename Acc>
__device__ __forceinline__ Acc second_ratio(const NoisyScratch<Acc>& scratch) {
  return scratch.ranked[1] < 0 ? Acc(0) : exp_acc(scratch.list[1] - scratch.list[0]);
}

template <typename T, bool kCheck>
__device__ void gshard_token(const GShardArgs<T>& args, const NoisyScratch<acc_t<T>>& scratch, int64_t token) {
  using Acc = acc_t<T>;
  const int n = static_cast<int>(args.num_experts);
  for (int e = lane_id(); e < n; e += kWarpSize) {
    scratch.key[e] = checked_logit<T, kCheck>(args.logits[token * n + e]);
  }
  const Acc factor = softmax_of_keys(scratch, n);
  for (int e = lane_id(); e < n; e += kWarpSize) {
    scratch.sums[e] += scratch.score[e] * factor;
  }
  rank_experts<Acc, kCheck>(scratch, n, 2, 2);
  if (lane_id() == 0) {
    const Acc ratio = second_ratio(scratch);
    const Acc w2 = ratio / (1 + ratio);
    bool kept = scratch.ranked[1] >= 0;
    if (kept && args.rng.state != nullptr) {
      kept = static_cast<Acc>(to_uniform(token_draws(args.rng, Stream::kSecondExpert, token).words(0).w[0])) < 2 * w2;
    }
    const Acc scale = static_cast<Acc>(args.scale);
    const int e1 = scratch.ranked[0], e2 = scratch.ranked[1];
    args.idx[2 * token] = e1;
    args.idx[2 * token + 1] = kept ? e2 : -1;
    args.weights[2 * token] = e1 < 0 ? Acc(0) : scale / (1 + ratio);
    args.weights[2 * token + 1] = kept ? scale * w2 : Acc(0);
    if (e1 >= 0) {
      scratch.counts[e1] += 1;
      scratch.counts[n + e1] += 1;
    }
    if (kept) {
      scratch.counts[e2] += 1;
    }
  }
  __syncwarp();
}

template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    gshard_gate_kernel(GShardArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp, Partials<acc_t<T>> partials) {
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const int n = static_cast<int>(args.num_experts);
  const NoisyScratch<acc_t<T>> scratch(shared, n, 2, bytes_per_warp, warp_id());
  clear_sums(scratch, n);
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    if (args.token_mask == nullptr || args.token_mask[token]) {
      gshard_token<T, kCheck>(args, scratch, token);
    } else if (lane_id() < 2) {
      args.idx[2 * token + lane_id()] = -1;
      args.weights[2 * token + lane_id()] = 0;
    }
  }
  write_partials(shared, n, 2, bytes_per_warp, partials);
}

template <typename T>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    gshard_gate_backward_kernel(GShardGradArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const int n = static_cast<int>(args.num_experts);
  const NoisyScratch<Acc> scratch(shared, n, 2, bytes_per_warp, warp_id());
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    const bool active = args.idx[2 * token] >= 0;
    for (int e = lane_id(); e < n; e += kWarpSize) {
      scratch.grad[e] = 0;
      scratch.key[e] = active ? widen(args.logits[token * n + e]) : Acc(0);
    }
    if (active && args.grad_score_sum != nullptr) {
      const Acc factor = softmax_of_keys(scratch, n);
      Acc mean = 0;
      for (int e = lane_id(); e < n; e += kWarpSize) {
        mean += scratch.score[e] * factor * args.grad_score_sum[e];
      }
      mean = warp_sum(mean);
      for (int e = lane_id(); e < n; e += kWarpSize) {
        scratch.grad[e] = scratch.score[e] * factor * (args.grad_score_sum[e] - mean);
      }
    }
    if (active && args.grad_weights != nullptr) {
      rank_experts<Acc, false>(scratch, n, 2, 0);
      if (lane_id() == 0 && scratch.ranked[1] >= 0) {
        const Acc ratio = second_ratio(scratch), denominator = 1 + ratio;
        const Acc g2 = args.idx[2 * token + 1] >= 0 ? args.grad_weights[2 * token + 1] : Acc(0);
        const Acc slope =
            static_cast<Acc>(args.scale) * ratio / denominator / denominator * (args.grad_weights[2 * token] - g2);
        scratch.grad[scratch.ranked[0]] += slope;
        scratch.grad[scratch.ranked[1]] -= slope;
      }
      __syncwarp();
    }
    for (int e = lane_id(); e < n; e += kWarpSize) {
      args.grad[token * n + e] = static_cast<T>(scratch.grad[e]);
    }
  }
}

// Computes deviations, normals and the ranking of h = clean + normal * deviation, and marks the K best in `chosen`.
template <typename T, bool kCheck>
__device__ void rank_noisy(
    const T* clean, const T* noise, const NoisyOptions& options, const RngSource& rng,
    const NoisyScratch<acc_t<T>>& scratch, int64_t token) {
  using Acc = acc_t<T>;
  const int n = static_cast<int>(options.num_experts), top_k = static_cast<int>(options.top_k);
  const Acc epsilon = static_cast<Acc>(options.noise_epsilon);
  for (int e = lane_id(); e < n; e += kWarpSize) {
    const Acc x = checked_logit<T, kCheck>(clean[token * n + e]);
    Acc h = x;
    if (noise != nullptr) {
      const Acc raw = checked_logit<T, kCheck>(noise[token * n + e]);
      if constexpr (kCheck) {
        if (!(raw > -kInfinity<Acc>)) {
          __trap();
        }
      }
      const PhiloxWords words = token_draws(rng, Stream::kNoise, token).words(e);
      const bool low = e % 4 < 2;
      const NormalPair normals = to_normals(low ? words.w[0] : words.w[2], low ? words.w[1] : words.w[3]);
      scratch.normal[e] = static_cast<Acc>(e % 2 == 0 ? normals.first : normals.second);
      scratch.score[e] = deviation_of(raw, epsilon);
      h = x + scratch.normal[e] * scratch.score[e];
    }
    scratch.key[e] = h;
    scratch.chosen[e] = 0;
  }
  rank_experts<Acc, kCheck>(scratch, n, static_cast<int>(options.num_ranked()), top_k);
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    if (scratch.ranked[k] >= 0) {
      scratch.chosen[scratch.ranked[k]] = 1;
    }
  }
  __syncwarp();
}

// Thresholds of the load, read from scratch.list. They must be read before scratch.list is replaced by its softmax.
template <typename Acc>
struct Thresholds {
  Acc of_chosen; // h of rank K + 1, the threshold of chosen experts
  Acc of_others; // h of rank K, the threshold of the others

  __device__ __forceinline__ Thresholds(const NoisyScratch<Acc>& scratch, const NoisyOptions& options)
      : of_chosen(options.top_k < options.num_experts ? scratch.list[options.top_k] : -kInfinity<Acc>),
        of_others(scratch.list[options.top_k - 1]) {
    __syncwarp();
  }
};

template <typename Acc>
__device__ void gates_of_list(const NoisyScratch<Acc>& scratch, int top_k) {
  const Acc top = scratch.list[0];
  __syncwarp();
  Acc sum = 0;
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    scratch.list[k] = scratch.ranked[k] < 0 ? Acc(0) : exp_acc(scratch.list[k] - top);
    sum += scratch.list[k];
  }
  sum = warp_sum(sum);
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    scratch.list[k] /= sum;
  }
  __syncwarp();
}

template <typename T, bool kCheck>
__device__ void noisy_token(const NoisyArgs<T>& args, const NoisyScratch<acc_t<T>>& scratch, int64_t token) {
  using Acc = acc_t<T>;
  const int n = static_cast<int>(args.options.num_experts), top_k = static_cast<int>(args.options.top_k);
  rank_noisy<T, kCheck>(args.clean, args.noise, args.options, args.rng, scratch, token);
  const Thresholds<Acc> thresholds(scratch, args.options);
  if (args.noise != nullptr) {
    for (int e = lane_id(); e < n; e += kWarpSize) {
      const Acc bound = scratch.chosen[e] != 0 ? thresholds.of_chosen : thresholds.of_others;
      const Acc z = standardize(widen(args.clean[token * n + e]), bound, scratch.score[e]);
      scratch.sums[n + e] += activation::normal_cdf(z).value;
    }
  }
  gates_of_list(scratch, top_k);
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    const int expert = scratch.ranked[k];
    args.idx[token * top_k + k] = expert;
    args.weights[token * top_k + k] = expert < 0 ? Acc(0) : static_cast<Acc>(args.options.scale) * scratch.list[k];
    if (expert >= 0) {
      scratch.sums[expert] += scratch.list[k];
      scratch.counts[expert] += 1;
    }
  }
  __syncwarp();
}

template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    noisy_topk_gate_kernel(NoisyArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp, Partials<acc_t<T>> partials) {
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const int n = static_cast<int>(args.options.num_experts), top_k = static_cast<int>(args.options.top_k);
  const NoisyScratch<acc_t<T>> scratch(shared, n, args.options.num_ranked(), bytes_per_warp, warp_id());
  clear_sums(scratch, n);
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    if (args.token_mask == nullptr || args.token_mask[token]) {
      noisy_token<T, kCheck>(args, scratch, token);
      continue;
    }
    for (int k = lane_id(); k < top_k; k += kWarpSize) {
      args.idx[token * top_k + k] = -1;
      args.weights[token * top_k + k] = 0;
    }
  }
  write_partials(shared, n, args.options.num_ranked(), bytes_per_warp, partials);
}

// Adds a gradient `slope` of the h = clean + normal * deviation of one rank. scratch.key: gradients of the deviations.
template <typename Acc>
__device__ __forceinline__ void add_to_h(const NoisyScratch<Acc>& scratch, int rank, Acc slope, bool noisy) {
  const int expert = scratch.ranked[rank];
  if (expert >= 0) {
    scratch.grad[expert] += slope;
    scratch.key[expert] += noisy ? slope * scratch.normal[expert] : Acc(0);
  }
}

// Adds the gradient through the load: by the clean logit, the deviation, and the h at the threshold.
template <typename T>
__device__ void load_backward(
    const NoisyGradArgs<T>& args, const NoisyScratch<acc_t<T>>& scratch, const Thresholds<acc_t<T>>& thresholds,
    int64_t token) {
  using Acc = acc_t<T>;
  const int n = static_cast<int>(args.options.num_experts), top_k = static_cast<int>(args.options.top_k);
  Acc of_next = 0, of_last = 0;
  for (int e = lane_id(); e < n; e += kWarpSize) {
    const bool chosen = scratch.chosen[e] != 0;
    const Acc bound = chosen ? thresholds.of_chosen : thresholds.of_others;
    const Acc z = standardize(widen(args.clean[token * n + e]), bound, scratch.score[e]);
    const Acc slope = args.grad_load[e] * activation::normal_cdf(z).density / scratch.score[e];
    scratch.grad[e] += slope;
    scratch.key[e] -= slope * z;
    of_next -= chosen ? slope : Acc(0);
    of_last -= chosen ? Acc(0) : slope;
  }
  of_next = warp_sum(of_next);
  of_last = warp_sum(of_last);
  __syncwarp();
  if (lane_id() == 0) {
    add_to_h(scratch, top_k - 1, of_last, true);
    if (top_k < n) {
      add_to_h(scratch, top_k, of_next, true);
    }
  }
  __syncwarp();
}

// Adds the gradient through weights and importance: scale q (g - <q, g>), where q is the softmax of the chosen h.
template <typename T>
__device__ void gates_backward(const NoisyGradArgs<T>& args, const NoisyScratch<acc_t<T>>& scratch, int64_t token) {
  using Acc = acc_t<T>;
  const int top_k = static_cast<int>(args.options.top_k);
  gates_of_list(scratch, top_k);
  const auto slope_of = [&](int k) {
    const Acc of_weight = args.grad_weights != nullptr
                              ? static_cast<Acc>(args.options.scale) * args.grad_weights[token * top_k + k]
                              : Acc(0);
    const bool counts = args.grad_importance != nullptr && scratch.ranked[k] >= 0;
    return of_weight + (counts ? args.grad_importance[scratch.ranked[k]] : Acc(0));
  };
  Acc mean = 0;
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    mean += scratch.list[k] * slope_of(k);
  }
  mean = warp_sum(mean);
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    add_to_h(scratch, k, scratch.list[k] * (slope_of(k) - mean), args.noise != nullptr);
  }
  __syncwarp();
}

template <typename T>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    noisy_topk_gate_backward_kernel(NoisyGradArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const int n = static_cast<int>(args.options.num_experts);
  const NoisyScratch<Acc> scratch(shared, n, args.options.num_ranked(), bytes_per_warp, warp_id());
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    const bool active = args.idx[token * args.options.top_k] >= 0;
    if (active) {
      rank_noisy<T, false>(args.clean, args.noise, args.options, args.rng, scratch, token);
    }
    for (int e = lane_id(); e < n; e += kWarpSize) {
      scratch.grad[e] = 0;
      scratch.key[e] = 0;
    }
    __syncwarp();
    if (active) {
      const Thresholds<Acc> thresholds(scratch, args.options);
      if (args.grad_load != nullptr && args.noise != nullptr) {
        load_backward(args, scratch, thresholds, token);
      }
      if (args.grad_weights != nullptr || args.grad_importance != nullptr) {
        gates_backward(args, scratch, token);
      }
    }
    for (int e = lane_id(); e < n; e += kWarpSize) {
      args.grad_clean[token * n + e] = static_cast<T>(scratch.grad[e]);
      if (args.grad_noise != nullptr) {
        const Acc slope = active ? scratch.key[e] * sigmoid_acc(widen(args.noise[token * n + e])) : Acc(0);
        args.grad_noise[token * n + e] = static_cast<T>(slope);
      }
    }
    __syncwarp();
  }
}

template <bool kCheck, typename T>
void launch_gshard_gate(
    const GShardArgs<T>& args, int64_t num_tokens, const GatePlan& plan, void* workspace,
    const Totals<acc_t<T>>& totals, cudaStream_t stream) {
  const auto partials = partials_in<acc_t<T>>(workspace, plan, args.num_experts);
  launch(plan.launch_on(stream), gshard_gate_kernel<T, kCheck>, args, num_tokens, plan.bytes_per_warp, partials);
  launch_add_totals(partials, plan, args.num_experts, totals, stream);
}

template <typename T>
void launch_gshard_gate_backward(
    const GShardGradArgs<T>& args, int64_t num_tokens, const GatePlan& plan, cudaStream_t stream) {
  if (num_tokens > 0) {
    launch(plan.launch_on(stream), gshard_gate_backward_kernel<T>, args, num_tokens, plan.bytes_per_warp);
  }
}

template <bool kCheck, typename T>
void launch_noisy_topk_gate(
    const NoisyArgs<T>& args, int64_t num_tokens, const GatePlan& plan, void* workspace, const Totals<acc_t<T>>& totals,
    cudaStream_t stream) {
  const auto partials = partials_in<acc_t<T>>(workspace, plan, args.options.num_experts);
  launch(plan.launch_on(stream), noisy_topk_gate_kernel<T, kCheck>, args, num_tokens, plan.bytes_per_warp, partials);
  launch_add_totals(partials, plan, args.options.num_experts, totals, stream);
}

template <typename T>
void launch_noisy_topk_gate_backward(
    const NoisyGradArgs<T>& args, int64_t num_tokens, const GatePlan& plan, cudaStream_t stream) {
  if (num_tokens > 0) {
    launch(plan.launch_on(stream), noisy_topk_gate_backward_kernel<T>, args, num_tokens, plan.bytes_per_warp);
  }
}

} // namespace moe_ext::noisy_gating
