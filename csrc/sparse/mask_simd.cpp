// Loops of packing by mask, compiled once per instruction set. Sixteen elements are one vector of 32-bit lanes,
// compressed or expanded in a register; stores are masked, so that nothing is written past the end. Without AVX-512 the
// set bits of a word are walked.
#include "sparse/mask_tables.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace moe_ext::mask::MOE_ISA {
namespace {

constexpr int64_t kWord = 64;

MOE_INLINE uint64_t word_at(const uint8_t* bitmap, int64_t i, int64_t n) {
  uint64_t word = 0;
  if (n - i >= kWord) {
    __builtin_memcpy(&word, bitmap + i / 8, sizeof(word));
    return word;
  }
  for (int64_t byte = 0; 8 * byte < n - i; ++byte) {
    word |= static_cast<uint64_t>(bitmap[i / 8 + byte]) << (8 * byte);
  }
  return word & ((uint64_t{1} << (n - i)) - 1);
}

template <typename Bits>
void pack_bits(uint8_t* bitmap, const Bits* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint32_t byte = 0;
    for (int64_t b = 0; b < 8; ++b) {
      byte |= static_cast<uint32_t>(x[i + b] != 0) << b;
    }
    bitmap[i / 8] = static_cast<uint8_t>(byte);
  }
  if (i < n) {
    uint32_t byte = 0;
    for (int64_t b = 0; i + b < n; ++b) {
      byte |= static_cast<uint32_t>(x[i + b] != 0) << b;
    }
    bitmap[i / 8] = static_cast<uint8_t>(byte);
  }
}

// Calls f(place, i) for every set bit i of n, in order; returns their number.
template <typename F>
MOE_INLINE int64_t for_marks(const uint8_t* bitmap, int64_t n, F f) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kWord) {
    for (uint64_t rest = word_at(bitmap, i, n); rest != 0; rest &= rest - 1) {
      f(count++, i + __builtin_ctzll(rest));
    }
  }
  return count;
}

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;

MOE_INLINE __m512i widened(const uint16_t* x) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

MOE_INLINE __m512i widened(const uint32_t* x) {
  return _mm512_loadu_si512(x);
}

MOE_INLINE __m512i some_widened(const uint16_t* x, __mmask16 some) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, x));
}

MOE_INLINE __m512i some_widened(const uint32_t* x, __mmask16 some) {
  return _mm512_maskz_loadu_epi32(some, x);
}

MOE_INLINE void store_some(uint16_t* to, __mmask16 some, __m512i x) {
  _mm256_mask_storeu_epi16(to, some, _mm512_cvtepi32_epi16(x));
}

MOE_INLINE void store_some(uint32_t* to, __mmask16 some, __m512i x) {
  _mm512_mask_storeu_epi32(to, some, x);
}

MOE_INLINE __mmask16 first(int count) {
  return static_cast<__mmask16>((uint32_t{1} << count) - 1);
}

template <typename Bits>
int64_t pack_lanes(Bits* packed, const Bits* x, const uint8_t* bitmap, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kWord) {
    const uint64_t word = word_at(bitmap, i, n);
    for (int64_t lane = 0; lane < kWord && word >> lane != 0; lane += kLanes) {
      const __mmask16 mask = static_cast<__mmask16>(word >> lane);
      const int marks = __builtin_popcount(mask);
      // Marks lie before the end: only the last vector is loaded in part.
      const __m512i all = i + lane + kLanes <= n ? widened(x + i + lane)
                                                 : some_widened(x + i + lane, first(static_cast<int>(n - i - lane)));
      store_some(packed + count, first(marks), _mm512_maskz_compress_epi32(mask, all));
      count += marks;
    }
  }
  return count;
}

template <typename Bits>
int64_t unpack_lanes(Bits* out, const Bits* packed, const uint8_t* bitmap, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kWord) {
    const uint64_t word = word_at(bitmap, i, n);
    for (int64_t lane = 0; lane < kWord && i + lane < n; lane += kLanes) {
      const __mmask16 mask = static_cast<__mmask16>(word >> lane);
      const int marks = __builtin_popcount(mask);
      const __m512i some = some_widened(packed + count, first(marks));
      const int64_t left = n - i - lane;
      store_some(
          out + i + lane, left < kLanes ? first(static_cast<int>(left)) : __mmask16(0xFFFF),
          _mm512_maskz_expand_epi32(mask, some));
      count += marks;
    }
  }
  return count;
}
#endif

template <typename Bits>
int64_t pack(Bits* packed, const Bits* x, const uint8_t* bitmap, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Bits) == 2 || sizeof(Bits) == 4) {
    return pack_lanes(packed, x, bitmap, n);
  }
#endif
  return for_marks(bitmap, n, [&](int64_t place, int64_t i) { packed[place] = x[i]; });
}

template <typename Bits>
int64_t unpack(Bits* out, const Bits* packed, const uint8_t* bitmap, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Bits) == 2 || sizeof(Bits) == 4) {
    return unpack_lanes(out, packed, bitmap, n);
  }
#endif
  for (int64_t i = 0; i < n; ++i) {
    out[i] = 0;
  }
  return for_marks(bitmap, n, [&](int64_t place, int64_t i) { out[i] = packed[place]; });
}

int64_t count_bits(const uint8_t* bitmap, int64_t num_bytes) {
  int64_t count = 0;
  for (int64_t i = 0; i < 8 * num_bytes; i += kWord) {
    count += __builtin_popcountll(word_at(bitmap, i, 8 * num_bytes));
  }
  return count;
}

template <typename Bits>
constexpr MaskKernels<Bits> kMaskKernels = {pack_bits<Bits>, pack<Bits>, unpack<Bits>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    kMaskKernels<uint8_t>, kMaskKernels<uint16_t>, kMaskKernels<uint32_t>, kMaskKernels<uint64_t>, count_bits};

} // namespace moe_ext::mask::MOE_ISA
