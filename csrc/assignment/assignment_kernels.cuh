// Kernels of the assignments. Every sum has a fixed order.
// Scores: one warp for each token, in which lane l holds the experts l, l + 32, ... A warp sums its tokens' scores in
// shared memory, a block adds its warps, and a last kernel adds the blocks.
// Expert choice: scores, then keys of the scores [E, T]. Kernels count the digits of the keys from the top digit on.
// Each kernel derives from the previous counts which keys may still be the last that the expert takes. If equal scores
// straddle this limit, one block for each expert finds the last token that counts. Finally every (token, expert) is
// compared with the limit.
// Sinkhorn: num_iters times, a kernel over tokens leaves sums of blocks for each expert, and one block computes the
// experts' factors. Once the factors stop moving it raises a flag, after which both kernels return at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "assignment/assignment_tables.h"
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/select.cuh"
#include "common/warp.cuh"
#include "gating/score_math.h"

namespace moe_ext::assignment {

constexpr int kMaxWarps = 8;
constexpr int kMinBlocks = 2; // of an SM. By default ptxas would aim at fewer registers and spill.
constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / kWarpSize;
constexpr double kSinkhornEps = 1e-8; // as in the sums over tokens of Megatron-LM

template <typename Acc>
constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());
template <typename Acc>
constexpr Acc kTiny = sizeof(Acc) == 8 ? static_cast<Acc>(0x1p-1022) : static_cast<Acc>(0x1p-126);

// Blocks of warps, each with `rows` rows of E numbers in shared memory. num_warps is 0 if not even one warp fits.
struct RowPlan {
  int num_warps;
  int64_t num_blocks; // for each sequence
  size_t shared_bytes;

  Launch launch_on(int64_t sequences, cudaStream_t stream) const {
    return {Dim3(num_blocks, sequences), Dim3(num_warps * kWarpSize), shared_bytes, stream};
  }
};

template <typename Acc>
RowPlan plan_rows(int64_t num_tokens, int64_t num_experts, int rows, const DeviceProperties& device) {
  const int64_t bytes = ceil_div(static_cast<int64_t>(sizeof(Acc)) * rows * num_experts, 16) * 16;
  const int64_t limit =
      bytes <= device.shared_bytes_per_block ? device.shared_bytes_per_block : device.shared_bytes_per_block_opt_in;
  const int warps = static_cast<int>(std::min<int64_t>(kMaxWarps, limit / bytes));
  if (warps == 0) {
    return {0, 0, 0};
  }
  // Two blocks for each SM. More blocks would only leave more sums to add.
  const int64_t most = std::min<int64_t>(2 * device.num_sms, ceil_div(num_tokens, int64_t{warps}));
  return {warps, std::max<int64_t>(1, most), static_cast<size_t>(warps * bytes)};
}

template <typename T>
__device__ __forceinline__ acc_t<T> widen(T x) {
  return static_cast<acc_t<T>>(x);
}

template <typename T>
__device__ __forceinline__ bool is_real(const ScoreArgs<T>& args, int64_t token) {
  return args.token_mask == nullptr || args.token_mask[token];
}

template <typename Acc>
__device__ __forceinline__ Acc at_least_tiny(Acc sum) {
  return sum > kTiny<Acc> || sum != sum ? sum : kTiny<Acc>;
}

// Fills score, each lane for its own experts. Returns the factor that makes the scores sum to one.
template <typename T, bool kCheck>
__device__ acc_t<T> row_scores(const T* row, int num_experts, gating::ScoreFn fn, acc_t<T>* score) {
  using Acc = acc_t<T>;
  Acc top = -kInfinity<Acc>;
  bool nan = false;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    const Acc x = widen(row[e]);
    top = x > top ? x : top;
    nan = nan || x != x;
  }
  top = warp_max(top);
  if constexpr (kCheck) {
    if (__any_sync(kFullMask, nan) || top == kInfinity<Acc> || top == -kInfinity<Acc>) {
      __trap();
    }
  }
  Acc sum = 0;
  for (int e = lane_id(); e < num_experts; e += kWarpSize) {
    score[e] = gating::is_pointwise(fn) ? gating::pointwise_score(fn, widen(row[e])) : exp_acc(widen(row[e]) - top);
    sum += score[e];
  }
  return Acc(1) / at_least_tiny(warp_sum(sum));
}

// The tokens of a sequence that a warp processes. blockIdx.y is the sequence.
struct WarpTokens {
  int64_t first;
  int64_t end;
  int64_t stride;
};

__device__ __forceinline__ WarpTokens warp_tokens(int64_t length) {
  const int64_t begin = int64_t{blockIdx.y} * length;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  return {begin + int64_t{blockIdx.x} * num_warps + warp_id(), begin + length, int64_t{gridDim.x} * num_warps};
}

// Adds the sums [E] of a block's warps, which lie rows * E apart.
template <typename Acc>
__device__ void add_warps(const Acc* sums, int rows, int num_experts, Acc* partial) {
  __syncthreads();
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += static_cast<int>(blockDim.x)) {
    Acc sum = 0;
    for (int warp = 0; warp < num_warps; ++warp) {
      sum += sums[warp * rows * num_experts + e];
    }
    partial[e] = sum;
  }
}

// partials [sequences, blocks, E]; rows [T, E] of scores, or null.
template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    scores_kernel(ScoreArgs<T> args, int64_t length, acc_t<T>* __restrict__ rows, acc_t<T>* __restrict__ partials) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(Acc, shared);
  const int n = static_cast<int>(args.num_experts);
  Acc* const sums = shared + warp_id() * 2 * n;
  Acc* const score = sums + n;
  for (int e = lane_id(); e < n; e += kWarpSize) {
    sums[e] = 0;
  }
  const WarpTokens tokens = warp_tokens(length);
  for (int64_t t = tokens.first; t < tokens.end; t += tokens.stride) {
    const bool real = is_real(args, t);
    const Acc factor = real ? row_scores<T, kCheck>(args.logits + t * n, n, args.score_fn, score) : Acc(0);
    for (int e = lane_id(); e < n; e += kWarpSize) {
      const Acc share = real ? score[e] * factor : Acc(0);
      sums[e] += share;
      if (rows != nullptr) {
        rows[t * n + e] = share;
      }
    }
  }
  add_warps(shared, 2, n, partials + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * n);
}

// score_sum [sequences, E]. One warp for each expert of a sequence.
template <typename Acc>
__global__ void __launch_bounds__(kSumThreads)
    add_blocks_kernel(const Acc* __restrict__ partials, int num_blocks, int num_experts, Acc* __restrict__ score_sum) {
  const int e = static_cast<int>(blockIdx.x) * kSumWarps + warp_id();
  if (e >= num_experts) {
    return;
  }
  const Acc* const of_expert = partials + int64_t{blockIdx.y} * num_blocks * num_experts + e;
  double sum = 0;
  for (int block = lane_id(); block < num_blocks; block += kWarpSize) {
    sum += of_expert[int64_t{block} * num_experts];
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) {
    score_sum[int64_t{blockIdx.y} * num_experts + e] = static_cast<Acc>(sum);
  }
}

template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    scores_backward_kernel(ScoreGradArgs<T> args, int64_t length) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(Acc, shared);
  const int n = static_cast<int>(args.scores.num_experts);
  Acc* const score = shared + warp_id() * 2 * n;
  Acc* const g = score + n;
  const Acc* const of_sum = args.grad_score_sum != nullptr ? args.grad_score_sum + int64_t{blockIdx.y} * n : nullptr;
  const WarpTokens tokens = warp_tokens(length);
  for (int64_t t = tokens.first; t < tokens.end; t += tokens.stride) {
    const bool real = is_real(args.scores, t);
    const Acc factor =
        real ? row_scores<T, kCheck>(args.scores.logits + t * n, n, args.scores.score_fn, score) : Acc(0);
    Acc mean = 0;
    for (int e = lane_id(); real && e < n; e += kWarpSize) {
      g[e] = of_sum != nullptr ? of_sum[e] : Acc(0);
      if (args.grad_weights != nullptr && args.idx[t * n + e] >= 0) {
        g[e] += args.grad_weights[t * n + e];
      }
      mean += score[e] * g[e];
    }
    mean = warp_sum(mean) * factor;
    for (int e = lane_id(); e < n; e += kWarpSize) {
      const Acc slope = real ? gating::score_slope(args.scores.score_fn, score[e]) : Acc(1);
      args.grad[t * n + e] = static_cast<T>(real ? score[e] * factor * slope * (g[e] - mean) : Acc(0));
    }
  }
}

// counts [sequences, E] of the choices of real tokens, zeros at first. Whole numbers, so that the order of atomics does
// not matter.
template <bool kCheck>
__global__ void count_choices_kernel(
    const int64_t* __restrict__ idx, const bool* __restrict__ token_mask, int64_t length, int top_k, int num_experts,
    unsigned long long* __restrict__ counts) {
  const int64_t slots = length * top_k, begin = int64_t{blockIdx.y} * slots;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < slots; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t e = idx[begin + i];
    if constexpr (kCheck) {
      if (e < -1 || e >= num_experts) {
        __trap();
      }
    }
    if (e >= 0 && e < num_experts && (token_mask == nullptr || token_mask[(begin + i) / top_k])) {
      atomicAdd(&counts[int64_t{blockIdx.y} * num_experts + e], 1ull);
    }
  }
}

// The limit of an expert's choice: it takes scores above `score`, and equal scores of tokens up to `last_tie`.
template <typename Acc>
struct Cut {
  Acc score;
  int64_t last_tie;
};

// Key with the order of the scores, which are not negative. 0 stands for a masked token.
__device__ __forceinline__ uint32_t score_key(float score) {
  return __float_as_uint(score) + 1;
}

__device__ __forceinline__ uint64_t score_key(double score) {
  return static_cast<uint64_t>(__double_as_longlong(score)) + 1;
}

__device__ __forceinline__ int64_t count_real_tokens(const bool* token_mask, int64_t num_tokens) {
  if (token_mask == nullptr) {
    return num_tokens;
  }
  int64_t count = 0, total = 0;
  for (int64_t t = threadIdx.x; t < num_tokens; t += kSelectThreads) {
    count += token_mask[t];
  }
  block_exclusive_scan<kSelectThreads>(count, total);
  return total;
}

// The token of the `ties`-th key that equals `cut`, in the order of tokens.
template <typename Key, typename F>
__device__ int64_t find_last_tie(F&& key, Key cut, int64_t num_tokens, int64_t ties) {
  MOE_SHARED(int64_t, last, 1);
  int64_t before = 0;
  for (int64_t base = 0; before < ties; base += kSelectThreads) {
    const int64_t t = base + threadIdx.x;
    const bool equal = t < num_tokens && key(t) == cut;
    int total = 0;
    const int64_t rank = before + block_exclusive_scan<kSelectThreads>(int{equal}, total);
    if (equal && rank == ties - 1) {
      last[0] = t;
    }
    before += total;
  }
  __syncthreads();
  return last[0];
}

template <typename Acc>
using ScoreKey = decltype(score_key(Acc()));

__device__ __forceinline__ float score_of_key(uint32_t key) {
  return __uint_as_float(key - 1);
}

__device__ __forceinline__ double score_of_key(uint64_t key) {
  return __longlong_as_double(static_cast<long long>(key - 1));
}

// Scratch memory of a choice, aligned to 16 bytes.
template <typename Acc>
struct ChoiceScratch {
  static constexpr int kDigits = sizeof(Acc);

  Cut<Acc>* cuts;      // [E]
  ScoreKey<Acc>* keys; // [E, T]
  int* histograms;     // [digits, E, 256]: number of keys with each value of a digit; the top digit is first

  ChoiceScratch(void* memory, int64_t num_tokens, int64_t num_experts)
      : cuts(static_cast<Cut<Acc>*>(memory)),
        keys(reinterpret_cast<ScoreKey<Acc>*>(cuts + num_experts)),
        histograms(reinterpret_cast<int*>(keys + num_tokens * num_experts)) {
  }
  static int64_t bytes(int64_t num_tokens, int64_t num_experts) {
    const int64_t of_expert = sizeof(Cut<Acc>) + num_tokens * sizeof(Acc) + kDigits * kSelectThreads * sizeof(int);
    return num_experts * of_expert;
  }
};

// Writes the keys of the scores [T, E] through tiles of shared memory, and clears histograms. Grid: tiles of tokens,
// tiles of experts.
template <typename Acc>
__global__ void __launch_bounds__(kSelectThreads) transpose_scores_kernel(
    const Acc* __restrict__ scores, const bool* __restrict__ token_mask, int64_t num_tokens, int num_experts,
    ChoiceScratch<Acc> scratch) {
  constexpr int kSide = kWarpSize, kStep = kSelectThreads / kSide;
  MOE_SHARED(ScoreKey<Acc>, tile, kSide * (kSide + 1));
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x, num_blocks = int64_t{gridDim.x} * gridDim.y;
  const int64_t size = int64_t{ChoiceScratch<Acc>::kDigits} * num_experts * kSelectThreads;
  for (int64_t i = block * kSelectThreads + threadIdx.x; i < size; i += num_blocks * kSelectThreads) {
    scratch.histograms[i] = 0;
  }
  const int64_t first_token = int64_t{blockIdx.x} * kSide;
  const int first_expert = static_cast<int>(blockIdx.y) * kSide;
  for (int i = warp_id(); i < kSide; i += kStep) {
    const int64_t t = first_token + i;
    const int e = first_expert + lane_id();
    if (t < num_tokens && e < num_experts) {
      const bool is_there = token_mask == nullptr || token_mask[t];
      tile[i * (kSide + 1) + lane_id()] = is_there ? score_key(scores[t * num_experts + e]) : 0;
    }
  }
  __syncthreads();
  for (int i = warp_id(); i < kSide; i += kStep) {
    const int64_t t = first_token + lane_id();
    const int e = first_expert + i;
    if (t < num_tokens && e < num_experts) {
      scratch.keys[e * num_tokens + t] = tile[lane_id() * (kSide + 1) + i];
    }
  }
}

// The first `num_digits` digits of the last key that is taken. All threads of a block must construct it.
template <typename Key>
struct FoundKey {
  Key prefix = 0, mask = 0;
  int64_t wanted;       // place of the key among the keys with this prefix
  int64_t num_keys = 0; // with this prefix

  __device__ FoundKey(const int* histograms, int num_digits, int64_t expert, int64_t num_experts, int64_t first_wanted)
      : wanted(first_wanted) {
    for (int d = 0; d < num_digits; ++d) {
      const int* const of_expert = histograms + (d * num_experts + expert) * kSelectThreads;
      const SelectedDigit digit = select_digit(of_expert[kSelectThreads - 1 - threadIdx.x], wanted);
      const int shift = 8 * (static_cast<int>(sizeof(Key)) - 1 - d);
      prefix |= static_cast<Key>(digit.value) << shift;
      mask |= static_cast<Key>(255) << shift;
      num_keys = digit.num_keys;
    }
  }
};

// Adds to the histogram of a digit. Grid: parts of the tokens, experts.
template <typename Acc>
__global__ void __launch_bounds__(kSelectThreads, kMinBlocks)
    count_digit_kernel(int digit, int64_t num_tokens, int64_t wanted, ChoiceScratch<Acc> scratch) {
  using Key = ScoreKey<Acc>;
  MOE_SHARED(int, histogram, kSelectThreads);
  const int64_t n = gridDim.y, expert = blockIdx.y;
  const FoundKey<Key> found(scratch.histograms, digit, expert, n, wanted);
  histogram[threadIdx.x] = 0;
  __syncthreads();
  const int shift = 8 * (static_cast<int>(sizeof(Key)) - 1 - digit);
  const Key* const keys = scratch.keys + expert * num_tokens;
  for (int64_t base = int64_t{blockIdx.x} * kSelectThreads; base < num_tokens;
       base += int64_t{gridDim.x} * kSelectThreads) {
    const int64_t t = base + threadIdx.x;
    const Key key = t < num_tokens ? keys[t] : Key(0);
    const bool counts = t < num_tokens && (key & found.mask) == found.prefix;
    const int value = counts ? static_cast<int>(key >> shift & 255) : -1;
    // Scores share their top digits, so that a warp adds only once for each distinct value.
    const unsigned peers = __match_any_sync(kFullMask, value);
    if (counts && (peers & lanes_below()) == 0) {
      atomicAdd(&histogram[value], __popc(peers));
    }
  }
  __syncthreads();
  if (histogram[threadIdx.x] != 0) {
    atomicAdd(&scratch.histograms[(digit * n + expert) * kSelectThreads + threadIdx.x], histogram[threadIdx.x]);
  }
}

// One block for each expert. Masked tokens have the key 0, which is the last key taken if there are too few real
// tokens.
template <typename Acc>
__global__ void __launch_bounds__(kSelectThreads, kMinBlocks)
    find_cuts_kernel(int64_t num_tokens, int64_t wanted, ChoiceScratch<Acc> scratch, int64_t* __restrict__ counts) {
  using Key = ScoreKey<Acc>;
  const int64_t expert = blockIdx.x;
  Cut<Acc> cut = {Acc(-1), -1};
  int64_t num_taken = 0;
  if (wanted > 0) {
    const FoundKey<Key> last(scratch.histograms, ChoiceScratch<Acc>::kDigits, expert, gridDim.x, wanted);
    num_taken = last.prefix == 0 ? wanted - last.wanted : wanted;
    if (last.prefix != 0) {
      const Key* const keys = scratch.keys + expert * num_tokens;
      cut.score = score_of_key(last.prefix);
      cut.last_tie = last.wanted == last.num_keys
                         ? num_tokens
                         : find_last_tie([&](int64_t t) { return keys[t]; }, last.prefix, num_tokens, last.wanted);
    }
  }
  if (threadIdx.x == 0) {
    scratch.cuts[expert] = cut;
    counts[expert] = num_taken;
  }
}

// Replaces the scores [T, E] by weights: 0 if the expert does not take the token.
template <typename Acc>
__global__ void apply_cuts_kernel(
    const Cut<Acc>* __restrict__ cuts, const bool* __restrict__ token_mask, int64_t num_tokens, int num_experts,
    Acc* __restrict__ scores, int64_t* __restrict__ idx) {
  const int64_t total = num_tokens * num_experts;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t t = i / num_experts;
    const int e = static_cast<int>(i - t * num_experts);
    const Acc score = scores[i];
    const Cut<Acc> cut = cuts[e];
    const bool above = score > cut.score || (score == cut.score && t <= cut.last_tie);
    const bool taken = above && (token_mask == nullptr || token_mask[t]);
    scores[i] = taken ? score : Acc(0);
    idx[i] = taken ? e : -1;
  }
}

// State of a Sinkhorn iteration between its kernels.
template <typename Acc>
struct SinkhornState {
  Acc* scale;    // [E]
  Acc* partials; // [blocks, E]
  int* done;
};

template <typename Acc>
__global__ void sinkhorn_start_kernel(SinkhornState<Acc> state, int num_experts) {
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += static_cast<int>(blockDim.x)) {
    state.scale[e] = 1;
  }
  if (threadIdx.x == 0) {
    *state.done = 0;
  }
}

// partials[block][e] = sum over the block's tokens of cost[t][e] / <scale, cost[t]>
template <typename T, bool kCheck>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks)
    sinkhorn_tokens_kernel(ScoreArgs<T> args, int64_t num_tokens, SinkhornState<acc_t<T>> state) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(Acc, shared);
  if (*state.done != 0) {
    return;
  }
  const int n = static_cast<int>(args.num_experts);
  Acc* const sums = shared + warp_id() * 2 * n;
  Acc* const cost = sums + n;
  for (int e = lane_id(); e < n; e += kWarpSize) {
    sums[e] = 0;
  }
  const WarpTokens tokens = warp_tokens(num_tokens);
  for (int64_t t = tokens.first; t < tokens.end; t += tokens.stride) {
    if (!is_real(args, t)) {
      continue;
    }
    row_scores<T, kCheck>(args.logits + t * n, n, gating::ScoreFn::kSoftmax, cost);
    Acc dot = 0;
    for (int e = lane_id(); e < n; e += kWarpSize) {
      dot += state.scale[e] * cost[e];
    }
    const Acc factor = Acc(1) / warp_sum(dot);
    for (int e = lane_id(); e < n; e += kWarpSize) {
      sums[e] += factor * cost[e];
    }
  }
  add_warps(shared, 2, n, state.partials + int64_t{blockIdx.x} * n);
}

// Computes new factors. One block of kSumThreads.
template <typename Acc>
__global__ void sinkhorn_experts_kernel(
    const bool* __restrict__ token_mask, int64_t num_tokens, SinkhornState<Acc> state, int num_blocks, int num_experts,
    double tolerance) {
  if (*state.done != 0) {
    return;
  }
  const int64_t num_real = count_real_tokens(token_mask, num_tokens);
  double change = 0;
  for (int e = static_cast<int>(threadIdx.x); num_real > 0 && e < num_experts; e += kSumThreads) {
    double sum = 0;
    for (int block = 0; block < num_blocks; ++block) {
      sum += state.partials[int64_t{block} * num_experts + e];
    }
    const double mean = sum / static_cast<double>(num_real);
    const Acc next = static_cast<Acc>(1 / (num_experts * (mean + kSinkhornEps)));
    const double difference = static_cast<double>(next) - static_cast<double>(state.scale[e]);
    change += difference < 0 ? -difference : difference;
    state.scale[e] = next;
  }
  double total = 0;
  block_exclusive_scan<kSumThreads>(change, total);
  if (threadIdx.x == 0 && !(total / num_experts > tolerance)) {
    *state.done = 1;
  }
}

template <typename Acc>
__global__ void log_kernel(const Acc* __restrict__ in, int n, Acc* __restrict__ out) {
  for (int e = static_cast<int>(threadIdx.x); e < n; e += static_cast<int>(blockDim.x)) {
    if constexpr (sizeof(Acc) == 8) {
      out[e] = ::log(in[e]);
    } else {
      out[e] = ::logf(in[e]);
    }
  }
}

inline Dim3 grid_for(int64_t items) {
  return persistent_grid(ceil_div(items, int64_t{kSumThreads}), kSumThreads, device_properties());
}

// Computes score_sum [sequences, E] and, unless null, rows [T, E]. partials [sequences, plan.num_blocks, E] is scratch
// memory.
template <bool kCheck, typename T>
void launch_scores(
    const ScoreArgs<T>& args, int64_t num_sequences, int64_t length, const RowPlan& plan, acc_t<T>* rows,
    acc_t<T>* partials, acc_t<T>* score_sum, cudaStream_t stream) {
  if (num_sequences == 0) {
    return;
  }
  launch(plan.launch_on(num_sequences, stream), scores_kernel<T, kCheck>, args, length, rows, partials);
  const Dim3 grid(ceil_div(args.num_experts, kSumWarps), num_sequences);
  launch(
      {grid, Dim3(kSumThreads), 0, stream}, add_blocks_kernel<acc_t<T>>, partials, static_cast<int>(plan.num_blocks),
      static_cast<int>(args.num_experts), score_sum);
}

template <bool kCheck, typename T>
void launch_scores_backward(
    const ScoreGradArgs<T>& args, int64_t num_sequences, int64_t length, const RowPlan& plan, cudaStream_t stream) {
  if (length > 0) {
    launch(plan.launch_on(num_sequences, stream), scores_backward_kernel<T, kCheck>, args, length);
  }
}

// counts [sequences, E] must be zero.
template <bool kCheck>
void launch_count_choices(
    const int64_t* idx, const bool* token_mask, int64_t num_sequences, int64_t length, int top_k, int num_experts,
    int64_t* counts, cudaStream_t stream) {
  if (length * top_k > 0) {
    const Dim3 grid(grid_for(length * top_k).x, num_sequences);
    launch(
        {grid, Dim3(kSumThreads), 0, stream}, count_choices_kernel<kCheck>, idx, token_mask, length, top_k, num_experts,
        reinterpret_cast<unsigned long long*>(counts));
  }
}

// weights [T, E] must hold the scores.
template <typename Acc>
void launch_expert_choice(
    const bool* token_mask, int64_t num_tokens, int num_experts, int64_t capacity, const ChoiceScratch<Acc>& scratch,
    Acc* weights, int64_t* idx, int64_t* counts, cudaStream_t stream) {
  constexpr int64_t kTokensPerBlock = 4096; // of a block that counts; few enough that blocks fill the device
  const int64_t wanted = std::min(capacity, num_tokens);
  const Dim3 threads(kSelectThreads);
  if (num_tokens > 0) {
    const Dim3 tiles(ceil_div(num_tokens, int64_t{kWarpSize}), ceil_div(num_experts, kWarpSize));
    launch(
        {tiles, threads, 0, stream}, transpose_scores_kernel<Acc>, weights, token_mask, num_tokens, num_experts,
        scratch);
    const Dim3 parts(ceil_div(num_tokens, kTokensPerBlock), num_experts);
    for (int digit = 0; digit < ChoiceScratch<Acc>::kDigits; ++digit) {
      launch({parts, threads, 0, stream}, count_digit_kernel<Acc>, digit, num_tokens, wanted, scratch);
    }
  }
  launch({Dim3(num_experts), threads, 0, stream}, find_cuts_kernel<Acc>, num_tokens, wanted, scratch, counts);
  if (num_tokens > 0) {
    launch(
        {grid_for(num_tokens * num_experts), Dim3(kSumThreads), 0, stream}, apply_cuts_kernel<Acc>, scratch.cuts,
        token_mask, num_tokens, num_experts, weights, idx);
  }
}

// out [E]: logarithms of the experts' factors.
template <bool kCheck, typename T>
void launch_sinkhorn_scale(
    const ScoreArgs<T>& args, int64_t num_tokens, int64_t num_iters, double tolerance, const RowPlan& plan,
    const SinkhornState<acc_t<T>>& state, acc_t<T>* out, cudaStream_t stream) {
  using Acc = acc_t<T>;
  const int n = static_cast<int>(args.num_experts);
  const Launch one_block = {Dim3(1), Dim3(kSumThreads), 0, stream};
  launch(one_block, sinkhorn_start_kernel<Acc>, state, n);
  for (int64_t i = 0; i < num_iters; ++i) {
    launch(plan.launch_on(1, stream), sinkhorn_tokens_kernel<T, kCheck>, args, num_tokens, state);
    launch(
        one_block, sinkhorn_experts_kernel<Acc>, args.token_mask, num_tokens, state, static_cast<int>(plan.num_blocks),
        n, tolerance);
  }
  launch(one_block, log_kernel<Acc>, state.scale, n, out);
}

} // namespace moe_ext::assignment
