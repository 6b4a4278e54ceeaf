// The loops that noisy_gating_simd.cpp provides for each instruction set. Torch-free.
// T tokens, C columns, E experts, K top-k.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace moe_ext::noisy_gating {

template <typename T>
struct JitterArgs {
  T* out;     // [T, D]
  const T* x; // [T, D]
  int64_t dim;
  double eps;
  RngSource rng;
};

template <typename T>
struct GShardArgs {
  const T* logits;        // [T, E]
  const bool* token_mask; // [T], or null
  acc_t<T>* weights;      // [T, 2]
  int64_t* idx;           // [T, 2]
  int64_t num_experts;
  double scale;
  RngSource rng;
};

template <typename T>
struct GShardGradArgs {
  T* grad;                        // [T, E]
  const T* logits;                // [T, E]
  const int64_t* idx;             // [T, 2]
  const acc_t<T>* grad_weights;   // [T, 2], or null for zeros
  const acc_t<T>* grad_score_sum; // [E], or null for zeros
  int64_t num_experts;
  double scale;
};

struct NoisyOptions {
  int64_t num_experts;
  int64_t top_k;
  double noise_epsilon; // added to softplus(noise logit)
  double scale;

  // Number of ranked experts: one more than are chosen, if there are more.
  constexpr int64_t num_ranked() const {
    return top_k < num_experts ? top_k + 1 : top_k;
  }
};

template <typename T>
struct NoisyArgs {
  const T* clean;         // [T, E]
  const T* noise;         // [T, E], or null for no noise
  const bool* token_mask; // [T], or null
  acc_t<T>* weights;      // [T, K]
  int64_t* idx;           // [T, K]
  NoisyOptions options;
  RngSource rng;
};

template <typename T>
struct NoisyGradArgs {
  T* grad_clean;                   // [T, E]
  T* grad_noise;                   // [T, E], or null
  const T* clean;                  // [T, E]
  const T* noise;                  // [T, E], or null
  const int64_t* idx;              // [T, K]; if the first is -1, the token was masked
  const acc_t<T>* grad_weights;    // [T, K], or null for zeros
  const acc_t<T>* grad_importance; // [E], or null for zeros
  const acc_t<T>* grad_load;       // [E], or null for zeros
  NoisyOptions options;
  RngSource rng;
};

// Loops over the tokens [begin, end). `sums` and `counts` hold one or two rows [E] and are overwritten with the results
// of these tokens. The gates return the first refused token, or -1.
template <typename T>
struct NoisyKernels {
  using Acc = acc_t<T>;
  void (*jitter)(const JitterArgs<T>& args, int64_t begin, int64_t end);
  // Rows of sums: score_sum. Rows of counts: choices, first choices.
  int64_t (*gshard)(const GShardArgs<T>& args, int64_t begin, int64_t end, Acc* sums, int64_t* counts, Acc* scratch);
  void (*gshard_backward)(const GShardGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
  // Rows of sums: importance, load (zeros without noise). Rows of counts: choices.
  int64_t (*noisy)(const NoisyArgs<T>& args, int64_t begin, int64_t end, Acc* sums, int64_t* counts, Acc* scratch);
  void (*noisy_backward)(const NoisyGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch);
};

struct Kernels : PerDtype<NoisyKernels> {
  // Draws the uniforms of the tokens [begin, end) into out [T, C].
  void (*uniform)(float* out, int64_t num_columns, Stream stream, RngSource rng, int64_t begin, int64_t end);
};

} // namespace moe_ext::noisy_gating
