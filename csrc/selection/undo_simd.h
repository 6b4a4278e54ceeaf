// Writing and reading of the log by which a feed is undone (topk_tables.h). Compiled once per instruction set.
#pragma once

#include "selection/scale_simd.h"

namespace moe_ext::topk::MOE_ISA {
namespace {

// A block of residual or velocity before the feed, and the guess of these values by the inverted feed.
template <typename Acc>
struct Backwards {
  alignas(64) Acc before[kBlock];
  alignas(64) Acc guess[kBlock];
};

template <typename Acc>
struct BlockLog {
  Backwards<Acc> residual, velocity;
};

MOE_INLINE bool is_far(int step) {
  return step >= kFarStep || step <= -kFarStep;
}

// Appends a block to the log. `inverse` is the reciprocal of the factor of the feed, by which guesses are scaled first.
template <typename Acc>
MOE_INLINE void log_block(
    Backwards<Acc>& block, Acc inverse, int64_t n, int8_t* __restrict steps, UndoLog<Acc>* __restrict log) {
  using Key = key_t<Acc>;
  using Step = std::make_signed_t<Key>;
  alignas(64) uint8_t far[kBlock] = {};
  if (inverse != 1) {
    scale(block.guess, inverse, n, block.guess);
  }
  for (int64_t i = 0; i < n; ++i) {
    const Step step = static_cast<Step>(bit_cast<Key>(block.before[i]) - bit_cast<Key>(block.guess[i]));
    const Step least = step < -kFarStep ? Step{-kFarStep} : step;
    steps[i] = static_cast<int8_t>(least > kFarStep ? Step{kFarStep} : least);
    far[i] = static_cast<uint8_t>(is_far(steps[i]));
  }
  log->count =
      for_bits<2>(bits_of(far), log->count, [&](int64_t slot, int64_t i) { log->values[slot] = block.before[i]; });
}

// Restores a block of `state` from the log. `count` is the number of logged values used so far.
template <typename Acc>
MOE_INLINE void restore_block(
    Acc* __restrict state, Acc* __restrict guess, Acc inverse, int64_t n, const int8_t* steps, const Acc* values,
    int64_t* count) {
  using Key = key_t<Acc>;
  if (inverse != 1) {
    scale(guess, inverse, n, guess);
  }
  for (int64_t i = 0; i < n; ++i) {
    state[i] = is_far(steps[i])
                   ? values[(*count)++]
                   : bit_cast<Acc>(bit_cast<Key>(guess[i]) + static_cast<Key>(static_cast<int64_t>(steps[i])));
  }
}

} // namespace
} // namespace moe_ext::topk::MOE_ISA
