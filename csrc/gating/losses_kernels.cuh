// The router losses. z-loss: one warp per token; each block adds the squares of its tokens in double, and a last block
// adds the partial sums in order. Balance loss: one block adds over experts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/block.cuh"
#include "gating/gating_kernels.cuh"

namespace moe_ext::gating {

constexpr int kLossThreads = 256;
constexpr int kLossWarps = kLossThreads / kWarpSize;

// Sum over the block, returned in every thread.
__device__ __forceinline__ double block_sum(double value) {
  double total = 0;
  block_exclusive_scan<kLossThreads>(value, total);
  return total;
}

template <typename Acc>
__device__ __forceinline__ Acc log_acc(Acc x) {
  if constexpr (sizeof(Acc) == 8) {
    return ::log(x);
  } else {
    return ::logf(x);
  }
}

template <typename Acc>
struct LogSumExp {
  Acc value;
  Acc top;     // largest logit
  Acc inverse; // 1 / sum of exp(x - top)
};

// Computes log sum exp of a row. The result is -inf for a row of -inf, +inf for one with +inf, NaN for one with NaN.
template <typename T>
__device__ LogSumExp<acc_t<T>> logsumexp(const T* row, int num_experts) {
  using Acc = acc_t<T>;
  Acc top = -kInfinity<Acc>;
  bool nan = false;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    const Acc x = widen(row[e]);
    top = x > top ? x : top;
    nan = nan || x != x;
  }
  top = warp_max(top);
  nan = __any_sync(kFullMask, nan);
  Acc sum = 0;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    sum += exp_acc(widen(row[e]) - top);
  }
  sum = warp_sum(sum);
  const bool infinite = top == kInfinity<Acc> || top == -kInfinity<Acc>;
  const Acc of_infinite = nan ? static_cast<Acc>(__builtin_nan("")) : top;
  return {infinite ? of_infinite : top + log_acc(sum), top, Acc(1) / sum};
}

template <typename T>
__device__ __forceinline__ bool is_real(const ZLossArgs<T>& args, int64_t token) {
  return args.token_mask == nullptr || args.token_mask[token];
}

// Writes to partials [blocks, 2] the sum of squares and the number of real tokens.
template <typename T>
__global__ void __launch_bounds__(kLossThreads)
    router_z_loss_kernel(ZLossArgs<T> args, int64_t num_tokens, double* partials) {
  double sum = 0, count = 0;
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    if (is_real(args, token)) {
      const double lse = logsumexp(args.logits + token * args.num_experts, static_cast<int>(args.num_experts)).value;
      sum += lane_id() == 0 ? lse * lse : 0;
      count += lane_id() == 0;
    }
  }
  sum = block_sum(sum);
  count = block_sum(count);
  if (threadIdx.x == 0) {
    partials[2 * blockIdx.x] = sum;
    partials[2 * blockIdx.x + 1] = count;
  }
}

// Computes mean = sum / count, or 0 without real tokens. Launched with one block.
template <typename Acc>
__global__ void mean_kernel(const double* partials, int num_blocks, Acc* mean) {
  double sum = 0, count = 0;
  for (int block = static_cast<int>(threadIdx.x); block < num_blocks; block += kLossThreads) {
    sum += partials[2 * block];
    count += partials[2 * block + 1];
  }
  sum = block_sum(sum);
  count = block_sum(count);
  if (threadIdx.x == 0) {
    *mean = static_cast<Acc>(count == 0 ? 0.0 : sum / count);
  }
}

// Computes factor = 2 grad / number of real tokens. Launched with one block.
template <typename Acc>
__global__ void z_loss_factor_kernel(const Acc* grad, const bool* token_mask, int64_t num_tokens, double* factor) {
  double count = token_mask == nullptr && threadIdx.x == 0 ? static_cast<double>(num_tokens) : 0;
  for (int64_t token = threadIdx.x; token_mask != nullptr && token < num_tokens; token += kLossThreads) {
    count += token_mask[token];
  }
  count = block_sum(count);
  if (threadIdx.x == 0) {
    *factor = 2 * static_cast<double>(*grad) / count;
  }
}

// Computes grad[t][e] = factor * log sum exp(logits[t]) * softmax(logits[t])[e].
template <typename T>
__global__ void __launch_bounds__(kLossThreads)
    router_z_loss_backward_kernel(ZLossArgs<T> args, int64_t num_tokens, const double* factor, T* grad) {
  using Acc = acc_t<T>;
  const int num_experts = static_cast<int>(args.num_experts);
  for (int64_t token = first_token(); token < num_tokens; token += token_stride()) {
    const T* const row = args.logits + token * num_experts;
    if (is_real(args, token)) {
      const LogSumExp<Acc> lse = logsumexp(row, num_experts);
      const Acc scale = static_cast<Acc>(*factor) * lse.value * lse.inverse;
      for (int e = lane_id(); e < num_experts; e += kWarpSize) {
        grad[token * num_experts + e] = static_cast<T>(exp_acc(widen(row[e]) - lse.top) * scale);
      }
    } else {
      for (int e = lane_id(); e < num_experts; e += kWarpSize) {
        grad[token * num_experts + e] = static_cast<T>(Acc(0));
      }
    }
  }
}

// Slope in d loss / d score_sum[e] = slope * counts[e]. With N = sum of counts = T K, E f P = E (c / N) (S K / N).
template <typename Index>
__device__ double balance_slope(const Index* counts, int num_experts, int64_t top_k) {
  double total = 0;
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kLossThreads) {
    total += static_cast<double>(counts[e]);
  }
  total = block_sum(total);
  return total == 0 ? 0 : static_cast<double>(num_experts * top_k) / (total * total);
}

template <typename Acc, typename Index>
__global__ void load_balance_loss_kernel(
    const Acc* score_sum, const Index* counts, int num_experts, int64_t top_k, Acc* loss) {
  const double slope = balance_slope(counts, num_experts, top_k);
  double sum = 0;
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kLossThreads) {
    sum += static_cast<double>(counts[e]) * static_cast<double>(score_sum[e]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    *loss = static_cast<Acc>(sum * slope);
  }
}

template <typename Acc, typename Index>
__global__ void load_balance_loss_backward_kernel(
    const Acc* grad, const Index* counts, int num_experts, int64_t top_k, Acc* grad_score_sum) {
  const double slope = static_cast<double>(*grad) * balance_slope(counts, num_experts, top_k);
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kLossThreads) {
    grad_score_sum[e] = static_cast<Acc>(slope * static_cast<double>(counts[e]));
  }
}

inline Launch loss_launch(int64_t num_blocks, cudaStream_t stream) {
  return {Dim3(num_blocks), Dim3(kLossThreads), 0, stream};
}

inline int64_t z_loss_blocks(int64_t num_tokens) {
  return persistent_grid(ceil_div(num_tokens, kLossWarps), kLossThreads, device_properties()).x;
}

// Launches the z-loss. `partials` is scratch memory for 2 z_loss_blocks(num_tokens) doubles.
template <typename T>
void launch_router_z_loss(
    const ZLossArgs<T>& args, int64_t num_tokens, double* partials, acc_t<T>* loss, cudaStream_t stream) {
  const int64_t num_blocks = z_loss_blocks(num_tokens);
  launch(loss_launch(num_blocks, stream), router_z_loss_kernel<T>, args, num_tokens, partials);
  launch(loss_launch(1, stream), mean_kernel<acc_t<T>>, partials, static_cast<int>(num_blocks), loss);
}

template <typename T>
void launch_router_z_loss_backward(
    const acc_t<T>* grad_loss, const ZLossArgs<T>& args, int64_t num_tokens, double* factor, T* grad,
    cudaStream_t stream) {
  if (num_tokens > 0) {
    launch(loss_launch(1, stream), z_loss_factor_kernel<acc_t<T>>, grad_loss, args.token_mask, num_tokens, factor);
    launch(
        loss_launch(z_loss_blocks(num_tokens), stream), router_z_loss_backward_kernel<T>, args, num_tokens, factor,
        grad);
  }
}

template <typename Acc, typename Index>
void launch_load_balance_loss(
    const Acc* score_sum, const Index* counts, int num_experts, int64_t top_k, Acc* loss, cudaStream_t stream) {
  launch(loss_launch(1, stream), load_balance_loss_kernel<Acc, Index>, score_sum, counts, num_experts, top_k, loss);
}

template <typename Acc, typename Index>
void launch_load_balance_loss_backward(
    const Acc* grad, const Index* counts, int num_experts, int64_t top_k, Acc* grad_score_sum, cudaStream_t stream) {
  launch(
      loss_launch(1, stream), load_balance_loss_backward_kernel<Acc, Index>, grad, counts, num_experts, top_k,
      grad_score_sum);
}

} // namespace moe_ext::gating
