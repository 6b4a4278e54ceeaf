// The gate, one warp per token. Lane l holds the experts l, l + 32, ... in shared memory that no other lane accesses
// unless groups are limited. Forward: maximum, exp, sum, score_sum, group limit, K rounds of the warp's best key,
// weights. Sums and counts are added by warp, by block, and by a second kernel over blocks, each in a fixed order. The
// bits depend only on the size of the device. No token is refused, because an error would need a host synchronisation.
// Instead a missing choice becomes -1 with weight 0, or traps with kCheck.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/warp.cuh"
#include "gating/score_math.h"

namespace moe_ext::gating {

constexpr int kMaxWarps = 8;
constexpr int kMinBlocks = 2; // blocks per SM; without this bound ptxas uses fewer registers and spills
constexpr int kNoExpert = INT32_MAX;

template <typename Acc>
constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());
// The smallest normal number. It replaces smaller denominators.
template <typename Acc>
constexpr Acc kTiny = sizeof(Acc) == 8 ? static_cast<Acc>(0x1p-1022) : static_cast<Acc>(0x1p-126);

// Part of shared memory of one warp, `bytes` long. The widest type comes first, for alignment.
template <typename Acc>
struct WarpScratch {
  Acc* score;     // [E]
  Acc* key;       // [E] keys of the selection; gradients in the backward pass
  Acc* score_sum; // [E]
  Acc* chosen;    // [K] logits or scores of the chosen experts, then their weights
  Acc* group;     // [G] group scores
  int* count;     // [E]
  int* keep;      // [G]

  static size_t bytes(const GateOptions& o) {
    const size_t size =
        sizeof(Acc) * (3 * o.num_experts + o.top_k + o.num_groups) + sizeof(int) * (o.num_experts + o.num_groups);
    return ceil_div(size, 16) * 16;
  }

  __device__ __forceinline__
  WarpScratch(unsigned char* shared, const GateOptions& o, int64_t bytes_per_warp, int warp) {
    Acc* next = reinterpret_cast<Acc*>(shared + warp * bytes_per_warp);
    score = next;
    key = next += o.num_experts;
    score_sum = next += o.num_experts;
    chosen = next += o.num_experts;
    group = next += o.top_k;
    count = reinterpret_cast<int*>(next + o.num_groups);
    keep = count + o.num_experts;
  }
};

struct GatePlan {
  int num_warps; // per block
  int64_t bytes_per_warp;
  int64_t num_blocks;

  size_t shared_bytes() const {
    return num_warps * bytes_per_warp;
  }
  Dim3 block() const {
    return Dim3(num_warps * kWarpSize);
  }
  Launch launch_on(cudaStream_t stream) const {
    return {Dim3(num_blocks), block(), shared_bytes(), stream};
  }
};

// Plans the launch. `num_warps` is 0 if the device has too little shared memory for so many experts.
template <typename Acc>
GatePlan plan_gate(int64_t num_tokens, const GateOptions& options, const DeviceProperties& device) {
  const int64_t bytes = static_cast<int64_t>(WarpScratch<Acc>::bytes(options));
  const int64_t limit =
      bytes <= device.shared_bytes_per_block ? device.shared_bytes_per_block : device.shared_bytes_per_block_opt_in;
  const int warps = static_cast<int>(std::min<int64_t>(kMaxWarps, limit / bytes));
  if (warps == 0) {
    return {0, bytes, 0};
  }
  return {warps, bytes, persistent_grid(ceil_div(num_tokens, warps), warps * kWarpSize, device).x};
}

template <typename T>
__device__ __forceinline__ acc_t<T> widen(T x) {
  return static_cast<acc_t<T>>(x);
}

// First token of a warp; token_stride() is the distance to its next ones.
__device__ __forceinline__ int64_t first_token() {
  return int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + warp_id();
}

__device__ __forceinline__ int64_t token_stride() {
  return int64_t{gridDim.x} * (blockDim.x / kWarpSize);
}

// Fills `score` and returns the factor by which the scores sum to one.
template <typename T>
__device__ acc_t<T> compute_scores(const T* row, acc_t<T>* score, ScoreFn fn, int num_experts) {
  using Acc = acc_t<T>;
  Acc top = -kInfinity<Acc>;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    top = widen(row[e]) > top ? widen(row[e]) : top;
  }
  top = warp_max(top);
  Acc sum = 0;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    score[e] = is_pointwise(fn) ? pointwise_score(fn, widen(row[e])) : exp_acc(widen(row[e]) - top);
    sum += score[e];
  }
  sum = warp_sum(sum);
  return Acc(1) / (sum > kTiny<Acc> || sum != sum ? sum : kTiny<Acc>);
}

// Best key above -inf among the experts of this lane.
template <typename Acc>
__device__ __forceinline__ Candidate<Acc> lane_best(const Acc* key, int n) {
  Candidate<Acc> best = {-kInfinity<Acc>, kNoExpert};
  for (int e = lane_id(); e < n; e += kWarpSize) {
    if (key[e] > best.key) {
      best = {key[e], e};
    }
  }
  return best;
}

// Sets the keys of all but the top_groups best groups to -inf. The score of a group is the sum of its group_terms
// largest keys, without keys of -inf.
template <typename Acc>
__device__ void limit_groups(const WarpScratch<Acc>& scratch, const GateOptions& options) {
  const int num_groups = static_cast<int>(options.num_groups);
  const int num_experts = static_cast<int>(options.num_experts);
  const int group_size = num_experts / num_groups;
  __syncwarp();
  for (int g = lane_id(); g < num_groups; g += kWarpSize) {
    const Acc* const key = scratch.key + g * group_size;
    Candidate<Acc> last = {kInfinity<Acc>, -1};
    for (int i = 0; i < options.group_terms; ++i) {
      // Finds the next key in descending order; equal keys are ordered by index.
      Candidate<Acc> next = {-kInfinity<Acc>, kNoExpert};
      for (int e = 0; e < group_size; ++e) {
        if (key[e] > next.key && (key[e] < last.key || (key[e] == last.key && e > last.idx))) {
          next = {key[e], e};
        }
      }
      scratch.group[g] = i == 0 ? next.key : next.idx != kNoExpert ? scratch.group[g] + next.key : scratch.group[g];
      last = next;
    }
    scratch.keep[g] = 0;
  }
  for (int i = 0; i < options.top_groups; ++i) {
    const Candidate<Acc> best = warp_best(lane_best(scratch.group, num_groups));
    if (best.idx != kNoExpert && best.idx % kWarpSize == lane_id()) {
      scratch.group[best.idx] = -kInfinity<Acc>;
      scratch.keep[best.idx] = 1;
    }
  }
  __syncwarp();
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    if (scratch.keep[e / group_size] == 0) {
      scratch.key[e] = -kInfinity<Acc>;
    }
  }
}

// Writes idx, adds to the counts, and puts the chosen logits or scores into scratch.chosen for write_weights.
template <typename T, bool kCheck>
__device__ void select_experts(
    const GateArgs<T>& args, const WarpScratch<acc_t<T>>& scratch, const T* row, int64_t token) {
  using Acc = acc_t<T>;
  const int num_experts = static_cast<int>(args.options.num_experts);
  const bool from_logits = args.options.softmax_of_chosen();
  Candidate<Acc> mine = lane_best(scratch.key, num_experts);
  for (int k = 0; k < args.options.top_k; ++k) {
    const int expert = warp_best(mine).idx;
    const bool exists = expert != kNoExpert;
    if constexpr (kCheck) {
      if (!exists) {
        __trap();
      }
    }
    // The lane that holds the expert writes its value; all lanes read the values after the loop.
    if (lane_id() == (exists ? expert % kWarpSize : 0)) {
      Acc value = from_logits ? -kInfinity<Acc> : Acc(0);
      if (exists) {
        value = from_logits ? widen(row[expert]) : scratch.score[expert];
        scratch.key[expert] = -kInfinity<Acc>;
        scratch.count[expert] += 1;
        mine = lane_best(scratch.key, num_experts);
      }
      scratch.chosen[k] = value;
      args.idx[token * args.options.top_k + k] = exists ? expert : -1;
    }
  }
  __syncwarp();
}

// Turns chosen scores into weights in place: the softmax of logits, or scores divided by their sum if `by_sum` is set.
template <typename Acc>
__device__ Acc normalize_chosen(Acc* chosen, int top_k, bool softmax, bool by_sum) {
  Acc top = -kInfinity<Acc>, sum = 0;
  for (int k = lane_id(); softmax && k < top_k; k += kWarpSize) {
    top = chosen[k] > top ? chosen[k] : top;
  }
  top = warp_max(top);
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    chosen[k] = softmax ? exp_acc(chosen[k] - top) : chosen[k];
    sum += chosen[k];
  }
  sum = warp_sum(sum);
  return !by_sum ? Acc(1) : sum > kTiny<Acc> || sum != sum ? sum : kTiny<Acc>;
}

// Writes the weights of a token. Args is GateArgs or GateWeightsArgs.
template <typename T, typename Args>
__device__ void write_weights(const Args& args, const WarpScratch<acc_t<T>>& scratch, acc_t<T> factor, int64_t token) {
  using Acc = acc_t<T>;
  const GateOptions& options = args.options;
  const int top_k = static_cast<int>(options.top_k);
  const bool softmax = options.softmax_of_chosen();
  const bool by_sum = softmax || options.renormalize;
  const Acc denominator = normalize_chosen(scratch.chosen, top_k, softmax, by_sum);
  const Acc unit = !by_sum && options.score_fn == ScoreFn::kSoftmax ? factor : Acc(1);
  const Acc scale = static_cast<Acc>(options.scale) * unit;
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    args.weights[token * top_k + k] = scratch.chosen[k] / denominator * scale;
  }
}

template <typename T, bool kCheck>
__device__ void gate_token(const GateArgs<T>& args, const WarpScratch<acc_t<T>>& scratch, int64_t token) {
  using Acc = acc_t<T>;
  const GateOptions& options = args.options;
  const int num_experts = static_cast<int>(options.num_experts);
  const T* const row = args.logits + token * num_experts;
  const Acc factor = compute_scores(row, scratch.score, options.score_fn, num_experts);
  const Acc unit = is_pointwise(options.score_fn) ? Acc(1) : factor;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    const Acc x = widen(row[e]);
    if constexpr (kCheck) {
      if (!(x < kInfinity<Acc>)) {
        __trap();
      }
    }
    scratch.score_sum[e] += scratch.score[e] * factor;
    // A logit of -inf keeps the key -inf, so that no bias can make such an expert eligible.
    scratch.key[e] = args.bias != nullptr && x > -kInfinity<Acc> ? scratch.score[e] * unit + args.bias[e] : x;
  }
  if (options.top_groups < options.num_groups) {
    limit_groups(scratch, options);
  }
  select_experts<T, kCheck>(args, scratch, row, token);
  write_weights<T>(args, scratch, factor, token);
  __syncwarp();
}

template <typename Acc>
__device__ __forceinline__ void clear_sums(const WarpScratch<Acc>& scratch, int num_experts) {
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    scratch.score_sum[e] = 0;
    scratch.count[e] = 0;
  }
}

// Adds the sums and counts of a block's warps, in order. Every thread of the block must call it.
template <typename Acc>
__device__ void write_partials(
    unsigned char* shared, const GateOptions& options, int64_t bytes_per_warp, Acc* partial_sums, int* partial_counts) {
  const int num_experts = static_cast<int>(options.num_experts);
  __syncthreads();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += static_cast<int>(blockDim.x)) {
    Acc sum = 0;
    int count = 0;
    for (int warp = 0; warp < num_warps; ++warp) {
      const WarpScratch<Acc> other(shared, options, bytes_per_warp, warp);
      sum += other.score_sum[e];
      count += other.count[e];
    }
    partial_sums[int64_t{blockIdx.x} * num_experts + e] = sum;
    partial_counts[int64_t{blockIdx.x} * num_experts + e] = count;
  }
}

// Also writes partial_sums and partial_counts [blocks, E], for add_partials_kernel.
template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks) topk_gate_kernel(
    GateArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp, acc_t<T>* partial_sums, int* partial_counts) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const GateOptions& options = args.options;
  const WarpScratch<Acc> scratch(shared, options, bytes_per_warp, warp_id());
  clear_sums(scratch, static_cast<int>(options.num_experts));
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    if (args.token_mask == nullptr || args.token_mask[token]) {
      gate_token<T, kCheck>(args, scratch, token);
      continue;
    }
    for (int k = lane_id(); k < options.top_k; k += kWarpSize) {
      args.weights[token * options.top_k + k] = 0;
      args.idx[token * options.top_k + k] = -1;
    }
  }
  write_partials<Acc>(shared, options, bytes_per_warp, partial_sums, partial_counts);
}

// Adds the partial sums and counts of all blocks to score_sum [E] and counts [E]. Launched with one warp per expert.
template <typename Acc>
__global__ void add_partials_kernel(
    const Acc* __restrict__ partial_sums, const int* __restrict__ partial_counts, int num_blocks, int num_experts,
    Acc* __restrict__ score_sum, int64_t* __restrict__ counts) {
  double sum = 0;
  int64_t count = 0;
  for (int block = lane_id(); block < num_blocks; block += kWarpSize) {
    sum += partial_sums[int64_t{block} * num_experts + blockIdx.x];
    count += partial_counts[int64_t{block} * num_experts + blockIdx.x];
  }
  sum = warp_sum(sum);
  count = warp_sum(count);
  if (lane_id() == 0) {
    score_sum[blockIdx.x] = static_cast<Acc>(sum);
    counts[blockIdx.x] = count;
  }
}

// True if the token has an expert. All lanes get the same result.
__device__ __forceinline__ bool has_choice(const int64_t* idx, int64_t top_k) {
  bool any = false;
  for (int64_t k = lane_id(); k < top_k; k += kWarpSize) {
    any = any || idx[k] >= 0;
  }
  return __any_sync(kFullMask, any) != 0;
}

// Sets chosen [K] = scale q f'/f (g - <q, g>), the gradient through weights q that are scores divided by their sum over
// the chosen experts. For weights that are not renormalised, the term <q, g> is absent.
template <typename T>
__device__ void weights_backward(
    const GateGradArgs<T>& args, acc_t<T>* chosen, const T* row, const int64_t* idx, const acc_t<T>* grad) {
  using Acc = acc_t<T>;
  const int top_k = static_cast<int>(args.options.top_k);
  const ScoreFn fn = args.options.score_fn;
  const bool pointwise = is_pointwise(fn);
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    const Acc x = idx[k] < 0 ? -kInfinity<Acc> : widen(row[idx[k]]);
    chosen[k] = pointwise ? pointwise_score(fn, x) : x;
  }
  const bool by_sum = !pointwise || args.options.renormalize;
  const Acc factor = Acc(1) / normalize_chosen(chosen, top_k, !pointwise, by_sum);
  Acc mean = 0;
  for (int k = lane_id(); by_sum && k < top_k; k += kWarpSize) {
    mean += chosen[k] * grad[k];
  }
  mean = warp_sum(mean) * factor;
  for (int k = lane_id(); k < top_k; k += kWarpSize) {
    const Acc slope = score_slope(fn, chosen[k]);
    chosen[k] = static_cast<Acc>(args.options.scale) * (chosen[k] * factor) * slope * (grad[k] - mean);
  }
}

// Sets key [E] = p f'/f (g - <p, g>), the gradient through the normalised scores p, with f'/f = 1 for the softmax. g is
// the gradient of score_sum. If the weights are probabilities, their gradients are part of <p, g>, and `chosen` becomes
// their separate term.
template <typename T>
__device__ void scores_backward(
    const GateGradArgs<T>& args, const WarpScratch<acc_t<T>>& scratch, const T* row, const int64_t* idx,
    const acc_t<T>* grad_of_probabilities) {
  using Acc = acc_t<T>;
  const GateOptions& options = args.options;
  const int num_experts = static_cast<int>(options.num_experts);
  const Acc factor = compute_scores(row, scratch.score, options.score_fn, num_experts);
  const Acc* const g = args.grad_score_sum;
  Acc mean = 0;
  for (int e = lane_id(); g != nullptr && e < num_experts; e += kWarpSize) {
    mean += scratch.score[e] * factor * g[e];
  }
  if (grad_of_probabilities != nullptr) {
    // The scores read below were written by other lanes.
    __syncwarp();
    for (int k = lane_id(); k < options.top_k; k += kWarpSize) {
      const Acc p = idx[k] < 0 ? Acc(0) : scratch.score[idx[k]] * factor;
      scratch.chosen[k] = p * static_cast<Acc>(options.scale) * grad_of_probabilities[k];
      mean += scratch.chosen[k];
    }
  }
  mean = warp_sum(mean);
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    const Acc s = scratch.score[e];
    const Acc slope = score_slope(options.score_fn, s);
    scratch.key[e] = s * factor * slope * ((g != nullptr ? g[e] : Acc(0)) - mean);
  }
}

template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    topk_gate_backward_kernel(GateGradArgs<T> args, int64_t num_tokens, int64_t bytes_per_warp) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(unsigned char, shared);
  const GateOptions& options = args.options;
  const int num_experts = static_cast<int>(options.num_experts);
  const WarpScratch<Acc> scratch(shared, options, bytes_per_warp, warp_id());
  const bool of_weights = args.grad_weights != nullptr;
  const bool of_probabilities = of_weights && options.score_fn == ScoreFn::kSoftmax && !options.softmax_of_chosen();
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    const T* const row = args.logits + token * num_experts;
    const int64_t* const idx = args.idx + token * options.top_k;
    const Acc* const grad = of_weights ? args.grad_weights + token * options.top_k : nullptr;
    const bool active = has_choice(idx, options.top_k);
    if (active && (args.grad_score_sum != nullptr || of_probabilities)) {
      scores_backward(args, scratch, row, idx, of_probabilities ? grad : nullptr);
    } else {
      for (int e = lane_id(); e < num_experts; e += kWarpSize) {
        scratch.key[e] = 0;
      }
    }
    if (active && of_weights) {
      if (!of_probabilities) {
        weights_backward(args, scratch.chosen, row, idx, grad);
      }
      __syncwarp();
      for (int k = 0; k < options.top_k; ++k) {
        if constexpr (kCheck) {
          if (idx[k] < -1 || idx[k] >= num_experts) {
            __trap();
          }
        }
        // The lane that holds the expert adds, in order of k, because a given choice may name an expert twice.
        if (idx[k] >= 0 && idx[k] < num_experts && idx[k] % kWarpSize == lane_id()) {
          scratch.key[idx[k]] += scratch.chosen[k];
        }
      }
      __syncwarp();
    }
    for (int e = lane_id(); e < num_experts; e += kWarpSize) {
      args.grad[token * num_experts + e] = static_cast<T>(scratch.key[e]);
    }
  }
}

// Bytes of the partial sums and counts of all blocks.
template <typename Acc>
int64_t gate_workspace_bytes(const GatePlan& plan, int64_t num_experts) {
  return plan.num_blocks * num_experts * static_cast<int64_t>(sizeof(Acc) + sizeof(int));
}

// Launches a kernel that writes partial sums and counts to the workspace, and the kernel that adds them.
template <typename T, typename Args>
void launch_gate_kernel(
    void (*kernel)(Args, int64_t, int64_t, acc_t<T>*, int*), const Args& args, int64_t num_tokens, const GatePlan& plan,
    void* workspace, acc_t<T>* score_sum, int64_t* counts, cudaStream_t stream) {
  const int num_experts = static_cast<int>(args.options.num_experts);
  auto* const sums = static_cast<acc_t<T>*>(workspace);
  int* const partial_counts = reinterpret_cast<int*>(sums + plan.num_blocks * num_experts);
  launch(plan.launch_on(stream), kernel, args, num_tokens, plan.bytes_per_warp, sums, partial_counts);
  launch(
      {Dim3(num_experts), Dim3(kWarpSize), 0, stream}, add_partials_kernel<acc_t<T>>, sums, partial_counts,
      static_cast<int>(plan.num_blocks), num_experts, score_sum, counts);
}

template <bool kCheck, typename T>
void launch_topk_gate(
    const GateArgs<T>& args, int64_t num_tokens, const GatePlan& plan, void* workspace,
    acc_t<T>* score_sum, // [E]
    int64_t* counts,     // [E]
    cudaStream_t stream) {
  launch_gate_kernel<T>(topk_gate_kernel<T, kCheck>, args, num_tokens, plan, workspace, score_sum, counts, stream);
}

template <bool kCheck, typename T>
void launch_topk_gate_backward(
    const GateGradArgs<T>& args, int64_t num_tokens, const GatePlan& plan, cudaStream_t stream) {
  if (num_tokens > 0) {
    launch(plan.launch_on(stream), topk_gate_backward_kernel<T, kCheck>, args, num_tokens, plan.bytes_per_warp);
  }
}

} // namespace moe_ext::gating
