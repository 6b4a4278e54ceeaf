// Random numbers by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A number is
// a function of its place of use, not of how many were drawn before: host and device draw the same bits, for any number
// of threads and ranks. Internal linkage, as simd.h.
//
// key = (seed low, seed high); counter = (column / 4, token low, step low, layer[16] stream[8] token high[8]).
// Column c uses word c % 4 of its counter.
#pragma once

#include "common/simd.h"

namespace moe_ext {

// Purpose of the random numbers: two purposes in a layer never share numbers.
enum class Stream : int64_t {
  kJitter = 0,
  kSecondExpert = 1,
  kNoise = 2,
  kDropPriority = 3,
  kDropout = 4,
  kRounding = 5
};
constexpr int64_t kNumStreams = 256;

// Source of an operator's random numbers. For kernels these are pointers to device memory.
struct RngSource {
  const int64_t* state;     // [4] seed, layer, step, first_token; null if nothing is drawn
  const int64_t* token_idx; // [T] indices in the global batch, or null for first_token + t
};

namespace {

struct PhiloxWords {
  uint32_t w[4];
};

struct PhiloxKey {
  uint32_t k[2];
};

// High and low words are computed apart: compilers vectorise products of 32 bits, but not those of 64 bits.
MOE_INLINE uint32_t high_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

MOE_INLINE PhiloxWords philox_round(PhiloxWords c, PhiloxKey key, uint32_t round) {
  constexpr uint32_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  return {
      {high_product(kSecond, c.w[2]) ^ c.w[1] ^ (key.k[0] + round * 0x9E3779B9u), kSecond * c.w[2],
       high_product(kFirst, c.w[0]) ^ c.w[3] ^ (key.k[1] + round * 0xBB67AE85u), kFirst * c.w[0]}};
}

// The rounds are unrolled by hand: an inner loop over rounds would keep the compiler from vectorising a caller's loop
// over counters.
MOE_INLINE PhiloxWords philox4x32(PhiloxWords c, PhiloxKey key) {
  c = philox_round(philox_round(c, key, 0), key, 1);
  c = philox_round(philox_round(c, key, 2), key, 3);
  c = philox_round(philox_round(c, key, 4), key, 5);
  c = philox_round(philox_round(c, key, 6), key, 7);
  return philox_round(philox_round(c, key, 8), key, 9);
}

// The random numbers of one token; each call of `words` draws four columns.
struct TokenDraws {
  uint32_t c1, c2, c3;
  PhiloxKey key;

  MOE_INLINE PhiloxWords words(int64_t column) const {
    return philox4x32({{static_cast<uint32_t>(column / 4), c1, c2, c3}}, key);
  }
};

MOE_INLINE TokenDraws token_draws(const RngSource& rng, Stream stream, int64_t t) {
  const uint64_t seed = static_cast<uint64_t>(rng.state[0]), layer = static_cast<uint64_t>(rng.state[1]);
  const uint64_t token = static_cast<uint64_t>(rng.token_idx != nullptr ? rng.token_idx[t] : rng.state[3] + t);
  const uint64_t last = (layer & 0xFFFFu) << 16 | (static_cast<uint64_t>(stream) & 0xFFu) << 8 | (token >> 32 & 0xFFu);
  return {
      static_cast<uint32_t>(token),
      static_cast<uint32_t>(rng.state[2]),
      static_cast<uint32_t>(last),
      {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}}};
}

// Uniform number in [0, 1), a multiple of 2^-24, which float holds exactly.
MOE_INLINE float to_uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
}

// log(x) to about one unit in the last place, for normal x > 0. x = 2^n m, m in [sqrt 1/2, sqrt 2).
MOE_INLINE float log_positive(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  const int32_t n = (bits - 0x3F3504F3) >> 23;
  const float f = bit_cast<float>(bits - n * (1 << 23)) - 1.0f;
  float p = 7.0376836292e-2f;
  p = fma_acc(p, f, -1.1514610310e-1f);
  p = fma_acc(p, f, 1.1676998740e-1f);
  p = fma_acc(p, f, -1.2420140846e-1f);
  p = fma_acc(p, f, 1.4249322787e-1f);
  p = fma_acc(p, f, -1.6668057665e-1f);
  p = fma_acc(p, f, 2.0000714765e-1f);
  p = fma_acc(p, f, -2.4999993993e-1f);
  p = fma_acc(p, f, 3.3333331174e-1f);
  const float exponent = static_cast<float>(n), square = f * f;
  const float tail = fma_acc(-0.5f, square, fma_acc(p * f, square, exponent * -2.12194440e-4f));
  return fma_acc(exponent, 0.693359375f, f + tail);
}

MOE_INLINE double log_positive(double x) {
#if defined(__CUDA_ARCH__)
  return ::log(x);
#else
  return __builtin_log(x);
#endif
}

MOE_INLINE float sqrt_acc(float x) {
#if defined(__CUDA_ARCH__)
  return ::sqrtf(x);
#else
  return __builtin_sqrtf(x);
#endif
}

struct NormalPair {
  float first, second;
};

// Box-Muller: sqrt(-2 log u) (cos v, sin v). u in (0, 1] has 24 bits, hence results are at most 5.77. v is a turn of 32
// bits, split into its nearest quarter and a rest of at most an eighth.
MOE_INLINE NormalPair to_normals(uint32_t radius_word, uint32_t angle_word) {
  const float u = static_cast<float>(static_cast<int32_t>(radius_word >> 8) + 1) * 0x1p-24f;
  const float radius = sqrt_acc(-2.0f * log_positive(u));
  const uint32_t shifted = angle_word + 0x20000000u;
  const uint32_t quarter = shifted >> 30;
  const int32_t rest = static_cast<int32_t>(shifted & 0x3FFFFFFFu) - 0x20000000;
  const float a = static_cast<float>(rest) * (1.57079632679f * 0x1p-30f);
  const float z = a * a;
  const float sine = a + a * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
  const float cosine = 1.0f - 0.5f * z + z * z * (4.166664568e-2f + z * (-1.388731625e-3f + z * 2.443315711809948e-5f));
  const bool swap = (quarter & 1u) != 0;
  const float c = swap ? sine : cosine, s = swap ? cosine : sine;
  return {(quarter == 1 || quarter == 2 ? -radius : radius) * c, (quarter >= 2 ? -radius : radius) * s};
}

} // namespace
} // namespace moe_ext
