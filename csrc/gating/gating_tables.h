// The loops that gating_simd.cpp provides for each instruction set. Torch-free.
// T tokens, E experts, K top-k, G groups.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::gating {

enum class ScoreFn { kSoftmax, kTopkSoftmax, kSigmoid };

struct GateOptions {
  int64_t num_experts;
  int64_t top_k;
  int64_t num_groups;
  int64_t top_groups;
  ScoreFn score_fn;
  bool renormalize;
  double scale;

  // Softmax divided by its sum over the chosen experts is the softmax of their logits, which cannot underflow to 0 / 0.
  bool softmax_of_chosen() const {
    return score_fn == ScoreFn::kTopkSoftmax || (score_fn == ScoreFn::kSoftmax && renormalize);
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
struct GateKernels {
  using Acc = acc_t<T>;
  // Gates the tokens [begin, end), writes their weights and idx, and sets score_sum [E] and adds to counts [E].
  // Returns the first token that is refused, or -1.
  int64_t (*gate)(const GateArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch);
  // Gradient of one token's logits; null gradients are zeros.
  void (*gate_backward)(
      T* grad, const T* logits, const int64_t* idx, const Acc* grad_weights, const Acc* grad_score_sum,
      const GateOptions& options, Acc* scratch);
  // log sum_e exp(logits[e])
  Acc (*logsumexp)(const T* logits, int64_t num_experts);
  // grad[e] = factor * logsumexp(logits) * softmax(logits)[e]
  void (*z_loss_backward)(T* grad, const T* logits, Acc factor, int64_t num_experts, Acc* scratch);
};

using Kernels = PerDtype<GateKernels>;

namespace {

constexpr int64_t kMaxLanes = 16;

// Elements of scratch that any of the loops wants, the slack to align it included.
MOE_INLINE int64_t scratch_size(const GateOptions& options) {
  return kMaxLanes *
         (4 * options.num_experts + 3 * options.top_k + 2 * options.num_groups + 2 * options.top_groups + 1);
}

} // namespace
} // namespace moe_ext::gating
