// Vectors of the processor's width, for loops that the compiler does not vectorise well by itself. Results have the
// same bits on every instruction set. Internal linkage, as simd.h.
#pragma once

#include "common/simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The warning is about passing vectors that the processor lacks to functions. All functions here are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace moe_ext {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = uint16_t __attribute__((vector_size(2 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using SignedBytes = int8_t __attribute__((vector_size(kLanes)));

template <typename V>
MOE_INLINE V load(const void* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <typename V>
MOE_INLINE void store(void* to, V vector) {
  __builtin_memcpy(to, &vector, sizeof(vector));
}

// Intrinsics, because the compiler would convert words in halves, and bytes one by one.
MOE_INLINE Words widened(Shorts shorts) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(shorts)));
#else
  return __builtin_convertvector(shorts, Words);
#endif
}

MOE_INLINE Shorts narrowed(Words words) {
#if defined(__AVX512F__)
  return bit_cast<Shorts>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(words)));
#else
  return __builtin_convertvector(words, Shorts);
#endif
}

MOE_INLINE Words widened(Bytes bytes) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_cvtepu8_epi32(bit_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes))));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

MOE_INLINE Ints widened(SignedBytes bytes) {
#if defined(__AVX512F__)
  return bit_cast<Ints>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  return bit_cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes))));
#else
  return __builtin_convertvector(bytes, Ints);
#endif
}

MOE_INLINE Bytes lowest_bytes(Words words) {
#if defined(__AVX512F__)
  return bit_cast<Bytes>(_mm512_cvtepi32_epi8(bit_cast<__m512i>(words)));
#elif defined(__AVX2__)
  const __m256i first = _mm256_set1_epi32(0x0C080400);
  const __m256i halves = _mm256_shuffle_epi8(bit_cast<__m256i>(words), first);
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  return bit_cast<Bytes>(_mm_cvtsi128_si64(both));
#else
  return __builtin_convertvector(words, Bytes);
#endif
}

// The largest lane. No lane may be negative.
MOE_INLINE int32_t largest_lane(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(bit_cast<__m512i>(lanes));
#else
  int32_t most = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    most = lanes[i] > most ? lanes[i] : most;
  }
  return most;
#endif
}

MOE_INLINE Floats splat(float x) {
  return x - Floats{};
}

// min(x, high) by lane; `high` if x is NaN.
MOE_INLINE Floats at_most(float high, Floats x) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_maskz_min_ps(-1, bit_cast<__m512>(x), bit_cast<__m512>(splat(high))));
#elif defined(__AVX__)
  return bit_cast<Floats>(_mm256_min_ps(bit_cast<__m256>(x), bit_cast<__m256>(splat(high))));
#else
  return x < high ? x : splat(high);
#endif
}

// Rounds to bfloat16, to nearest, ties to even. The result is in the upper 16 bits; the lower 16 bits are undefined.
MOE_INLINE Words rounded(Floats x) {
  const Words bits = bit_cast<Words>(x);
  const Words up = bits + (0x7FFFu + ((bits >> 16) & 1u));
  return x != x ? 0x7FC00000u + Words{} : up;
}

// Conversions between 16-bit elements and floats, as `to_acc` and `from_acc` but for the sign of NaN.
template <typename T>
MOE_INLINE Floats floats_of(Shorts shorts) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return bit_cast<Floats>(widened(shorts) << 16);
  } else {
#if defined(__AVX512F__)
    return bit_cast<Floats>(_mm512_maskz_cvtph_ps(-1, bit_cast<__m256i>(shorts)));
#elif defined(__F16C__)
    return bit_cast<Floats>(_mm256_cvtph_ps(bit_cast<__m128i>(shorts)));
#else
    Half in[kLanes];
    Floats out;
    store(in, shorts);
    for (int64_t i = 0; i < kLanes; ++i) {
      out[i] = to_acc(in[i]);
    }
    return out;
#endif
  }
}

template <typename T>
MOE_INLINE Shorts shorts_of(Floats floats) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return narrowed(rounded(floats) >> 16);
  } else {
    const Floats in = floats != floats ? splat(__builtin_nanf("")) : floats;
#if defined(__AVX512F__)
    return bit_cast<Shorts>(_mm512_maskz_cvtps_ph(-1, bit_cast<__m512>(in), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return bit_cast<Shorts>(_mm256_cvtps_ph(bit_cast<__m256>(in), _MM_FROUND_TO_NEAREST_INT));
#else
    Half out[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      out[i] = from_acc<Half>(in[i]);
    }
    return load<Shorts>(out);
#endif
  }
}

// Load neighbouring elements as floats, and store floats as elements.
template <typename T>
MOE_INLINE Floats load_floats(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return load<Floats>(from);
  } else {
    return floats_of<T>(load<Shorts>(from));
  }
}

template <typename T>
MOE_INLINE void store_floats(T* to, Floats floats) {
  if constexpr (std::is_same_v<T, float>) {
    store(to, floats);
  } else {
    store(to, shorts_of<T>(floats));
  }
}

} // namespace
} // namespace moe_ext
