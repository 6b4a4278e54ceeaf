// Stores that bypass the caches, for results too large to be still cached when they are read next. An ordinary store
// first reads the line that it overwrites: a third of the traffic of a copy. Internal linkage, as simd.h.
#pragma once

#include <cstdint>

#include "common/simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace moe_ext {
namespace {

constexpr int64_t kLineBytes = 64;

// Return true if rows of `row_bytes` from `base` on are whole lines, and together too large to be found in a cache
// later.
MOE_INLINE bool worth_streaming(const void* base, int64_t num_rows, int64_t row_bytes) {
  constexpr int64_t kLeastBytes = int64_t{32} << 20;
  return reinterpret_cast<uintptr_t>(base) % kLineBytes == 0 && row_bytes % kLineBytes == 0 &&
         num_rows * row_bytes >= kLeastBytes;
}

// Copies whole lines to an address that is a multiple of kLineBytes. Other threads may not see them before stream_end.
MOE_INLINE void stream(void* to, const void* from, int64_t bytes) {
#if defined(__AVX512F__)
  auto* out = static_cast<__m512i*>(to);
  const auto* in = static_cast<const __m512i*>(from);
  for (int64_t i = 0; i < bytes / kLineBytes; ++i) {
    _mm512_stream_si512(out + i, _mm512_loadu_si512(in + i));
  }
#elif defined(__AVX__)
  auto* out = static_cast<__m256i*>(to);
  const auto* in = static_cast<const __m256i*>(from);
  for (int64_t i = 0; i < bytes / 32; i += 2) {
    const __m256i a = _mm256_loadu_si256(in + i), b = _mm256_loadu_si256(in + i + 1);
    _mm256_stream_si256(out + i, a);
    _mm256_stream_si256(out + i + 1, b);
  }
#elif defined(__SSE2__)
  auto* out = static_cast<__m128i*>(to);
  const auto* in = static_cast<const __m128i*>(from);
  for (int64_t i = 0; i < bytes / 16; i += 4) {
    const __m128i a = _mm_loadu_si128(in + i), b = _mm_loadu_si128(in + i + 1);
    const __m128i c = _mm_loadu_si128(in + i + 2), d = _mm_loadu_si128(in + i + 3);
    _mm_stream_si128(out + i, a);
    _mm_stream_si128(out + i + 1, b);
    _mm_stream_si128(out + i + 2, c);
    _mm_stream_si128(out + i + 3, d);
  }
#else
  __builtin_memcpy(to, from, bytes);
#endif
}

MOE_INLINE void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

} // namespace
} // namespace moe_ext
