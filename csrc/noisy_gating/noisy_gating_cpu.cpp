// Random numbers and noisy gates on CPU. Tokens are cut into blocks of a fixed size. Each block is summed alone, and
// the blocks are added in order, so the bits do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "gating/gating_tables.h"
#include "noisy_gating/noisy_gating.h"

namespace moe_ext::noisy_gating {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::new_empty;
using torch::stable::parallel_for;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kTokensPerBlock = 256;

int64_t num_blocks(int64_t num_tokens) {
  return (num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
}

RngSource rng_source(const OptionalTensor& rng_state, const OptionalTensor& token_idx) {
  return {data_or_null<int64_t>(rng_state), data_or_null<int64_t>(token_idx)};
}

// Calls f(block, begin, end, scratch) for each block of tokens.
template <typename Acc, typename F>
void each_block(int64_t num_tokens, int64_t scratch_size, F&& f) {
  parallel_for(0, num_blocks(num_tokens), 1, [&](int64_t begin, int64_t end) {
    std::vector<Acc> scratch(scratch_size);
    for (int64_t block = begin; block < end; ++block) {
      f(block, block * kTokensPerBlock, std::min(num_tokens, (block + 1) * kTokensPerBlock), scratch.data());
    }
  });
}

int64_t scratch_size(int64_t num_experts, int64_t num_ranked) {
  return gating::scratch_size({num_experts, num_ranked, 1, 1, gating::ScoreFn::kSoftmax, true, 1.0});
}

int64_t scratch_size(const NoisyOptions& options) {
  return 2 * scratch_size(options.num_experts, options.num_ranked());
}

// Computes sums [S][E] and counts [C][E] over the blocks of tokens. f(begin, end, sums, counts, scratch) handles a
// block and returns its first refused token, or -1. Returns the first refused token of all, or num_tokens.
template <typename Acc, typename F>
int64_t sum_over_blocks(
    int64_t num_tokens, int64_t num_experts, int64_t scratch_size, const std::vector<Tensor>& sums,
    const std::vector<Tensor>& counts, F&& f) {
  const int64_t blocks = num_blocks(num_tokens);
  const int64_t num_sums = static_cast<int64_t>(sums.size()) * num_experts;
  const int64_t num_counts = static_cast<int64_t>(counts.size()) * num_experts;
  std::vector<Acc> block_sums(blocks * num_sums);
  std::vector<int64_t> block_counts(blocks * num_counts);
  std::vector<int64_t> refused(blocks);
  each_block<Acc>(num_tokens, scratch_size, [&](int64_t block, int64_t begin, int64_t end, Acc* scratch) {
    refused[block] =
        f(begin, end, block_sums.data() + block * num_sums, block_counts.data() + block * num_counts, scratch);
  });
  const auto first = std::find_if(refused.begin(), refused.end(), [](int64_t token) { return token >= 0; });
  if (first != refused.end()) {
    return *first;
  }
  for (int64_t i = 0; i < num_sums; ++i) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += block_sums[block * num_sums + i];
    }
    data<Acc>(sums[i / num_experts])[i % num_experts] = static_cast<Acc>(sum);
  }
  for (int64_t i = 0; i < num_counts; ++i) {
    int64_t count = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      count += block_counts[block * num_counts + i];
    }
    data<int64_t>(counts[i / num_experts])[i % num_experts] = count;
  }
  return num_tokens;
}

// Raises the error that says why a gate refused a token: a clean logit, a noise logit, or too few eligible experts.
template <typename T>
[[noreturn]] void refuse(
    const char* op, const char* name, const T* logits, const T* noise, int64_t num_experts, int64_t top_k,
    int64_t token) {
  constexpr auto kInfinity = std::numeric_limits<acc_t<T>>::infinity();
  int64_t above = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const auto logit = to_acc(logits[token * num_experts + e]);
    MOE_CHECK(
        logit < kInfinity, op, ": expected ", name, " to be free of NaN and +inf, got ",
        std::isnan(logit) ? "nan" : "inf", " at token ", token, ", expert ", e);
    above += logit > -kInfinity;
  }
  for (int64_t e = 0; noise != nullptr && e < num_experts; ++e) {
    const auto logit = to_acc(noise[token * num_experts + e]);
    MOE_CHECK(
        std::isfinite(logit), op, ": expected noise_logits to be finite, got ", logit, " at token ", token, ", expert ",
        e);
  }
  fail(
      op, ": expected ", name, " to leave at least top_k = ", top_k, " experts to choose from, got token ", token,
      " with ", above, " logits above -inf among ", num_experts, " experts");
}

Tensor routing_uniform_cpu(
    Tensor rng_state, // [4]
    int64_t num_tokens, int64_t num_columns, int64_t stream,
    OptionalTensor token_idx) { // [T]
  check_routing_uniform(rng_state, num_tokens, num_columns, stream, token_idx);
  const Tensor state = torch::stable::contiguous(rng_state);
  const OptionalTensor idx = optional_contiguous(token_idx);
  Tensor out = new_empty(rng_state, {num_tokens, num_columns}, ScalarType::Float);
  const RngSource rng = {data<int64_t>(state), data_or_null<int64_t>(idx)};
  parallel_for(0, num_tokens, grain_size(4 * num_columns), [&](int64_t begin, int64_t end) {
    kernels().uniform(data<float>(out), num_columns, static_cast<Stream>(stream), rng, begin, end);
  });
  return out;
}

Tensor routing_jitter_cpu(
    Tensor x,         // [T, D]
    Tensor rng_state, // [4]
    double eps,
    OptionalTensor token_idx) { // [T]
  check_routing_jitter(x, rng_state, eps, token_idx);
  const Tensor in = torch::stable::contiguous(x), state = torch::stable::contiguous(rng_state);
  const OptionalTensor idx = optional_contiguous(token_idx);
  Tensor out = new_empty(x, {x.size(0), x.size(1)});
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    const JitterArgs<T> args{
        data<T>(out), data<T>(in), x.size(1), eps, {data<int64_t>(state), data_or_null<int64_t>(idx)}};
    parallel_for(0, x.size(0), grain_size(2 * sizeof(T) * x.size(1)), [&](int64_t begin, int64_t end) {
      kernels().of<T>().jitter(args, begin, end);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gshard_gate_cpu(
    Tensor logits,            // [T, E]
    OptionalTensor rng_state, // [4]
    double scale,
    OptionalTensor token_mask,  // [T]
    OptionalTensor token_idx) { // [T]
  check_gshard_gate(logits, rng_state, scale, token_mask, token_idx);
  const ScalarType acc = acc_dtype(logits.scalar_type());
  const int64_t num_tokens = logits.size(0), n = logits.size(1);
  const Tensor x = torch::stable::contiguous(logits);
  const OptionalTensor mask = optional_contiguous(token_mask), state = optional_contiguous(rng_state),
                       token = optional_contiguous(token_idx);
  Tensor weights = new_empty(logits, {num_tokens, 2}, acc);
  Tensor idx = new_empty(logits, {num_tokens, 2}, ScalarType::Long);
  Tensor counts = new_empty(logits, {n}, ScalarType::Long), firsts = new_empty(logits, {n}, ScalarType::Long);
  Tensor score_sum = new_empty(logits, {n}, acc);
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const GShardArgs<T> args{data<T>(x), data_or_null<bool>(mask), data<acc_t<T>>(weights), data<int64_t>(idx), n,
                             scale,      rng_source(state, token)};
    const int64_t refused = sum_over_blocks<acc_t<T>>(
        num_tokens, n, scratch_size(n, 2), {score_sum}, {counts, firsts},
        [&](int64_t begin, int64_t end, acc_t<T>* sums, int64_t* block_counts, acc_t<T>* scratch) {
          return kernels().of<T>().gshard(args, begin, end, sums, block_counts, scratch);
        });
    if (refused < num_tokens) {
      refuse<T>("gshard_gate", "logits", data<T>(x), nullptr, n, 2, refused);
    }
  });
  return {weights, idx, counts, score_sum, firsts};
}

Tensor gshard_gate_backward_cpu(
    OptionalTensor grad_weights,   // [T, 2]
    OptionalTensor grad_score_sum, // [E]
    Tensor logits,                 // [T, E]
    Tensor topk_idx,               // [T, 2]
    double scale) {
  check_gshard_gate_backward(grad_weights, grad_score_sum, logits, topk_idx, scale);
  const Tensor x = torch::stable::contiguous(logits), idx = torch::stable::contiguous(topk_idx);
  const OptionalTensor dw = optional_contiguous(grad_weights), ds = optional_contiguous(grad_score_sum);
  const int64_t n = logits.size(1);
  Tensor grad = new_empty(logits, {logits.size(0), n});
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const GShardGradArgs<T> args{
        data<T>(grad), data<T>(x), data<int64_t>(idx), data_or_null<acc_t<T>>(dw), data_or_null<acc_t<T>>(ds), n,
        scale};
    each_block<acc_t<T>>(
        logits.size(0), scratch_size(n, 2), [&](int64_t, int64_t begin, int64_t end, acc_t<T>* scratch) {
          kernels().of<T>().gshard_backward(args, begin, end, scratch);
        });
  });
  return grad;
}

// Without noise, the load of an expert is the number of times that it was chosen.
template <typename Acc>
void count_as_load(const Tensor& counts, const Tensor& load) {
  for (int64_t e = 0; e < load.size(0); ++e) {
    data<Acc>(load)[e] = static_cast<Acc>(data<int64_t>(counts)[e]);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gate_cpu(
    Tensor clean_logits,         // [T, E]
    OptionalTensor noise_logits, // [T, E]
    OptionalTensor rng_state,    // [4]
    int64_t top_k, double noise_epsilon, double scale,
    OptionalTensor token_mask,  // [T]
    OptionalTensor token_idx) { // [T]
  const char* op = "noisy_topk_gate";
  const NoisyOptions options =
      check_noisy_topk_gate(clean_logits, noise_logits, rng_state, top_k, noise_epsilon, scale, token_mask, token_idx);
  const ScalarType acc = acc_dtype(clean_logits.scalar_type());
  const int64_t num_tokens = clean_logits.size(0), n = options.num_experts;
  const Tensor x = torch::stable::contiguous(clean_logits);
  const OptionalTensor noise = optional_contiguous(noise_logits), mask = optional_contiguous(token_mask);
  const OptionalTensor state = optional_contiguous(rng_state), token = optional_contiguous(token_idx);
  Tensor weights = new_empty(x, {num_tokens, top_k}, acc);
  Tensor idx = new_empty(x, {num_tokens, top_k}, ScalarType::Long);
  Tensor counts = new_empty(x, {n}, ScalarType::Long);
  Tensor importance = new_empty(x, {n}, acc), load = new_empty(x, {n}, acc);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    const NoisyArgs<T> args{
        data<T>(x), data_or_null<T>(noise),  data_or_null<bool>(mask), data<acc_t<T>>(weights), data<int64_t>(idx),
        options,    rng_source(state, token)};
    const int64_t refused = sum_over_blocks<acc_t<T>>(
        num_tokens, n, scratch_size(options), {importance, load}, {counts},
        [&](int64_t begin, int64_t end, acc_t<T>* sums, int64_t* block_counts, acc_t<T>* scratch) {
          return kernels().of<T>().noisy(args, begin, end, sums, block_counts, scratch);
        });
    if (refused < num_tokens) {
      refuse<T>(op, "clean_logits", data<T>(x), args.noise, n, top_k, refused);
    }
    if (!noise) {
      count_as_load<acc_t<T>>(counts, load);
    }
  });
  return {weights, idx, counts, importance, load};
}

std::tuple<Tensor, Tensor> noisy_topk_gate_backward_cpu(
    OptionalTensor grad_weights,    // [T, K]
    OptionalTensor grad_importance, // [E]
    OptionalTensor grad_load,       // [E]
    Tensor clean_logits,            // [T, E]
    OptionalTensor noise_logits,    // [T, E]
    OptionalTensor rng_state,       // [4]
    Tensor topk_idx,                // [T, K]
    double noise_epsilon, double scale,
    OptionalTensor token_idx) { // [T]
  const NoisyOptions options = check_noisy_topk_gate_backward(
      grad_weights, grad_importance, grad_load, clean_logits, noise_logits, rng_state, topk_idx, noise_epsilon, scale,
      token_idx);
  const int64_t num_tokens = clean_logits.size(0), n = options.num_experts;
  const Tensor x = torch::stable::contiguous(clean_logits), idx = torch::stable::contiguous(topk_idx);
  const OptionalTensor noise = optional_contiguous(noise_logits), dw = optional_contiguous(grad_weights);
  const OptionalTensor di = optional_contiguous(grad_importance), dl = optional_contiguous(grad_load);
  const OptionalTensor state = optional_contiguous(rng_state), token = optional_contiguous(token_idx);
  Tensor grad_clean = new_empty(x, {num_tokens, n});
  Tensor grad_noise = new_empty(x, {noise ? num_tokens : 0, n});
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    const NoisyGradArgs<T> args{
        data<T>(grad_clean),
        noise ? data<T>(grad_noise) : nullptr,
        data<T>(x),
        data_or_null<T>(noise),
        data<int64_t>(idx),
        data_or_null<acc_t<T>>(dw),
        data_or_null<acc_t<T>>(di),
        data_or_null<acc_t<T>>(dl),
        options,
        rng_source(state, token)};
    each_block<acc_t<T>>(
        num_tokens, scratch_size(options), [&](int64_t, int64_t begin, int64_t end, acc_t<T>* scratch) {
          kernels().of<T>().noisy_backward(args, begin, end, scratch);
        });
  });
  return {grad_clean, grad_noise};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("routing_uniform", TORCH_BOX(&routing_uniform_cpu));
  m.impl("routing_jitter", TORCH_BOX(&routing_jitter_cpu));
  m.impl("gshard_gate", TORCH_BOX(&gshard_gate_cpu));
  m.impl("_gshard_gate_backward", TORCH_BOX(&gshard_gate_backward_cpu));
  m.impl("noisy_topk_gate", TORCH_BOX(&noisy_topk_gate_cpu));
  m.impl("_noisy_topk_gate_backward", TORCH_BOX(&noisy_topk_gate_backward_cpu));
}

} // namespace moe_ext::noisy_gating
