// The gate and the router losses on CPU. Tokens are cut into blocks of a fixed size. Each block sums its scores and
// counts alone, and the blocks are added in order, so the bits do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "gating/gating.h"

namespace moe_ext::gating {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::parallel_for;

constexpr int64_t kTokensPerBlock = 256;

int64_t num_blocks(int64_t num_tokens) {
  return (num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
}

// Sets `smallest` to the smaller of itself and `value`. A negative value is ignored.
void keep_smaller(std::atomic<int64_t>& smallest, int64_t value) {
  int64_t seen = smallest.load();
  while (value >= 0 && value < seen && !smallest.compare_exchange_weak(seen, value)) {
  }
}

// Calls f(block, begin, end, scratch) for each block of tokens.
template <typename Acc, typename F>
void each_block(int64_t num_tokens, const GateOptions& options, F&& f) {
  parallel_for(0, num_blocks(num_tokens), 1, [&](int64_t begin, int64_t end) {
    std::vector<Acc> scratch(scratch_size(options));
    for (int64_t block = begin; block < end; ++block) {
      f(block, block * kTokensPerBlock, std::min(num_tokens, (block + 1) * kTokensPerBlock), scratch.data());
    }
  });
}

// Returns the number of logits above -inf in the row of a token. Refuses a row with NaN or +inf.
template <typename T>
int64_t count_possible(const char* op, const T* row, int64_t num_experts, int64_t token) {
  int64_t above = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const auto logit = to_acc(row[e]);
    MOE_CHECK(
        logit < std::numeric_limits<acc_t<T>>::infinity(), op, ": expected logits to be free of NaN and +inf, got ",
        std::isnan(logit) ? "nan" : "inf", " at token ", token, ", expert ", e);
    above += logit > -std::numeric_limits<acc_t<T>>::infinity();
  }
  return above;
}

// Raises the error that says why the gate refused a token.
template <typename T>
[[noreturn]] void refuse(const GateArgs<T>& args, int64_t token) {
  const T* row = args.logits + token * args.options.num_experts;
  const int64_t above = count_possible("topk_gate", row, args.options.num_experts, token);
  fail(
      "topk_gate: expected logits to leave at least top_k = ", args.options.top_k,
      " experts to choose from, got token ", token, " with ", above, " logits above -inf among ",
      args.options.num_experts, " experts");
}

template <typename T>
[[noreturn]] void refuse(const GateWeightsArgs<T>& args, int64_t token) {
  const int64_t num_experts = args.options.num_experts, top_k = args.options.top_k;
  const T* row = args.logits + token * num_experts;
  count_possible("gate_weights", row, num_experts, token);
  const int64_t* idx = args.idx + token * top_k;
  const int64_t* bad = std::find_if(idx, idx + top_k, [&](int64_t e) {
    return e >= 0 && to_acc(row[e]) == -std::numeric_limits<acc_t<T>>::infinity();
  });
  fail(
      "gate_weights: expected logits to be above -inf where topk_idx points, got -inf at token ", token, ", expert ",
      *bad);
}

// Sums of scores [blocks, E] and counts [blocks, E].
template <typename T>
struct Partials {
  std::vector<acc_t<T>> score_sum;
  std::vector<int64_t> counts;
};

// Runs f, which is `GateKernels::gate` or `weigh`, on all blocks of tokens.
template <typename T, typename Args, typename F>
Partials<T> gate_blocks(const Args& args, int64_t num_tokens, F&& f) {
  const int64_t num_experts = args.options.num_experts;
  const int64_t blocks = num_blocks(num_tokens);
  Partials<T> partials{std::vector<acc_t<T>>(blocks * num_experts), std::vector<int64_t>(blocks * num_experts, 0)};
  std::atomic<int64_t> first_refused{num_tokens};
  each_block<acc_t<T>>(num_tokens, args.options, [&](int64_t block, int64_t begin, int64_t end, auto* scratch) {
    int64_t* counts = partials.counts.data() + block * num_experts;
    keep_smaller(first_refused, f(args, begin, end, partials.score_sum.data() + block * num_experts, counts, scratch));
  });
  if (first_refused.load() < num_tokens) {
    refuse(args, first_refused.load());
  }
  return partials;
}

template <typename T>
void add_blocks(const Partials<T>& partials, int64_t blocks, const Tensor& score_sum, const Tensor& counts) {
  const int64_t num_experts = score_sum.size(0);
  for (int64_t e = 0; e < num_experts; ++e) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += partials.score_sum[block * num_experts + e];
      count += partials.counts[block * num_experts + e];
    }
    data<acc_t<T>>(score_sum)[e] = static_cast<acc_t<T>>(sum);
    data<int64_t>(counts)[e] = count;
  }
}

std::optional<Tensor> finite_bias(const std::optional<Tensor>& selection_bias, ScalarType dtype) {
  if (!selection_bias) {
    return std::nullopt;
  }
  const Tensor bias = as_contiguous(torch::stable::to(*selection_bias, dtype));
  for (int64_t e = 0; e < bias.size(0); ++e) {
    const double value = dtype == ScalarType::Double ? data<double>(bias)[e] : data<float>(bias)[e];
    MOE_CHECK(std::isfinite(value), "topk_gate: expected selection_bias to be finite, got ", value, " at expert ", e);
  }
  return bias;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> topk_gate_cpu(
    Tensor logits, // [T, E]
    int64_t top_k, std::string score_fn, bool renormalize, double scale,
    std::optional<Tensor> selection_bias, // [E]
    int64_t num_groups, int64_t top_groups,
    std::optional<Tensor> token_mask, // [T]
    std::optional<std::string> group_score) {
  const GateOptions options = check_topk_gate(
      logits, top_k, score_fn, renormalize, scale, selection_bias, num_groups, top_groups, token_mask, group_score);
  const ScalarType acc = acc_dtype(logits.scalar_type());
  std::optional<Tensor> bias = finite_bias(selection_bias, acc);
  if (!bias && options.sums_groups()) {
    bias = torch::stable::new_zeros(logits, {options.num_experts}, acc);
  }
  const Tensor x = as_contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_tokens = logits.size(0);
  Tensor weights = new_on_cpu({num_tokens, top_k}, acc);
  Tensor idx = new_on_cpu({num_tokens, top_k}, ScalarType::Long);
  Tensor counts = new_on_cpu({options.num_experts}, ScalarType::Long);
  Tensor score_sum = new_on_cpu({options.num_experts}, acc);
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const GateArgs<T> args{
        data<T>(x), data_or_null<acc_t<T>>(bias), data_or_null<bool>(mask), data<acc_t<T>>(weights), data<int64_t>(idx),
        options};
    add_blocks<T>(gate_blocks<T>(args, num_tokens, kernels().of<T>().gate), num_blocks(num_tokens), score_sum, counts);
  });
  return {weights, idx, counts, score_sum};
}

// Raises the error that names the index of a token that is out of range.
[[noreturn]] void refuse_idx(const char* op, const Tensor& topk_idx, int64_t num_experts, int64_t token) {
  const int64_t top_k = topk_idx.size(1);
  const int64_t* row = data<int64_t>(topk_idx) + token * top_k;
  const int64_t* bad = std::find_if(row, row + top_k, [&](int64_t e) { return e < -1 || e >= num_experts; });
  fail(
      op, ": expected topk_idx to be in [0, ", num_experts, ") or -1, got ", *bad, " at token ", token, ", choice ",
      bad - row);
}

void check_idx(const char* op, const Tensor& topk_idx, int64_t num_experts) {
  const int64_t top_k = topk_idx.size(1), num_choices = topk_idx.numel();
  const int64_t* idx = data<int64_t>(topk_idx);
  std::atomic<int64_t> first{num_choices};
  parallel_for(0, num_choices, grain_size(sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (idx[i] < -1 || idx[i] >= num_experts) {
        keep_smaller(first, i);
        return;
      }
    }
  });
  if (first.load() < num_choices) {
    refuse_idx(op, topk_idx, num_experts, first.load() / top_k);
  }
}

void check_distinct(const Tensor& topk_idx, int64_t num_experts) {
  const int64_t top_k = topk_idx.size(1), num_choices = topk_idx.numel();
  const int64_t* idx = data<int64_t>(topk_idx);
  std::atomic<int64_t> first{num_choices};
  parallel_for(0, topk_idx.size(0), grain_size(top_k * sizeof(int64_t)), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> last_token(num_experts, -1);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
        if (idx[i] >= 0 && std::exchange(last_token[idx[i]], t) == t) {
          keep_smaller(first, i);
          return;
        }
      }
    }
  });
  const int64_t bad = first.load();
  if (bad < num_choices) {
    fail(
        "gate_weights: expected topk_idx to hold an expert once a token, got ", idx[bad], " again at token ",
        bad / top_k, ", choice ", bad % top_k);
  }
}

std::tuple<Tensor, Tensor, Tensor> gate_weights_cpu(
    Tensor logits,   // [T, E]
    Tensor topk_idx, // [T, K]
    std::string score_fn, bool renormalize, double scale) {
  const GateOptions options = check_gate_weights(logits, topk_idx, score_fn, renormalize, scale);
  const Tensor index = as_contiguous(topk_idx);
  check_idx("gate_weights", index, options.num_experts);
  if (options.top_k > 1) {
    check_distinct(index, options.num_experts);
  }
  const ScalarType acc = acc_dtype(logits.scalar_type());
  const Tensor x = as_contiguous(logits);
  const int64_t num_tokens = logits.size(0);
  Tensor weights = new_on_cpu({num_tokens, options.top_k}, acc);
  Tensor counts = new_on_cpu({options.num_experts}, ScalarType::Long);
  Tensor score_sum = new_on_cpu({options.num_experts}, acc);
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const GateWeightsArgs<T> args{data<T>(x), data<int64_t>(index), data<acc_t<T>>(weights), options};
    add_blocks<T>(gate_blocks<T>(args, num_tokens, kernels().of<T>().weigh), num_blocks(num_tokens), score_sum, counts);
  });
  return {weights, counts, score_sum};
}

Tensor topk_gate_backward_cpu(
    std::optional<Tensor> grad_weights,   // [T, K]
    std::optional<Tensor> grad_score_sum, // [E]
    Tensor logits,                        // [T, E]
    Tensor topk_idx,                      // [T, K]
    std::string score_fn, bool renormalize, double scale) {
  const GateOptions options =
      check_topk_gate_backward(grad_weights, grad_score_sum, logits, topk_idx, score_fn, renormalize, scale);
  const Tensor index = as_contiguous(topk_idx);
  const Tensor x = as_contiguous(logits);
  const std::optional<Tensor> dw = optional_contiguous(grad_weights);
  const std::optional<Tensor> ds = optional_contiguous(grad_score_sum);
  const int64_t n = options.num_experts, num_tokens = logits.size(0);
  Tensor grad = new_on_cpu({num_tokens, n}, logits.scalar_type());
  std::atomic<int64_t> first_refused{num_tokens};
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const GateGradArgs<T> args{
        data<T>(grad), data<T>(x), data<int64_t>(index), data_or_null<acc_t<T>>(dw), data_or_null<acc_t<T>>(ds),
        options};
    each_block<acc_t<T>>(num_tokens, options, [&](int64_t, int64_t begin, int64_t end, auto* scratch) {
      keep_smaller(first_refused, kernels().of<T>().gate_backward(args, begin, end, scratch));
    });
  });
  if (first_refused.load() < num_tokens) {
    refuse_idx("_topk_gate_backward", index, n, first_refused.load());
  }
  return grad;
}

int64_t count_tokens(const std::optional<Tensor>& mask, int64_t num_tokens) {
  if (!mask) {
    return num_tokens;
  }
  int64_t count = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    count += data<bool>(*mask)[t];
  }
  return count;
}

Tensor new_scalar(const Tensor& like, double value) {
  Tensor out = new_on_cpu({}, acc_dtype(like.scalar_type()));
  if (out.scalar_type() == ScalarType::Double) {
    *data<double>(out) = value;
  } else {
    *data<float>(out) = static_cast<float>(value);
  }
  return out;
}

double scalar_value(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? *data<double>(t) : *data<float>(t);
}

Tensor router_z_loss_cpu(
    Tensor logits,                      // [T, E]
    std::optional<Tensor> token_mask) { // [T]
  check_router_z_loss("router_z_loss", logits, token_mask);
  const Tensor x = as_contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_tokens = logits.size(0);
  const int64_t n = logits.size(1);
  std::vector<double> partials(num_blocks(num_tokens), 0);
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const ZLossArgs<T> args{data<T>(x), data_or_null<bool>(mask), n};
    each_block<acc_t<T>>(num_tokens, z_loss_options(n), [&](int64_t block, int64_t begin, int64_t end, auto* scratch) {
      partials[block] = kernels().of<T>().z_loss(args, begin, end, scratch);
    });
  });
  double sum = 0;
  for (double partial : partials) {
    sum += partial;
  }
  const int64_t count = count_tokens(mask, num_tokens);
  return new_scalar(logits, count == 0 ? 0 : sum / count);
}

Tensor router_z_loss_backward_cpu(
    Tensor grad,                        // []
    Tensor logits,                      // [T, E]
    std::optional<Tensor> token_mask) { // [T]
  check_router_z_loss("_router_z_loss_backward", logits, token_mask);
  check_scalar_grad("_router_z_loss_backward", grad, "logits", logits);
  const Tensor x = as_contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t n = logits.size(1);
  Tensor out = new_on_cpu({logits.size(0), n}, logits.scalar_type());
  const double factor = 2 * scalar_value(grad) / static_cast<double>(count_tokens(mask, logits.size(0)));
  dispatch_floating(logits.scalar_type(), [&]<typename T>() {
    const ZLossArgs<T> args{data<T>(x), data_or_null<bool>(mask), n};
    each_block<acc_t<T>>(logits.size(0), z_loss_options(n), [&](int64_t, int64_t begin, int64_t end, auto* scratch) {
      kernels().of<T>().z_loss_backward(args, data<T>(out), static_cast<acc_t<T>>(factor), begin, end, scratch);
    });
  });
  return out;
}

template <typename T>
std::vector<double> as_doubles(const Tensor& t) {
  const Tensor from = as_contiguous(t);
  return {data<T>(from), data<T>(from) + from.numel()};
}

std::vector<double> double_counts(const char* op, const Tensor& num_tokens_per_expert) {
  const bool is_int = num_tokens_per_expert.scalar_type() == ScalarType::Int;
  const std::vector<double> counts =
      is_int ? as_doubles<int32_t>(num_tokens_per_expert) : as_doubles<int64_t>(num_tokens_per_expert);
  for (size_t e = 0; e < counts.size(); ++e) {
    MOE_CHECK(
        counts[e] >= 0, op, ": expected num_tokens_per_expert to be at least 0, got ", counts[e], " at expert ", e);
  }
  return counts;
}

// Slope in d loss / d score_sum[e] = slope * counts[e]. With N = sum of counts = T K, E f P = E (c / N) (S K / N).
double balance_slope(const std::vector<double>& counts, int64_t top_k) {
  double total = 0;
  for (double count : counts) {
    total += count;
  }
  return total == 0 ? 0 : static_cast<double>(static_cast<int64_t>(counts.size()) * top_k) / (total * total);
}

Tensor load_balance_loss_cpu(
    Tensor score_sum,             // [E]
    Tensor num_tokens_per_expert, // [E]
    int64_t top_k) {
  const char* op = "load_balance_loss";
  check_load_balance_loss(op, score_sum, num_tokens_per_expert, top_k);
  const std::vector<double> counts = double_counts(op, num_tokens_per_expert);
  const bool is_float = score_sum.scalar_type() == ScalarType::Float;
  const std::vector<double> sums = is_float ? as_doubles<float>(score_sum) : as_doubles<double>(score_sum);
  double loss = 0;
  for (size_t e = 0; e < sums.size(); ++e) {
    loss += counts[e] * sums[e];
  }
  return new_scalar(score_sum, loss * balance_slope(counts, top_k));
}

Tensor load_balance_loss_backward_cpu(
    Tensor grad,                  // []
    Tensor score_sum,             // [E]
    Tensor num_tokens_per_expert, // [E]
    int64_t top_k) {
  const char* op = "_load_balance_loss_backward";
  check_load_balance_loss(op, score_sum, num_tokens_per_expert, top_k);
  check_scalar_grad(op, grad, "score_sum", score_sum);
  const std::vector<double> counts = double_counts(op, num_tokens_per_expert);
  const double slope = scalar_value(grad) * balance_slope(counts, top_k);
  Tensor out = new_on_cpu({score_sum.size(0)}, score_sum.scalar_type());
  for (int64_t e = 0; e < out.size(0); ++e) {
    const double value = slope * counts[e];
    if (out.scalar_type() == ScalarType::Double) {
      data<double>(out)[e] = value;
    } else {
      data<float>(out)[e] = static_cast<float>(value);
    }
  }
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("topk_gate", TORCH_BOX(&topk_gate_cpu));
  m.impl("gate_weights", TORCH_BOX(&gate_weights_cpu));
  m.impl("_topk_gate_backward", TORCH_BOX(&topk_gate_backward_cpu));
  m.impl("router_z_loss", TORCH_BOX(&router_z_loss_cpu));
  m.impl("_router_z_loss_backward", TORCH_BOX(&router_z_loss_backward_cpu));
  m.impl("load_balance_loss", TORCH_BOX(&load_balance_loss_cpu));
  m.impl("_load_balance_loss_backward", TORCH_BOX(&load_balance_loss_backward_cpu));
}

} // namespace moe_ext::gating
