// One row of a matrix of 8 or 4 bits times some tokens, compiled once per instruction set. What is read once from
// memory is made float in registers and multiplied with up to four tokens. Sums go through 16 lanes, within a block and
// over the blocks, and products are rounded before they are added: the same bits everywhere.
#include "quantize/quantized_mm_tables.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moe_ext::quantized_mm::MOE_ISA {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTokens = 4;
constexpr int64_t kAhead = 4096; // bytes; a row is short for the processor's own prefetcher

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

template <typename Vector>
MOE_INLINE void load(Vector* to, const void* from) {
  __builtin_memcpy(to, from, sizeof(Vector));
}

// Sixteen signed bytes; the compiler would take them one by one.
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

template <int kBits, int kCount>
MOE_INLINE void row_tokens(const RowArgs& args, int64_t first_token) {
  const float* x = args.x + first_token * args.dim;
  const float* scale = args.scales;
  Floats sums[kCount] = {};
  for (int64_t begin = 0; begin < args.dim; begin += args.block, ++scale) {
    // Two sums, so that an addition need not wait for the last one.
    Floats even[kCount] = {}, odd[kCount] = {};
    for (int64_t i = begin; i < begin + args.block; i += 2 * kLanes) {
      __builtin_prefetch(args.codes + i * kBits / 8 + kAhead);
      Ints low, high;
      load_bytes(&low, args.codes + i * kBits / 8);
      if constexpr (kBits == 4) {
        // Arithmetic shifts: the low half of a byte and the high one.
        high = low >> 4;
        low = (low << 28) >> 28;
      } else {
        load_bytes(&high, args.codes + i + kLanes);
      }
      const Floats first = __builtin_convertvector(low, Floats), second = __builtin_convertvector(high, Floats);
      for (int t = 0; t < kCount; ++t) {
        Floats near, far;
        load(&near, x + t * args.dim + i);
        load(&far, x + t * args.dim + i + kLanes);
        even[t] += first * near;
        odd[t] += second * far;
      }
    }
    for (int t = 0; t < kCount; ++t) {
      sums[t] += (even[t] + odd[t]) * *scale;
    }
  }
  for (int t = 0; t < kCount; ++t) {
    float sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sum += sums[t][lane];
    }
    args.sums[first_token + t] = sum;
  }
}

template <int kBits>
void row(const RowArgs& args) {
  int64_t t = 0;
  for (; t + kTokens <= args.num_tokens; t += kTokens) {
    row_tokens<kBits, kTokens>(args, t);
  }
  for (; t < args.num_tokens; ++t) {
    row_tokens<kBits, 1>(args, t);
  }
}

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {row<8>, row<4>};

} // namespace moe_ext::quantized_mm::MOE_ISA
