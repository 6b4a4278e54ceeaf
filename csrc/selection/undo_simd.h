// The log by which a feed is taken back bit for bit (topk_tables.h). Compiled once per instruction set.
#pragma once

#include "selection/scale_simd.h"

namespace moe_ext::topk::MOE_ISA {
namespace {

// A block of residual or velocity before the feed, and what taking the feed back gives for it.
template <typename Acc>
struct Backwards {
  alignas(64) Acc before[kBlock];
  alignas(64) Acc guess[kBlock];
};

template <typename Acc>
struct BlockLog {
  Backwards<Acc> residual, velocity;
};

struct Codes { // two bits an element; both are set where the value is kept
  Bits low, high;
};
static_assert(sizeof(Codes) == kBlock / 4);

// Codes of a block; the values that they do not give go to the log.
template <typename Acc>
MOE_INLINE Codes codes_of(const Backwards<Acc>& block, UndoLog<Acc>* log) {
  using Key = key_t<Acc>;
  alignas(64) uint8_t low[kBlock], high[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    const Key step = bit_cast<Key>(block.before[i]) - bit_cast<Key>(block.guess[i]);
    // A NaN need not have the same bits the next time.
    const bool lost = key_of(block.guess[i]) >= kInfinityKey<Acc>, other = step != 0;
    low[i] = static_cast<uint8_t>(lost | (other & (step != static_cast<Key>(-1))));
    high[i] = static_cast<uint8_t>(lost | (other & (step != 1)));
  }
  const Codes codes{bits_of(low), bits_of(high)};
  Bits kept;
  for (int64_t w = 0; w < kWords; ++w) {
    kept.word[w] = codes.low.word[w] & codes.high.word[w];
  }
  log->count = for_bits<6>(kept, log->count, [&](int64_t slot, int64_t i) { log->values[slot] = block.before[i]; });
  return codes;
}

#if defined(__AVX512F__)
// The same of 16 elements, from the i-th bit of a word on.
MOE_INLINE void add_codes(__m512 before, __m512 guess, int64_t i, uint64_t* low, uint64_t* high, UndoLog<float>* log) {
  const __m512i key = _mm512_and_si512(_mm512_castps_si512(guess), _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 lost = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(0x7F800000));
  const __m512i one = _mm512_set1_epi32(1), far = _mm512_set1_epi32(2);
  const __m512i step = _mm512_sub_epi32(_mm512_castps_si512(before), _mm512_castps_si512(guess));
  const __m512i apart = _mm512_mask_mov_epi32(step, lost, far);
  const __mmask16 is_low = _mm512_cmpgt_epu32_mask(_mm512_add_epi32(apart, one), one); // neither 0 nor -1
  const __mmask16 is_high = _mm512_cmpgt_epu32_mask(apart, one);                       // neither 0 nor 1
  const __mmask16 kept = _kand_mask16(is_low, is_high);
  _mm512_storeu_ps(log->values + log->count, _mm512_maskz_compress_ps(kept, before));
  log->count += __builtin_popcount(kept);
  *low |= static_cast<uint64_t>(is_low) << i;
  *high |= static_cast<uint64_t>(is_high) << i;
}

MOE_INLINE Codes codes_of(const Backwards<float>& block, UndoLog<float>* log) {
  Codes codes;
  for (int64_t w = 0; w < kWords; ++w) {
    uint64_t low = 0, high = 0;
    for (int64_t i = 0; i < 64; i += kLanes) {
      const __m512 before = _mm512_load_ps(block.before + 64 * w + i);
      add_codes(before, _mm512_load_ps(block.guess + 64 * w + i), i, &low, &high, log);
    }
    codes.low.word[w] = low;
    codes.high.word[w] = high;
  }
  return codes;
}
#endif

template <typename Acc>
MOE_INLINE void log_block(Backwards<Acc>& block, Acc inverse, int64_t n, uint8_t* out, UndoLog<Acc>* log) {
  for (int64_t i = n; i < kBlock; ++i) {
    block.before[i] = block.guess[i] = 0;
  }
  if (inverse != 1) {
    scale(block.guess, inverse, n, block.guess);
  }
  const Codes codes = codes_of(block, log);
  __builtin_memcpy(out, &codes, sizeof(codes));
}

template <typename Acc>
MOE_INLINE void restore_block(
    Acc* __restrict state, Acc* __restrict guess, Acc inverse, int64_t n, const uint8_t* bytes, const Acc* values,
    int64_t* count) {
  using Key = key_t<Acc>;
  if (inverse != 1) {
    scale(guess, inverse, n, guess);
  }
  Codes codes;
  __builtin_memcpy(&codes, bytes, sizeof(codes));
  for (int64_t i = 0; i < n; ++i) {
    const bool low = codes.low.word[i / 64] >> (i % 64) & 1, high = codes.high.word[i / 64] >> (i % 64) & 1;
    const Key step = low ? Key{1} : high ? static_cast<Key>(-1) : Key{0};
    state[i] = low && high ? values[(*count)++] : bit_cast<Acc>(static_cast<Key>(bit_cast<Key>(guess[i]) + step));
  }
}

} // namespace
} // namespace moe_ext::topk::MOE_ISA
