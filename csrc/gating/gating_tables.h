// The loops that gating_simd.cpp provides for each instruction set. Torch-free.
// T tokens, E experts, K top-k, G groups.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::gating {

enum class ScoreFn { kSoftmax, kTopkSoftmax, kSigmoid, kSqrtSoftplus };

// True for a score that looks at one logit alone.
constexpr bool is_pointwise(ScoreFn fn) {
  return fn == ScoreFn::kSigmoid || fn == ScoreFn::kSqrtSoftplus;
}

struct GateOptions {
  int64_t num_experts;
  int64_t top_k;
  int64_t num_groups;
  int64_t top_groups;
  ScoreFn score_fn;
  bool renormalize;
  double scale;
  int64_t group_terms = 1; // largest keys of a group that make its score

  // Softmax divided by its sum over the chosen experts is the softmax of their logits, which cannot underflow to 0 / 0.
  constexpr bool softmax_of_chosen() const {
    return score_fn == ScoreFn::kTopkSoftmax || (score_fn == ScoreFn::kSoftmax && renormalize);
  }
  // True if the keys are scores without a bias too: a sum of logits is no score of a group.
  constexpr bool sums_groups() const {
    return group_terms > 1 && top_groups < num_groups;
  }
  // Places for the best keys of a token, or of a group.
  constexpr int64_t list_size() const {
    return top_k > group_terms ? top_k : group_terms;
  }
};

template <typename T>
struct GateArgs {
  const T* logits;        // [T, E]
  const acc_t<T>* bias;   // [E], or null
  const bool* token_mask; // [T], or null
  acc_t<T>* weights;      // [T, K]
  int64_t* idx;           // [T, K]
  GateOptions options;
};

template <typename T>
struct GateWeightsArgs {
  const T* logits;    // [T, E]
  const int64_t* idx; // [T, K] the given choice, -1 for none
  acc_t<T>* weights;  // [T, K]
  GateOptions options;
};

template <typename T>
struct GateGradArgs {
  T* grad;                        // [T, E]
  const T* logits;                // [T, E]
  const int64_t* idx;             // [T, K]
  const acc_t<T>* grad_weights;   // [T, K], or null for zeros
  const acc_t<T>* grad_score_sum; // [E], or null for zeros
  GateOptions options;
};

template <typename T>
struct ZLossArgs {
  const T* logits;        // [T, E]
  const bool* token_mask; // [T], or null
  int64_t num_experts;
};

// Each works on the tokens [begin, end), with scratch_size elements of scratch.
template <typename T>
struct GateKernels {
  using Acc = acc_t<T>;
  // Writes weights and idx, sets score_sum [E] and adds to counts [E]. Returns the first token that is refused, or -1.
  int64_t (*gate)(const GateArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch);
  // The same with idx given and within [-1, E); a choice of a logit of -inf is refused too.
  int64_t (*weigh)(
      const GateWeightsArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch);
  // Returns the first token with an index outside of [-1, E), behind which nothing is written, or -1.
  int64_t (*gate_backward)(const GateGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
  // sum_t (log sum_e exp(logits[t][e]))^2
  double (*z_loss)(const ZLossArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
  // grad[t][e] = factor * log sum exp(logits[t]) * softmax(logits[t])[e]
  void (*z_loss_backward)(const ZLossArgs<T>& args, T* grad, Acc factor, int64_t begin, int64_t end, Acc* scratch);
};

using Kernels = PerDtype<GateKernels>;

namespace {

constexpr int64_t kMaxLanes = 16;

// Elements of scratch, the slack to align it included.
MOE_INLINE int64_t scratch_size(const GateOptions& options) {
  return kMaxLanes * (6 * options.num_experts + options.top_k + 2 * options.list_size() + 2 * options.num_groups +
                      2 * options.top_groups + 1);
}

MOE_INLINE GateOptions z_loss_options(int64_t num_experts) {
  return {num_experts, 1, 1, 1, ScoreFn::kSoftmax, false, 1.0};
}

} // namespace
} // namespace moe_ext::gating
