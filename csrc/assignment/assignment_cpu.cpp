// CPU side of the assignments. Tokens are cut into blocks of a fixed size. Each block has its own sum, and the sums of
// blocks are added in order, so that bits do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "assignment/assignment.h"
#include "assignment/assignment_tables.h"
#include "assignment/auction.h"
#include "assignment/auction_cpu.h"
#include "common/cpu_isa.h"
#include "common/dispatch.h"

namespace moe_ext::assignment {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;

constexpr int64_t kTokensPerBlock = 256;
constexpr double kSinkhornEps = 1e-8; // as in the sums over tokens of Megatron-LM

void keep_smaller(std::atomic<int64_t>& smallest, int64_t value) {
  int64_t seen = smallest.load();
  while (value < seen && !smallest.compare_exchange_weak(seen, value)) {
  }
}

int64_t ceil_blocks(int64_t num_tokens) {
  return (num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
}

// Call f(block, begin, end) for each block of tokens. f returns the token that it refuses, or -1. Returns the first
// refused token, or -1.
template <typename F>
int64_t each_block(int64_t num_tokens, F&& f) {
  std::atomic<int64_t> first{num_tokens};
  parallel_for(0, ceil_blocks(num_tokens), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t token = f(block, block * kTokensPerBlock, std::min(num_tokens, (block + 1) * kTokensPerBlock));
      keep_smaller(first, token < 0 ? num_tokens : token);
    }
  });
  return first.load() == num_tokens ? -1 : first.load();
}

// Throw an error that says why the row of a token was refused.
template <typename T>
[[noreturn]] void refuse(const char* op, const T* logits, int64_t num_experts, int64_t token) {
  const T* row = logits + token * num_experts;
  for (int64_t e = 0; e < num_experts; ++e) {
    const auto logit = to_acc(row[e]);
    MOE_CHECK(
        logit < std::numeric_limits<acc_t<T>>::infinity(), op, ": expected logits to be free of NaN and +inf, got ",
        std::isnan(logit) ? "nan" : "inf", " at token ", token, ", expert ", e);
  }
  fail(op, ": expected logits to leave an expert above -inf, got none at token ", token);
}

int64_t count_real(const std::optional<Tensor>& mask, int64_t num_tokens) {
  return mask ? std::count(data<bool>(*mask), data<bool>(*mask) + num_tokens, true) : num_tokens;
}

// sums [E] = the sums of blocks [first_block, end_block), added in order.
template <typename Acc>
void add_blocks(const std::vector<Acc>& partials, int64_t first_block, int64_t end_block, int64_t n, Acc* sums) {
  for (int64_t e = 0; e < n; ++e) {
    double sum = 0;
    for (int64_t block = first_block; block < end_block; ++block) {
      sum += partials[block * n + e];
    }
    sums[e] = static_cast<Acc>(sum);
  }
}

// Unsigned integer with the order of the scores, which are not negative. 0 stands for a masked token.
template <typename Acc>
using key_t = std::conditional_t<sizeof(Acc) == 8, uint64_t, uint32_t>;

// The lower limit of an expert's choice: it takes larger scores, and equal scores of tokens up to `last_tie`.
template <typename Acc>
struct Cut {
  Acc score;
  int64_t last_tie;
};

template <typename Acc>
Cut<Acc> find_cut(const key_t<Acc>* keys, int64_t num_tokens, int64_t wanted) {
  using Key = key_t<Acc>;
  // Keys of scores in [0, 1] have at most 11 bits above the shift.
  constexpr int kShift = sizeof(Acc) == 8 ? 52 : 20;
  std::vector<int32_t> histogram(2048, 0);
  for (int64_t t = 0; t < num_tokens; ++t) {
    ++histogram[keys[t] >> kShift];
  }
  int64_t digit = 2047, above = 0;
  for (; above + histogram[digit] < wanted; --digit) {
    above += histogram[digit];
  }
  std::vector<Key> candidates;
  candidates.reserve(histogram[digit]);
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (static_cast<int64_t>(keys[t] >> kShift) == digit) {
      candidates.push_back(keys[t]);
    }
  }
  const auto place = candidates.begin() + (wanted - above - 1);
  std::nth_element(candidates.begin(), place, candidates.end(), std::greater<>());
  const Key cut = *place;
  int64_t ties = wanted - above - std::count_if(candidates.begin(), candidates.end(), [&](Key k) { return k > cut; });
  int64_t token = -1;
  while (ties > 0) {
    ties -= keys[++token] == cut;
  }
  return {bit_cast<Acc>(static_cast<Key>(cut - 1)), token};
}

// Write keys [E, T] from the scores [T, E] of a block of tokens.
template <typename Acc>
void write_keys(
    const Acc* scores, const bool* mask, int64_t begin, int64_t end, int64_t num_tokens, int64_t n, key_t<Acc>* keys) {
  for (int64_t e = 0; e < n; ++e) {
    for (int64_t t = begin; t < end; ++t) {
      const key_t<Acc> key = bit_cast<key_t<Acc>>(scores[t * n + e]) + 1;
      keys[e * num_tokens + t] = mask == nullptr || mask[t] ? key : 0;
    }
  }
}

// Replace the scores [T, E] by weights: 0 if the expert does not take the token.
template <typename Acc>
void apply_cuts(
    const std::vector<Cut<Acc>>& cuts, const bool* mask, int64_t begin, int64_t end, Acc* scores, int64_t* idx) {
  const int64_t n = static_cast<int64_t>(cuts.size());
  for (int64_t t = begin; t < end; ++t) {
    const bool real = mask == nullptr || mask[t];
    Acc* row = scores + t * n;
    for (int64_t e = 0; e < n; ++e) {
      const bool taken = real && (row[e] > cuts[e].score || (row[e] == cuts[e].score && t <= cuts[e].last_tie));
      row[e] = taken ? row[e] : Acc(0);
      idx[t * n + e] = taken ? e : -1;
    }
  }
}

template <typename T>
void expert_choice(
    const ScoreArgs<T>& args, int64_t num_tokens, int64_t taken, acc_t<T>* weights, int64_t* idx, acc_t<T>* score_sum) {
  using Acc = acc_t<T>;
  const int64_t n = args.num_experts;
  std::vector<Acc> partials(ceil_blocks(num_tokens) * n, Acc(0));
  const auto keys = std::make_unique_for_overwrite<key_t<Acc>[]>(num_tokens * n);
  const int64_t refused = each_block(num_tokens, [&](int64_t block, int64_t begin, int64_t end) {
    const int64_t token = kernels().of<T>().scores(args, begin, end, weights, partials.data() + block * n, nullptr);
    write_keys(weights, args.token_mask, begin, end, num_tokens, n, keys.get());
    return token;
  });
  if (refused >= 0) {
    refuse("expert_choice_gate", args.logits, n, refused);
  }
  add_blocks(partials, 0, ceil_blocks(num_tokens), n, score_sum);
  std::vector<Cut<Acc>> cuts(n, {std::numeric_limits<Acc>::infinity(), -1});
  parallel_for(0, taken > 0 ? n : 0, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      cuts[e] = find_cut<Acc>(keys.get() + e * num_tokens, num_tokens, taken);
    }
  });
  each_block(num_tokens, [&](int64_t, int64_t begin, int64_t end) {
    apply_cuts(cuts, args.token_mask, begin, end, weights, idx);
    return -1;
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_choice_gate_cpu(
    Tensor logits, // [T, E]
    int64_t capacity,
    std::optional<Tensor> token_mask) { // [T]
  check_expert_choice_gate(logits, capacity, token_mask);
  const Tensor x = contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_tokens = x.size(0), n = x.size(1);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor weights = new_empty(x, {num_tokens, n}, acc);
  const Tensor idx = new_empty(x, {num_tokens, n}, ScalarType::Long);
  const Tensor counts = new_empty(x, {n}, ScalarType::Long);
  const Tensor score_sum = new_empty(x, {n}, acc);
  const int64_t taken = std::min(capacity, count_real(mask, num_tokens));
  std::fill_n(data<int64_t>(counts), n, taken);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    const ScoreArgs<T> args{data<T>(x), data_or_null<bool>(mask), n, gating::ScoreFn::kSoftmax};
    expert_choice(args, num_tokens, taken, data<acc_t<T>>(weights), data<int64_t>(idx), data<acc_t<T>>(score_sum));
  });
  return {weights, idx, counts, score_sum};
}

template <typename T>
void run_backward(const ScoreGradArgs<T>& args, int64_t first_token, int64_t num_tokens) {
  parallel_for(0, ceil_blocks(num_tokens), 1, [&](int64_t begin, int64_t end) {
    std::vector<acc_t<T>> scratch(2 * args.scores.num_experts);
    kernels().of<T>().scores_backward(
        args, first_token + begin * kTokensPerBlock, first_token + std::min(num_tokens, end * kTokensPerBlock),
        scratch.data());
  });
}

Tensor expert_choice_gate_backward_cpu(
    std::optional<Tensor> grad_weights,   // [T, E]
    std::optional<Tensor> grad_score_sum, // [E]
    Tensor logits,                        // [T, E]
    Tensor topk_idx,                      // [T, E]
    std::optional<Tensor> token_mask) {   // [T]
  check_expert_choice_gate_backward(grad_weights, grad_score_sum, logits, topk_idx, token_mask);
  const Tensor x = contiguous(logits), index = contiguous(topk_idx);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const std::optional<Tensor> dw = optional_contiguous(grad_weights), ds = optional_contiguous(grad_score_sum);
  const Tensor grad = new_empty(x, {x.size(0), x.size(1)});
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    const ScoreGradArgs<T> args{
        {data<T>(x), data_or_null<bool>(mask), x.size(1), gating::ScoreFn::kSoftmax},
        data_or_null<acc_t<T>>(ds),
        data_or_null<acc_t<T>>(dw),
        data<int64_t>(index),
        data<T>(grad)};
    run_backward(args, 0, x.size(0));
  });
  return grad;
}

// Run one round: compute a new scale [E] from the sums over tokens. Returns the mean change.
template <typename Acc>
double sinkhorn_round(
    const ScoreKernels<Acc>& table, const SinkhornArgs<Acc>& args, int64_t num_tokens, std::vector<Acc>& partials,
    Acc* scale) {
  const int64_t n = args.num_experts;
  std::fill(partials.begin(), partials.end(), Acc(0));
  each_block(num_tokens, [&](int64_t block, int64_t begin, int64_t end) {
    table.sinkhorn(args, begin, end, partials.data() + block * n);
    return -1;
  });
  std::vector<Acc> sums(n);
  add_blocks(partials, 0, ceil_blocks(num_tokens), n, sums.data());
  double change = 0;
  for (int64_t e = 0; e < n; ++e) {
    const Acc next = static_cast<Acc>(1 / (static_cast<double>(n) * (sums[e] + kSinkhornEps)));
    change += std::abs(static_cast<double>(next) - static_cast<double>(scale[e]));
    scale[e] = next;
  }
  return change / static_cast<double>(n);
}

Tensor sinkhorn_scale_cpu(
    Tensor logits, // [T, E]
    int64_t num_iters, double tolerance,
    std::optional<Tensor> token_mask) { // [T]
  check_sinkhorn_scale(logits, num_iters, tolerance, token_mask);
  const Tensor x = contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_tokens = x.size(0), n = x.size(1);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor out = new_empty(x, {n}, acc);
  const Tensor cost = new_empty(x, {num_tokens, n}, acc);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const ScoreArgs<T> args{data<T>(x), data_or_null<bool>(mask), n, gating::ScoreFn::kSoftmax};
    const int64_t refused = each_block(num_tokens, [&](int64_t, int64_t begin, int64_t end) {
      return kernels().of<T>().cost(args, begin, end, data<Acc>(cost));
    });
    if (refused >= 0) {
      refuse("sinkhorn_gate", args.logits, n, refused);
    }
    const int64_t num_real = count_real(mask, num_tokens);
    std::vector<Acc> scale(n, Acc(1)), partials(ceil_blocks(num_tokens) * n);
    const SinkhornArgs<Acc> rounds{data<Acc>(cost), args.token_mask, scale.data(), n, num_real};
    for (int64_t i = 0; i < (num_real > 0 ? num_iters : 0); ++i) {
      if (!(sinkhorn_round(kernels().of<Acc>(), rounds, num_tokens, partials, scale.data()) > tolerance)) {
        break;
      }
    }
    std::transform(scale.begin(), scale.end(), data<Acc>(out), [](Acc s) { return std::log(s); });
  });
  return out;
}

// Return the range of the scores of real tokens. Throws if a score is not finite.
template <typename T>
ScoreRange score_range(const T* scores, const bool* mask, int64_t num_tokens, int64_t n) {
  const int64_t blocks = ceil_blocks(num_tokens);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<ScoreRange> ranges(blocks, {kInfinity, -kInfinity});
  const int64_t refused = each_block(num_tokens, [&](int64_t block, int64_t begin, int64_t end) -> int64_t {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t e = 0; (mask == nullptr || mask[t]) && e < n; ++e) {
        const double s = to_acc(scores[t * n + e]);
        if (!std::isfinite(s)) {
          return t;
        }
        ranges[block] = {std::min(ranges[block].low, s), std::max(ranges[block].high, s)};
      }
    }
    return -1;
  });
  if (refused >= 0) {
    const T* row = scores + refused * n;
    const T* bad = std::find_if(row, row + n, [](T s) { return !std::isfinite(to_acc(s)); });
    fail(
        "balanced_assignment: expected scores to be finite, got ", to_acc(*bad), " at token ", refused, ", expert ",
        bad - row);
  }
  ScoreRange all{kInfinity, -kInfinity};
  for (const ScoreRange& r : ranges) {
    all = {std::min(all.low, r.low), std::max(all.high, r.high)};
  }
  return all;
}

// Write the values of every class of places: the tokens' scores as whole numbers, once for each kind of class, then
// rows of dummies.
template <typename T>
void write_values(
    const T* scores, int64_t num_tokens, const AuctionShape& shape, const ScoreRange& range, float* values) {
  const int64_t n = shape.num_experts, width = shape.num_classes();
  parallel_for(0, num_tokens, kTokensPerBlock, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = values + t * width;
      for (int64_t e = 0; e < n; ++e) {
        row[e] = quantized_score(to_acc(scores[t * n + e]), range);
      }
      std::copy_n(row, width - n, row + n);
    }
  });
  for (int64_t i = 0; i < shape.num_dummies() * width; ++i) {
    values[num_tokens * width + i] = shape.dummy_value(i % width);
  }
}

Tensor balanced_assignment_cpu(
    Tensor scores,                      // [T, E]
    std::optional<Tensor> token_mask) { // [T]
  check_balanced_assignment(scores, token_mask);
  const Tensor x = contiguous(scores);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_tokens = x.size(0), num_real = count_real(mask, num_tokens);
  const AuctionShape shape(num_real, x.size(1));
  const Tensor out = new_empty(x, {num_tokens}, ScalarType::Long);
  std::fill_n(data<int64_t>(out), num_tokens, int64_t{-1});
  if (num_real == 0) {
    return out;
  }
  std::vector<int64_t> tokens;
  for (int64_t t = 0; t < num_tokens + shape.num_dummies(); ++t) {
    if (t >= num_tokens || !mask || data<bool>(*mask)[t]) {
      tokens.push_back(t);
    }
  }
  const int64_t width = shape.num_classes();
  const auto values = std::make_unique_for_overwrite<float[]>((num_tokens + shape.num_dummies()) * width);
  ScoreRange range{};
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    range = score_range(data<T>(x), data_or_null<bool>(mask), num_tokens, shape.num_experts);
    write_values(data<T>(x), num_tokens, shape, range, values.get());
  });
  const auto choose = [&](int64_t token, const double* prices) {
    return kernels().choose(values.get() + token * width, prices, width);
  };
  run_auction(tokens, num_tokens, shape, first_eps(range), choose, data<int64_t>(out));
  return out;
}

// Add the choices of tokens [begin, end) to counts [E].
void count_choices(const Tensor& topk_idx, const bool* mask, int64_t begin, int64_t end, int64_t n, int64_t* counts) {
  const int64_t top_k = topk_idx.size(1);
  const int64_t* idx = data<int64_t>(topk_idx);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t k = 0; (mask == nullptr || mask[t]) && k < top_k; ++k) {
      const int64_t e = idx[t * top_k + k];
      MOE_CHECK(
          e >= -1 && e < n, "sequence_load: expected topk_idx to be in [0, ", n, ") or -1, got ", e, " at token ", t,
          ", choice ", k);
      if (e >= 0) {
        ++counts[e];
      }
    }
  }
}

std::tuple<Tensor, Tensor> sequence_load_cpu(
    Tensor logits,   // [T, E]
    Tensor topk_idx, // [T, K]
    int64_t num_sequences, std::string score_fn,
    std::optional<Tensor> token_mask) { // [T]
  const gating::ScoreFn fn = check_sequence_load(logits, topk_idx, num_sequences, score_fn, token_mask);
  const Tensor x = contiguous(logits), index = contiguous(topk_idx);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t n = x.size(1), length = x.size(0) / std::max<int64_t>(1, num_sequences);
  const int64_t blocks = ceil_blocks(length);
  const Tensor score_sum = new_empty(x, {num_sequences, n}, acc_dtype(x.scalar_type()));
  const Tensor counts = torch::stable::new_zeros(x, {num_sequences, n}, ScalarType::Long);
  for (int64_t b = 0; b < num_sequences; ++b) {
    count_choices(index, data_or_null<bool>(mask), b * length, (b + 1) * length, n, data<int64_t>(counts) + b * n);
  }
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const ScoreArgs<T> args{data<T>(x), data_or_null<bool>(mask), n, fn};
    std::vector<Acc> partials(num_sequences * blocks * n, Acc(0));
    std::atomic<int64_t> refused{x.size(0)};
    parallel_for(0, num_sequences * blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<Acc> scratch(2 * n);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t start = i / blocks * length, first = i % blocks * kTokensPerBlock;
        const int64_t token = kernels().of<T>().scores(
            args, start + first, start + std::min(length, first + kTokensPerBlock), nullptr, partials.data() + i * n,
            scratch.data());
        keep_smaller(refused, token < 0 ? x.size(0) : token);
      }
    });
    if (refused.load() < x.size(0)) {
      refuse("sequence_load", args.logits, n, refused.load());
    }
    for (int64_t b = 0; b < num_sequences; ++b) {
      add_blocks(partials, b * blocks, (b + 1) * blocks, n, data<Acc>(score_sum) + b * n);
    }
  });
  return {score_sum, counts};
}

Tensor sequence_load_backward_cpu(
    Tensor grad_score_sum, // [B, E]
    Tensor logits,         // [T, E]
    std::string score_fn,
    std::optional<Tensor> token_mask) { // [T]
  const gating::ScoreFn fn = check_sequence_load_backward(grad_score_sum, logits, score_fn, token_mask);
  const Tensor x = contiguous(logits), ds = contiguous(grad_score_sum);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_sequences = ds.size(0), n = x.size(1);
  const int64_t length = x.size(0) / std::max<int64_t>(1, num_sequences);
  const Tensor grad = new_empty(x, {x.size(0), n});
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    parallel_for(0, num_sequences, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const ScoreGradArgs<T> args{
            {data<T>(x), data_or_null<bool>(mask), n, fn}, data<acc_t<T>>(ds) + b * n, nullptr, nullptr, data<T>(grad)};
        run_backward(args, b * length, length);
      }
    });
  });
  return grad;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("expert_choice_gate", TORCH_BOX(&expert_choice_gate_cpu));
  m.impl("_expert_choice_gate_backward", TORCH_BOX(&expert_choice_gate_backward_cpu));
  m.impl("_sinkhorn_scale", TORCH_BOX(&sinkhorn_scale_cpu));
  m.impl("balanced_assignment", TORCH_BOX(&balanced_assignment_cpu));
  m.impl("sequence_load", TORCH_BOX(&sequence_load_cpu));
  m.impl("_sequence_load_backward", TORCH_BOX(&sequence_load_backward_cpu));
}

} // namespace moe_ext::assignment
