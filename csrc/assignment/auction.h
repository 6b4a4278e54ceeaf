// The auction that assigns tokens to experts of given sizes: the parts that both backends share. Torch-free. Scores
// become whole numbers in [0, 2^24], so that every sum below is exact and backends agree. Every token without a place
// bids for the class of places worth most to it (value minus price). Its bid is the price plus the margin over the
// second best plus eps. A class keeps the highest bids, the lower token in a tie. Once full, its price is its lowest
// bid. A phase ends when every token has a place. The next phase starts from its prices with a fifth of its eps, down
// to eps = 1. An assignment found with eps is within eps for each token of the best one.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::assignment {

constexpr double kScoreLevels = 16777216.0; // 2^24: exact in float
constexpr double kFirstEps = 3355443.0;
constexpr double kEpsDivisor = 5.0;
constexpr float kNever = -1099511627776.0f; // -2^40, below any value minus price

// Range of the scores of real tokens.
struct ScoreRange {
  double low;
  double high;

  MOE_INLINE bool is_point() const {
    return !(high > low);
  }
};

// Scores are halved so that the difference of two huge scores cannot overflow.
MOE_INLINE float quantized_score(double score, const ScoreRange& range) {
  if (range.is_point()) {
    return 0;
  }
  const double share = (0.5 * score - 0.5 * range.low) / (0.5 * range.high - 0.5 * range.low);
#if defined(__CUDA_ARCH__)
  return static_cast<float>(::rint(share * kScoreLevels));
#else
  return static_cast<float>(__builtin_rint(share * kScoreLevels));
#endif
}

MOE_INLINE double first_eps(const ScoreRange& range) {
  return range.is_point() ? 1.0 : kFirstEps;
}

MOE_INLINE double next_eps(double eps) {
  const double next = static_cast<double>(static_cast<int64_t>(eps / kEpsDivisor));
  return next > 1 ? next : 1.0;
}

// Sizes of the assignment of R real tokens. Every expert takes R / E tokens, and the R % E experts for which that is
// best take one more. Hence an expert has a class of R / E places and a class of one place. E - R % E dummies take the
// single places that are left: they value all single places equally, and never bid for places of the first kind.
struct AuctionShape {
  int64_t num_experts;
  int64_t even; // R / E
  int64_t rest; // R % E

  MOE_INLINE AuctionShape(int64_t num_real, int64_t experts)
      : num_experts(experts), even(num_real / experts), rest(num_real % experts) {
  }

  MOE_INLINE int64_t num_dummies() const {
    return rest > 0 ? num_experts - rest : 0;
  }
  // Classes of R / E places come first. The expert of a class is its number modulo E.
  MOE_INLINE int64_t num_even_classes() const {
    return even > 0 ? num_experts : 0;
  }
  MOE_INLINE int64_t num_classes() const {
    return num_even_classes() + (rest > 0 ? num_experts : 0);
  }
  MOE_INLINE int64_t places(int64_t c) const {
    return c < num_even_classes() ? even : 1;
  }
  MOE_INLINE float dummy_value(int64_t c) const {
    return c < num_even_classes() ? kNever : 0.0f;
  }
};

} // namespace moe_ext::assignment
