// The loops that gating_simd.cpp provides for each instruction set. Torch-free.
// T tokens, E experts, K top-k, G groups.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::gating {

enum class ScoreFn { kSoftmax, kTopkSoftmax, kSigmoid, kSqrtSoftplus };

// True if the score of an expert depends on no other logit than its own.
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
  int64_t group_terms = 1; // number of largest keys whose sum is the score of a group

  // True if weights are the softmax of the chosen logits. Renormalised softmax equals it, without underflow to 0 / 0.
  constexpr bool softmax_of_chosen() const {
    return score_fn == ScoreFn::kTopkSoftmax || (score_fn == ScoreFn::kSoftmax && renormalize);
  }
  // True if keys of a group are added. Keys are then scores even without a bias, because a sum of logits is no score.
  constexpr bool sums_groups() const {
    return group_terms > 1 && top_groups < num_groups;
  }
  // Size of a list that holds the best keys of a token, or of a group.
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
  const int64_t* idx; // [T, K], the given choice; -1 means none
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

// Loops over the tokens [begin, end). `scratch` has scratch_size(options) elements.
template <typename T>
struct GateKernels {
  using Acc = acc_t<T>;
  // Writes weights and idx, sets score_sum [E] and adds to counts [E]. Returns the first refused token, or -1.
  int64_t (*gate)(const GateArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch);
  // Does the same for a given idx, which must be within [-1, E). Also refuses a chosen expert with a logit of -inf.
  int64_t (*weigh)(
      const GateWeightsArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch);
  // Returns the first token with an index outside of [-1, E), from which on nothing is written, or -1.
  int64_t (*gate_backward)(const GateGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
  // Returns sum_t (log sum_e exp(logits[t][e]))^2 over the real tokens.
  double (*z_loss)(const ZLossArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
  // Computes grad[t][e] = factor * log sum exp(logits[t]) * softmax(logits[t])[e].
  void (*z_loss_backward)(const ZLossArgs<T>& args, T* grad, Acc factor, int64_t begin, int64_t end, Acc* scratch);
};

using Kernels = PerDtype<GateKernels>;

namespace {

constexpr int64_t kMaxLanes = 16;

// Elements of scratch memory, including slack to align it.
MOE_INLINE int64_t scratch_size(const GateOptions& options) {
  return kMaxLanes * (6 * options.num_experts + options.top_k + 2 * options.list_size() + 2 * options.num_groups +
                      2 * options.top_groups + 1);
}

MOE_INLINE GateOptions z_loss_options(int64_t num_experts) {
  return {num_experts, 1, 1, 1, ScoreFn::kSoftmax, false, 1.0};
}

} // namespace
} // namespace moe_ext::gating
