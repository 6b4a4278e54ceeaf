// Products of a matrix of 8 or 4 bits with some tokens, compiled once per instruction set. Codes are read from memory
// once, converted to float in registers and multiplied with up to four tokens. Sums go through 16 lanes, within and
// over blocks, and products are rounded before they are added, so that every instruction set gives the same bits.
#include "quantize/quantized_mm_tables.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moe_ext::quantized_mm::MOE_ISA {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTokens = 4;
// Rows that are multiplied together, limited by the registers for their sums with four tokens.
#if defined(__AVX512F__)
constexpr int64_t kRowsAtOnce = 2;
#else
constexpr int64_t kRowsAtOnce = 1;
#endif
// Distance of the prefetch in bytes. A row is too short for the hardware prefetcher.
constexpr int64_t kAhead = 4096;

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

template <typename Vector>
MOE_INLINE void load(Vector* to, const void* from) {
  __builtin_memcpy(to, from, sizeof(Vector));
}

// Loads sixteen signed bytes, by intrinsics: the compiler would load them one by one.
MOE_INLINE void load_bytes(Ints* to, const uint8_t* from) {
#if defined(__AVX512F__)
  const __m512i ints = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  __builtin_memcpy(to, &ints, sizeof(ints));
#elif defined(__AVX2__)
  const __m256i halves[2] = {
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))),
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8)))};
  __builtin_memcpy(to, halves, sizeof(halves));
#else
  int32_t ints[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    ints[lane] = static_cast<int8_t>(from[lane]);
  }
  __builtin_memcpy(to, ints, sizeof(ints));
#endif
}

// Multiplies kRows rows from `first_row` on with kCount tokens from `first_token` on. Rows share the loads of tokens.
template <int kBits, int kRows, int kCount>
MOE_INLINE void multiply(const RowsArgs& args, int64_t first_row, int64_t first_token) {
  const int64_t row_bytes = args.dim * kBits / 8, num_blocks = args.dim / args.block;
  const uint8_t* const codes = args.codes + first_row * row_bytes;
  const float* const x = args.x + first_token * args.dim;
  const float* scale = args.scales + first_row * num_blocks;
  Floats sums[kRows][kCount] = {};
  for (int64_t begin = 0; begin < args.dim; begin += args.block, ++scale) {
    // Two sums, so that an addition need not wait for the result of the previous one.
    Floats even[kRows][kCount] = {}, odd[kRows][kCount] = {};
    for (int64_t i = begin; i < begin + args.block; i += 2 * kLanes) {
      Floats first[kRows], second[kRows];
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* const at = codes + r * row_bytes + i * kBits / 8;
        __builtin_prefetch(at + kAhead);
        Ints low, high;
        load_bytes(&low, at);
        if constexpr (kBits == 4) {
          // Arithmetic shifts sign-extend the high and the low half of each byte.
          high = low >> 4;
          low = (low << 28) >> 28;
        } else {
          load_bytes(&high, at + kLanes);
        }
        first[r] = __builtin_convertvector(low, Floats);
        second[r] = __builtin_convertvector(high, Floats);
      }
      for (int t = 0; t < kCount; ++t) {
        Floats near, far;
        load(&near, x + t * args.dim + i);
        load(&far, x + t * args.dim + i + kLanes);
        for (int r = 0; r < kRows; ++r) {
          even[r][t] += first[r] * near;
          odd[r][t] += second[r] * far;
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kCount; ++t) {
        sums[r][t] += (even[r][t] + odd[r][t]) * scale[r * num_blocks];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kCount; ++t) {
      float sum = 0;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        sum += sums[r][t][lane];
      }
      args.sums[(first_row + r) * args.num_tokens + first_token + t] = sum;
    }
  }
}

template <int kBits, int kRows>
MOE_INLINE void multiply_rows(const RowsArgs& args, int64_t first_row) {
  int64_t t = 0;
  for (; t + kTokens <= args.num_tokens; t += kTokens) {
    multiply<kBits, kRows, kTokens>(args, first_row, t);
  }
  switch (args.num_tokens - t) {
    case 3:
      return multiply<kBits, kRows, 3>(args, first_row, t);
    case 2:
      return multiply<kBits, kRows, 2>(args, first_row, t);
    case 1:
      return multiply<kBits, kRows, 1>(args, first_row, t);
  }
}

template <int kBits>
void rows(const RowsArgs& args) {
  int64_t row = 0;
  for (; row + kRowsAtOnce <= args.num_rows; row += kRowsAtOnce) {
    multiply_rows<kBits, kRowsAtOnce>(args, row);
  }
  for (; row < args.num_rows; ++row) {
    multiply_rows<kBits, 1>(args, row);
  }
}

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {rows<8>, rows<4>};

} // namespace moe_ext::quantized_mm::MOE_ISA
