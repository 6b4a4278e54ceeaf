// Loops of packing by mask, compiled once per instruction set. With AVX-512, sixteen elements of 2 or 4 bytes are a
// vector of 32-bit lanes, which is compressed or expanded in a register. Stores are masked, so that nothing is written
// past the end. Otherwise the loops visit the set bits of a word one by one.
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
      // Only the last vector may reach beyond x, so only that load is masked.
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

constexpr int64_t kSums = 16;
constexpr int64_t kTokens = 4; // tokens that share one expansion of a row

MOE_INLINE float sum_of(const float* lanes) {
  float sum = 0;
  for (int64_t lane = 0; lane < kSums; ++lane) {
    sum += lanes[lane];
  }
  return sum;
}

MOE_INLINE float value_of(uint32_t bits) {
  return bit_cast<float>(bits);
}

MOE_INLINE float value_of(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 2; // rows that share the loads of the tokens

MOE_INLINE __m512 values_of(__m512i widened, const uint32_t*) {
  return _mm512_castsi512_ps(widened);
}

MOE_INLINE __m512 values_of(__m512i widened, const uint16_t*) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(widened, 16));
}

// Multiplies kRows rows from `first_row` on, with values from row_values[r] on, with kCount tokens.
template <int kRows, int kCount, typename Bits>
MOE_INLINE void multiply(const RowsArgs& args, const Bits* const* row_values, int64_t first_row, int64_t first_token) {
  __m512 sums[kRows][kCount];
  const Bits* values[kRows];
  for (int r = 0; r < kRows; ++r) {
    values[r] = row_values[r];
    for (int t = 0; t < kCount; ++t) {
      sums[r][t] = _mm512_setzero_ps();
    }
  }
  const uint8_t* const bitmap = args.bitmap + first_row * (args.dim / 8);
  const float* const x = args.x + first_token * args.dim;
  for (int64_t i = 0; i < args.dim; i += kWord) {
    uint64_t words[kRows], any = 0;
    for (int r = 0; r < kRows; ++r) {
      words[r] = word_at(bitmap + r * (args.dim / 8), i, args.dim);
      any |= words[r];
    }
    for (int64_t lane = 0; lane < kWord && any >> lane != 0; lane += kLanes) {
      __m512 of_tokens[kCount];
      for (int t = 0; t < kCount; ++t) {
        of_tokens[t] = _mm512_loadu_ps(x + t * args.dim + i + lane);
      }
      for (int r = 0; r < kRows; ++r) {
        const __mmask16 mask = static_cast<__mmask16>(words[r] >> lane);
        const int marks = __builtin_popcount(mask);
        const __m512i some = some_widened(values[r], first(marks));
        const __m512 row = values_of(_mm512_maskz_expand_epi32(mask, some), values[r]);
        values[r] += marks;
        for (int t = 0; t < kCount; ++t) {
          // The mask leaves out pruned elements: zero times an infinite element of a token would be NaN.
          sums[r][t] = _mm512_mask_add_ps(sums[r][t], mask, sums[r][t], _mm512_mul_ps(row, of_tokens[t]));
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kCount; ++t) {
      alignas(64) float lanes[kSums];
      _mm512_store_ps(lanes, sums[r][t]);
      args.sums[(first_row + r) * args.num_tokens + first_token + t] = sum_of(lanes);
    }
  }
}
#else
constexpr int kRowsAtOnce = 1;

template <int kRows, int kCount, typename Bits>
MOE_INLINE void multiply(const RowsArgs& args, const Bits* const* row_values, int64_t first_row, int64_t first_token) {
  static_assert(kRows == 1);
  float lanes[kCount][kSums] = {};
  const float* x = args.x + first_token * args.dim;
  for_marks(args.bitmap + first_row * (args.dim / 8), args.dim, [&](int64_t place, int64_t i) {
    const float value = value_of(row_values[0][place]);
    for (int t = 0; t < kCount; ++t) {
      lanes[t][i % kSums] += value * x[t * args.dim + i];
    }
  });
  for (int t = 0; t < kCount; ++t) {
    args.sums[first_row * args.num_tokens + first_token + t] = sum_of(lanes[t]);
  }
}
#endif

// Multiplies kRows rows with all tokens. Returns a pointer to the values of the next row.
template <int kRows, typename Bits>
MOE_INLINE const Bits* multiply_rows(const RowsArgs& args, const Bits* values, int64_t first_row) {
  const Bits* row_values[kRows];
  for (int r = 0; r < kRows; ++r) {
    row_values[r] = values;
    values += count_bits(args.bitmap + (first_row + r) * (args.dim / 8), args.dim / 8);
  }
  int64_t t = 0;
  for (; t + kTokens <= args.num_tokens; t += kTokens) {
    multiply<kRows, kTokens>(args, row_values, first_row, t);
  }
  switch (args.num_tokens - t) {
    case 3:
      multiply<kRows, 3>(args, row_values, first_row, t);
      break;
    case 2:
      multiply<kRows, 2>(args, row_values, first_row, t);
      break;
    case 1:
      multiply<kRows, 1>(args, row_values, first_row, t);
      break;
  }
  return values;
}

template <typename Bits>
void multiply_all(const RowsArgs& args, const Bits* values) {
  int64_t row = 0;
  for (; row + kRowsAtOnce <= args.num_rows; row += kRowsAtOnce) {
    values = multiply_rows<kRowsAtOnce>(args, values, row);
  }
  for (; row < args.num_rows; ++row) {
    values = multiply_rows<1>(args, values, row);
  }
}

template <typename Bits>
constexpr MaskKernels<Bits> kMaskKernels = {pack_bits<Bits>, pack<Bits>, unpack<Bits>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    kMaskKernels<uint8_t>,  kMaskKernels<uint16_t>, kMaskKernels<uint32_t>, kMaskKernels<uint64_t>, count_bits,
    multiply_all<uint32_t>, multiply_all<uint16_t>};

} // namespace moe_ext::mask::MOE_ISA
