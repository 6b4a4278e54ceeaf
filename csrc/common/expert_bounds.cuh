// The range of rows of each expert, from offsets in device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/host_device.h"
#include "common/launch.cuh"

namespace moe_ext {

// Offsets [E + 1], or ends [E] if the rows of the first expert start at 0.
struct ExpertBounds {
  const int64_t* offsets; // or null
  const int32_t* ends;
  int num_experts;

  // The end of the rows of `expert - 1` and start of those of `expert`, for `expert` in [0, E].
  __device__ __forceinline__ int64_t begin(int64_t expert) const {
    return offsets != nullptr ? offsets[expert] : expert == 0 ? 0 : ends[expert - 1];
  }
  __device__ __forceinline__ int64_t end(int64_t expert) const {
    return begin(expert + 1);
  }
};

// Units of work of a warp in a product of tokens with the rows of a weight. A unit is a row and kTokens neighbouring
// tokens. If rows and tokens belong to experts, a unit is a row and all tokens of its expert.
template <int kTokens>
class RowTokens {
 public:
  MOE_HD RowTokens(const ExpertBounds& experts, int64_t num_rows, int64_t num_tokens)
      : experts_(experts),
        num_rows_(num_rows),
        num_tokens_(num_tokens),
        groups_(ceil_div(num_tokens, int64_t{kTokens})) {
  }
  MOE_HD int64_t num_units() const {
    return num_rows_ * (experts_.num_experts > 0 ? 1 : groups_);
  }
  // Number of rows of each expert.
  MOE_HD int64_t rows_each() const {
    return num_rows_ / (experts_.num_experts > 0 ? experts_.num_experts : 1);
  }
  __device__ __forceinline__ int64_t row(int64_t unit) const {
    return experts_.num_experts > 0 ? unit : unit / groups_;
  }
  __device__ __forceinline__ int64_t begin(int64_t unit) const {
    return experts_.num_experts > 0 ? max(experts_.begin(unit / rows_each()), int64_t{0}) : unit % groups_ * kTokens;
  }
  // Offsets beyond the last token are a caller's mistake, which kCheck traps. Without kCheck they are clamped, so that
  // no memory out of bounds is touched.
  template <bool kCheck>
  __device__ __forceinline__ int64_t end(int64_t unit) const {
    if (experts_.num_experts == 0) {
      return min(begin(unit) + kTokens, num_tokens_);
    }
    const int64_t last = experts_.end(unit / rows_each());
    if constexpr (kCheck) {
      if (experts_.begin(unit / rows_each()) < 0 || last > num_tokens_) {
        __trap();
      }
    }
    return min(last, num_tokens_);
  }

 private:
  ExpertBounds experts_;
  int64_t num_rows_, num_tokens_, groups_;
};

} // namespace moe_ext
