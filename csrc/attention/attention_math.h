// Maths of block attention that CPU loops and kernels share. Torch-free.
#pragma once

#include "common/philox.h"

namespace moe_ext::attention {

constexpr int32_t kNoLimit = 0x7FFFFFFE;     // above every position
constexpr int32_t kMaskedKey = 0x7FFFFFFF;   // position of a masked key: outside of every row's interval
constexpr int64_t kMostPositions = kNoLimit; // positions are smaller
constexpr int64_t kMaxDropoutHeads = 1 << 16;

// The keys that a row may see by position: a causal mask and a sliding window together are one interval.
struct Window {
  int64_t left;  // -1: no limit
  int64_t right; // -1: no limit
};

struct Interval {
  int32_t first, last; // inclusive

  MOE_INLINE bool has(int32_t position) const {
    return first <= position && position <= last;
  }
};

MOE_INLINE Window effective_window(bool causal, int64_t left, int64_t right) {
  return {left, causal ? 0 : right};
}

MOE_INLINE Interval visible_positions(int32_t q_position, Window window) {
  const int64_t first = window.left < 0 ? 0 : q_position - window.left;
  const int64_t last = window.right < 0 ? kNoLimit : q_position + window.right;
  return {static_cast<int32_t>(first < 0 ? 0 : first), static_cast<int32_t>(last < kNoLimit ? last : kNoLimit)};
}

// score = cap tanh(scale q.k / cap) - slope |i - j|
template <typename Acc>
struct Score {
  Acc scale;
  Acc softcap; // 0: none
  Acc slope;   // 0: none
};

// Dropout keeps a number of the softmax if its 24 random bits reach the threshold, and multiplies it by 1 / (1 - p).
struct Dropout {
  uint64_t seed;
  uint32_t threshold; // 0: nothing is dropped
  double inv_keep;
};

inline Dropout dropout_of(double p, int64_t seed) {
  return {static_cast<uint64_t>(seed), static_cast<uint32_t>(p * 0x1p24 + 0.5), 1.0 / (1.0 - p)};
}

// The random numbers of a row: layer = head, step = batch, token = query, column = key.
MOE_INLINE TokenDraws dropout_draws(uint64_t seed, int64_t batch, int64_t head, int32_t q_position) {
  const uint64_t last = static_cast<uint64_t>(head & 0xFFFF) << 16 | static_cast<uint64_t>(Stream::kDropout) << 8;
  return {
      static_cast<uint32_t>(q_position),
      static_cast<uint32_t>(batch),
      static_cast<uint32_t>(last),
      {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}}};
}

namespace {

constexpr float kInf = __builtin_inff();

// tanh to about two units in the last place. A ratio of exponentials would lose the relative accuracy of small scores.
MOE_INLINE float tanh_acc(float x) {
#if defined(__CUDA_ARCH__)
  return ::tanhf(x);
#else
  const float magnitude = x < 0 ? -x : x;
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = fma_acc(p, z, 2.06390887954e-2f);
  p = fma_acc(p, z, -5.37397155531e-2f);
  p = fma_acc(p, z, 1.33314422036e-1f);
  p = fma_acc(p, z, -3.33332819422e-1f);
  const float small = fma_acc(p * z, x, x);
  const float large = 1.0f - 2.0f / (exp_acc(magnitude < 10.0f ? 2.0f * magnitude : 20.0f) + 1.0f);
  // A NaN fails the comparison, and the polynomial returns NaN.
  return magnitude >= 0.625f ? (x < 0 ? -large : large) : small;
#endif
}

MOE_INLINE double tanh_acc(double x) {
#if defined(__CUDA_ARCH__)
  return ::tanh(x);
#else
  return __builtin_tanh(x);
#endif
}

template <bool kSoftcap, bool kAlibi, typename Acc>
MOE_INLINE Acc score_of(Acc product, const Score<Acc>& score, Acc& tanh, int32_t distance) {
  Acc s = product * score.scale;
  if constexpr (kSoftcap) {
    tanh = tanh_acc(s / score.softcap);
    s = tanh * score.softcap;
  }
  if constexpr (kAlibi) {
    s -= score.slope * static_cast<Acc>(distance < 0 ? -distance : distance);
  }
  return s;
}

// Combination of two partial results: lse = log(exp(a) + exp(b)), and the weights of the two outputs.
template <typename Acc>
struct MergeWeights {
  Acc lse, a, b;
};

// A row without keys has LSE -inf here and +inf in FlashAttention. Both get weight 0. NaN propagates.
template <typename Acc>
MOE_INLINE MergeWeights<Acc> merge_weights(Acc lse_a, Acc lse_b) {
  const Acc none = -Acc(kInf);
  const Acc a = lse_a == Acc(kInf) ? none : lse_a;
  const Acc b = lse_b == Acc(kInf) ? none : lse_b;
  const Acc most = a > b ? a : b;
  const Acc shift = most == none ? Acc(0) : most;
  // The shift by the larger LSE makes one of the two exp(0), so that neither overflows and the sum is at least 1.
  const Acc exp_a = exp_acc(a - shift), exp_b = exp_acc(b - shift);
  const Acc total = exp_a + exp_b;
  if (total == 0) {
    return {none, 0, 0};
  }
  return {total > 0 ? shift + log_positive(total) : total, exp_a / total, exp_b / total};
}

} // namespace
} // namespace moe_ext::attention
