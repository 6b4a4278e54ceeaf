// Tables of the loops that assignment_simd.cpp provides for each instruction set. Torch-free. T tokens, E experts.
#pragma once

#include <cstdint>

#include "gating/gating_tables.h"

namespace moe_ext::assignment {

template <typename T>
struct ScoreArgs {
  const T* logits;        // [T, E]
  const bool* token_mask; // [T], or null
  int64_t num_experts;
  gating::ScoreFn score_fn; // softmax, or scores of single logits divided by their sum
};

template <typename T>
struct ScoreGradArgs {
  ScoreArgs<T> scores;
  const acc_t<T>* grad_score_sum; // [E], or null for zeros
  const acc_t<T>* grad_weights;   // [T, E], or null for zeros
  const int64_t* idx;             // [T, E], -1 if a token has no weight for the expert; null if grad_weights is null
  T* grad;                        // [T, E]
};

template <typename Acc>
struct SinkhornArgs {
  const Acc* cost;        // [T, E]
  const bool* token_mask; // [T], or null
  const Acc* scale;       // [E]
  int64_t num_experts;
  int64_t num_real; // real tokens
};

// The expert that is worth most to a token, and its margin over the second best.
struct Choice {
  int64_t expert;
  double margin;
};

// Each function works on tokens [begin, end). scratch has 2 E elements.
template <typename T>
struct ScoreKernels {
  using Acc = acc_t<T>;
  // Adds the scores to score_sum [E], and writes them to rows [T, E] unless that is null. Returns the first real token
  // whose logits have NaN, +inf or nothing above -inf, or -1.
  int64_t (*scores)(const ScoreArgs<T>& args, int64_t begin, int64_t end, Acc* rows, Acc* score_sum, Acc* scratch);
  void (*scores_backward)(const ScoreGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
  // cost[t][e] = exp(logits[t][e] - max). Returns the same as `scores`.
  int64_t (*cost)(const ScoreArgs<T>& args, int64_t begin, int64_t end, Acc* cost);
  // column [E] += sum over tokens of cost[t] / (num_real <scale, cost[t]>)
  void (*sinkhorn)(const SinkhornArgs<Acc>& args, int64_t begin, int64_t end, Acc* column);
};

struct Kernels {
  PerDtype<ScoreKernels> scores;
  // Chooses by value [E] minus price [E]. Both hold whole numbers, so that every instruction set gives the same result.
  Choice (*choose)(const float* value, const double* price, int64_t num_experts);

  template <typename T>
  const ScoreKernels<T>& of() const {
    return scores.of<T>();
  }
};

} // namespace moe_ext::assignment
