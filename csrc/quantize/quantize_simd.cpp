// Loops of the block quantisers, compiled once per instruction set. A block is read once into a buffer that stays in
// the L1 cache; its largest element or the sum of its magnitudes, and then its codes, are computed from there.
#include "common/stream.h"
#include "quantize/quantize_rows_loops.h"
#include "quantize/quantize_tables.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moe_ext::quantize::MOE_ISA {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kAhead = 2048;
// Distance in elements of the prefetch into the L2 cache, for loops that are faster than the memory.
constexpr int64_t kFarAhead = 8192;
constexpr int kSecondCache = 2;

struct Block {
  int64_t size;
  int64_t padded;   // size rounded up to whole vectors; zeros fill the rest
  uint32_t largest; // key of the largest magnitude
};

// Writes a = x plus residual of a block to `a`.
template <typename T>
MOE_INLINE Block load_block(const QuantizeArgs<T>& args, int64_t block, float* __restrict a) {
  const int64_t begin = block * args.block;
  const int64_t n = args.numel - begin < args.block ? args.numel - begin : args.block;
  const T* __restrict x = args.x + begin;
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(x + kAhead + i);
  }
  // The top bit of a key is 0, and more instruction sets have a maximum of signed numbers.
  int32_t most = 0;
  if (args.residual_in != nullptr) {
    const float* __restrict residual = args.residual_in + begin;
    for (int64_t i = 0; i < n; i += kLanes) {
      __builtin_prefetch(residual + kAhead + i);
    }
    for (int64_t i = 0; i < n; ++i) {
      a[i] = residual[i] + to_acc(x[i]);
      const int32_t key = static_cast<int32_t>(key_of(a[i]));
      most = key > most ? key : most;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      a[i] = to_acc(x[i]);
      const int32_t key = static_cast<int32_t>(key_of(a[i]));
      most = key > most ? key : most;
    }
  }
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < padded; ++i) {
    a[i] = 0;
  }
  return {n, padded, static_cast<uint32_t>(most)};
}

// Sum of |a| * factor, in an order that is the same for every instruction set.
MOE_INLINE float magnitude_sum(const float* a, int64_t n, float factor) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += bit_cast<float>(key_of(a[i + lane])) * factor;
    }
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

#if defined(__AVX512F__)
// Largest key of n elements, a whole number of vectors.
MOE_INLINE uint32_t largest_of(const float* x, int64_t n) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += kLanes) {
    __builtin_prefetch(x + kFarAhead + i, 0, kSecondCache);
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7FFFFFFF)));
  }
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(most));
}

// Sum of the lanes, in the order in which `magnitude_sum` folds them.
MOE_INLINE float folded(__m512 lanes) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Writes signs and sum of magnitudes of n elements, whole vectors, in one read. Returns the largest key.
MOE_INLINE uint32_t signs_of(const float* x, int64_t n, uint8_t* out, float* sum) {
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF));
  __m512 lanes = _mm512_setzero_ps();
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += kLanes) {
    __builtin_prefetch(x + kFarAhead + i, 0, kSecondCache);
    const __m512 a = _mm512_loadu_ps(x + i), key = _mm512_and_ps(a, magnitude);
    most = _mm512_max_epi32(most, _mm512_castps_si512(key));
    lanes = _mm512_add_ps(lanes, key);
    const __mmask16 bits = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_LT_OQ);
    __builtin_memcpy(out + i / 8, &bits, sizeof(bits));
  }
  *sum = folded(lanes);
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(most));
}
#endif

// Draws a random word for each of n elements from `begin` on; n is rounded up to a multiple of four.
MOE_INLINE void draw(uint32_t* words, const RngSource& rng, int64_t begin, int64_t n) {
  const TokenDraws draws = rounding_draws(rng, begin);
  for (int64_t i = 0; i < n; i += 4) {
    const PhiloxWords four = draws.words(begin + i);
    for (int j = 0; j < 4; ++j) {
      words[i + j] = four.w[j];
    }
  }
}

template <Format kFormat, bool kRandom>
MOE_INLINE void encode(
    const float* __restrict a, const uint32_t* __restrict words, Scaling s, int64_t n, int8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = code_of<kFormat, kRandom>(a[i], s, kRandom ? words[i] : 0u);
  }
}

MOE_INLINE bool is_far(int32_t step) {
  return step >= kFarStep || step <= -kFarStep;
}

// Logs n elements, whose decoded codes are `values`. Far steps are rare, so flags are tested eight at a time.
template <typename T>
MOE_INLINE void log_rest(
    const QuantizeArgs<T>& args, int64_t first, const float* __restrict a, const float* __restrict values, int64_t n,
    UndoLog* __restrict log) {
  alignas(64) uint8_t far[kLargestBlock + 8];
  const float* __restrict before = args.residual + first;
  const T* __restrict x = args.x + first;
  int16_t* __restrict steps = log->steps + first;
  for (int64_t i = 0; i < n; ++i) {
    const float rest = a[i] - values[i];
    const float guess = (rest + values[i]) - to_acc(x[i]);
    const int32_t step = static_cast<int32_t>(bit_cast<uint32_t>(before[i]) - bit_cast<uint32_t>(guess));
    const int32_t least = step < -kFarStep ? -kFarStep : step;
    const int32_t near = least > kFarStep ? kFarStep : least;
    steps[i] = static_cast<int16_t>(near);
    far[i] = static_cast<uint8_t>(is_far(near));
  }
  __builtin_memset(far + n, 0, 8);
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, far + i, sizeof(eight));
    for (; eight != 0; eight &= eight - 1) {
      log->values[log->count++] = before[i + __builtin_ctzll(eight) / 8];
    }
  }
}

// Writes the residual a - values of n elements, and logs it unless `log` is null.
template <typename T>
MOE_INLINE void keep_rest(
    const QuantizeArgs<T>& args, int64_t first, const float* __restrict a, const float* __restrict values, int64_t n,
    UndoLog* log) {
  if (log != nullptr) {
    log_rest(args, first, a, values, n, log);
  }
  float* __restrict residual = args.residual + first;
  for (int64_t i = 0; i < n; ++i) {
    residual[i] = a[i] - values[i];
  }
}

// Packs the low kBits of eight bytes without gaps; `spread` moves them back, to the high bits of eight bytes.
template <int64_t kBits>
MOE_INLINE uint64_t squeeze(uint64_t word) {
  constexpr uint64_t kOne = (uint64_t{1} << kBits) - 1, kTwo = (uint64_t{1} << 2 * kBits) - 1;
  constexpr uint64_t kFour = (uint64_t{1} << 4 * kBits) - 1;
  word = (word & kOne * 0x0001000100010001u) | (word & kOne * 0x0100010001000100u) >> (8 - kBits);
  word = (word & kTwo * 0x0000000100000001u) | (word & kTwo * 0x0001000000010000u) >> 2 * (8 - kBits);
  return (word & kFour) | (word & kFour << 32) >> 4 * (8 - kBits);
}

template <int64_t kBits>
MOE_INLINE uint64_t spread(uint64_t word) {
  constexpr uint64_t kOne = (uint64_t{1} << kBits) - 1, kTwo = (uint64_t{1} << 2 * kBits) - 1;
  constexpr uint64_t kFour = (uint64_t{1} << 4 * kBits) - 1;
  word = (word & kFour) | (word & kFour << 4 * kBits) << 4 * (8 - kBits);
  word = (word & kTwo * 0x0000000100000001u) | (word & (kTwo << 2 * kBits) * 0x0000000100000001u) << 2 * (8 - kBits);
  word = (word & kOne * 0x0001000100010001u) | (word & (kOne << kBits) * 0x0001000100010001u) << (8 - kBits);
  return word << (8 - kBits);
}

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// Packs n codes. Reads a multiple of eight codes.
template <Format kFormat>
MOE_INLINE void pack(uint8_t* __restrict out, const int8_t* __restrict codes, int64_t n) {
  constexpr int64_t kBits = bits_of(kFormat);
  if constexpr (kBits == 8) {
    __builtin_memcpy(out, codes, n);
  } else if constexpr (8 % kBits == 0) {
    constexpr int64_t kPerByte = 8 / kBits;
    for (int64_t i = 0; i < code_bytes(n, kFormat); ++i) {
      uint32_t byte = 0;
      for (int64_t j = 0; j < kPerByte; ++j) {
        byte |= (static_cast<uint8_t>(codes[kPerByte * i + j]) & ((1u << kBits) - 1)) << kBits * j;
      }
      out[i] = static_cast<uint8_t>(byte);
    }
  } else {
    alignas(64) uint64_t words[kLargestBlock / 8];
    uint8_t packed[kLargestBlock / 8 * kBits + 8];
    const int64_t eights = (n + 7) / 8;
    __builtin_memcpy(words, codes, 8 * eights);
    for (int64_t i = 0; i < eights; ++i) {
      words[i] = squeeze<kBits>(words[i]);
    }
    for (int64_t i = 0; i < eights; ++i) {
      __builtin_memcpy(packed + i * kBits, words + i, 8);
    }
    __builtin_memcpy(out, packed, code_bytes(n, kFormat));
  }
}

// Unpacks n codes into the high bits of bytes. Writes a multiple of eight codes.
template <Format kFormat>
MOE_INLINE void unpack(int8_t* __restrict codes, const uint8_t* __restrict from, int64_t n) {
  constexpr int64_t kBits = bits_of(kFormat);
  alignas(64) uint64_t words[kLargestBlock / 8];
  uint8_t packed[kLargestBlock / 8 * kBits + 8];
  const int64_t eights = (n + 7) / 8, num_bytes = code_bytes(n, kFormat);
  __builtin_memcpy(packed, from, num_bytes);
  __builtin_memset(packed + num_bytes, 0, 8);
  for (int64_t i = 0; i < eights; ++i) {
    __builtin_memcpy(words + i, packed + i * kBits, 8);
  }
  for (int64_t i = 0; i < eights; ++i) {
    words[i] = spread<kBits>(words[i]);
  }
  __builtin_memcpy(codes, words, 8 * eights);
}

// Key of the magnitude that determines the scale: the tensor's largest for a shared scale, otherwise the block's.
template <typename T>
MOE_INLINE uint32_t key_of_scale(const QuantizeArgs<T>& args, uint32_t key) {
  return args.largest != nullptr ? *args.largest : key;
}

template <typename T>
MOE_INLINE void put_scale(const QuantizeArgs<T>& args, int64_t block, float scale) {
  if (args.largest == nullptr || block == 0) {
    args.scales[block] = scale;
  }
}

// Encodes a block that is not finite: the scale NaN and codes of zero. The residual becomes a, or stays unchanged with
// a log. Other blocks are not affected.
template <typename T, Format kFormat>
__attribute__((noinline)) void refuse_block(
    const QuantizeArgs<T>& args, int64_t block, const float* a, int64_t n, const UndoLog* log) {
  const int64_t first = block * args.block;
  put_scale(args, block, bit_cast<float>(0x7FC00000u));
  __builtin_memset(args.codes + code_bytes(first, kFormat), 0, code_bytes(n, kFormat));
  if (args.residual != nullptr && log == nullptr) {
    __builtin_memcpy(args.residual + first, a, n * sizeof(float));
  }
}

// True if a block needs no copy to a buffer: whole vectors of float32 without a residual to add.
template <typename T>
MOE_INLINE bool read_in_place(const QuantizeArgs<T>& args, int64_t block) {
#if defined(__AVX512F__)
  return std::is_same_v<T, float> && args.residual_in == nullptr && args.block % kLanes == 0 &&
         (block + 1) * args.block <= args.numel;
#else
  return (void)args, (void)block, false;
#endif
}

// Sets bit i % 8 of byte i / 8 to the sign of element i; zeros are positive.
MOE_INLINE void pack_signs(uint8_t* out, const float* a, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= n; i += kLanes) {
    const __mmask16 bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(a + i), _mm512_setzero_ps(), _CMP_LT_OQ);
    __builtin_memcpy(out + i / 8, &bits, sizeof(bits));
  }
#endif
  for (; i < n; i += 8) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_loadu_ps(a + i);
    const int bits = _mm256_movemask_ps(_mm256_cmp_ps(eight, _mm256_setzero_ps(), _CMP_LT_OQ));
#else
    uint32_t bits = 0;
    for (int64_t j = 0; j < 8; ++j) {
      bits |= static_cast<uint32_t>(a[i + j] < 0) << j;
    }
#endif
    out[i / 8] = static_cast<uint8_t>(bits);
  }
}

#if defined(__AVX512F__)
// Writes x + residual of n elements, a whole number of vectors, to `a`. Returns the largest key.
MOE_INLINE uint32_t add_block(const float* x, const float* residual, int64_t n, float* a) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += kLanes) {
    __builtin_prefetch(x + kAhead + i);
    __builtin_prefetch(residual + kAhead + i);
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(residual + i), _mm512_loadu_ps(x + i));
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(sum), _mm512_set1_epi32(0x7FFFFFFF)));
    _mm512_store_ps(a + i, sum);
  }
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(most));
}

MOE_INLINE void put(void* to, __m512i value, bool streamed) {
  streamed ? _mm512_stream_si512(static_cast<__m512i*>(to), value) : _mm512_storeu_si512(to, value);
}

// Writes codes and residuals of whole cache lines of codes, with the same bits as `code_of` and `keep_rest`.
template <Format kFormat, bool kLogged>
MOE_INLINE void code_block(
    const QuantizeArgs<float>& args, int64_t first, const float* a, Scaling s, int8_t* codes, UndoLog* log) {
  constexpr int64_t kVectors = kLineBytes / kLanes;
  const __m512 bound = _mm512_set1_ps(largest_code(kFormat)), low = _mm512_set1_ps(-largest_code(kFormat));
  const __m512 lift = _mm512_set1_ps(s.lift), inverse = _mm512_set1_ps(s.inverse), scale = _mm512_set1_ps(s.scale);
  const __m512 shift = _mm512_set1_ps(12582912.0f);
  const float* const before = args.residual_in + first;
  const bool elsewhere = args.residual_in != args.residual;
  for (int64_t i = 0; i < args.block; i += kLineBytes) {
    __m512i whole[kVectors], steps[kVectors];
    __m512 rest[kVectors];
    for (int64_t j = 0; j < kVectors; ++j) {
      const int64_t at = i + kLanes * j;
      const __m512 sum = _mm512_load_ps(a + at);
      __m512 number;
      if constexpr (kFormat == Format::kFp8) {
        const Words of_fp8 = codes_of<kFormat>(bit_cast<Floats>(sum), s);
        whole[j] = bit_cast<__m512i>(of_fp8);
        number = bit_cast<__m512>(from_e4m3(of_fp8));
      } else {
        const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(sum, lift), inverse);
        const __m512 nearest = _mm512_sub_ps(_mm512_add_ps(scaled, shift), shift);
        number = _mm512_min_ps(_mm512_max_ps(nearest, low), bound);
        whole[j] = _mm512_cvtps_epi32(number);
      }
      const __m512 value = _mm512_mul_ps(number, scale);
      rest[j] = _mm512_sub_ps(sum, value);
      if constexpr (kLogged) {
        const __m512 guess = _mm512_sub_ps(_mm512_add_ps(rest[j], value), _mm512_loadu_ps(args.x + first + at));
        steps[j] = _mm512_sub_epi32(_mm512_loadu_si512(before + at), _mm512_castps_si512(guess));
      }
    }
    // In the packed bytes, each 128 bits hold four codes of every vector; the permutation restores the order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i pairs[2] = {_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3])};
    const __m512i fours =
        kFormat == Format::kFp8 ? _mm512_packus_epi16(pairs[0], pairs[1]) : _mm512_packs_epi16(pairs[0], pairs[1]);
    put(codes + i, _mm512_permutexvar_epi32(order, fours), bits_of(kFormat) == 8 && args.streamed);
    if constexpr (kLogged) {
      for (int64_t j = 0; j < kVectors; j += 2) {
        const int64_t at = i + kLanes * j;
        const __m512i pair = _mm512_permutexvar_epi64(
            _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi32(steps[j], steps[j + 1]));
        put(log->steps + first + at, pair, args.streamed);
        uint32_t far = _mm512_cmpge_epu16_mask(_mm512_abs_epi16(pair), _mm512_set1_epi16(kFarStep));
        for (; far != 0; far &= far - 1) {
          log->values[log->count++] = before[at + __builtin_ctz(far)];
        }
      }
    }
    for (int64_t j = 0; j < kVectors; ++j) {
      put(args.residual + first + i + kLanes * j, _mm512_castps_si512(rest[j]), elsewhere && args.streamed);
    }
  }
}

// Quantises whole blocks with feedback, rounding to nearest. The next block is loaded and added during the division for
// the scale of the current one.
template <Format kFormat, bool kLogged>
uint32_t feed_blocks(const QuantizeArgs<float>& args, int64_t begin, int64_t end, UndoLog* log) {
  alignas(64) float a[2][kLargestBlock];
  alignas(64) int8_t codes[kLargestBlock];
  uint32_t most = 0;
  const auto add = [&](int64_t block) {
    const int64_t first = block * args.block;
    return block < end ? add_block(args.x + first, args.residual_in + first, args.block, a[block % 2]) : 0;
  };
  uint32_t largest = add(begin);
  for (int64_t block = begin; block < end; ++block) {
    const uint32_t key = key_of_scale(args, largest);
    const Scaling s = scaling_of(bit_cast<float>(key), largest_code(kFormat));
    most = key > most ? key : most;
    largest = add(block + 1);
    if (key >= kInfinityKey<float>) {
      refuse_block<float, kFormat>(args, block, a[block % 2], args.block, log);
      continue;
    }
    uint8_t* const out = args.codes + code_bytes(block * args.block, kFormat);
    int8_t* const to = bits_of(kFormat) == 8 ? reinterpret_cast<int8_t*>(out) : codes;
    code_block<kFormat, kLogged>(args, block * args.block, a[block % 2], s, to, log);
    put_scale(args, block, s.scale);
    if constexpr (bits_of(kFormat) != 8) {
      pack<kFormat>(out, codes, args.block);
    }
  }
  if (args.streamed) {
    stream_end();
  }
  return most;
}
#endif

template <typename T, Format kFormat>
uint32_t quantize(const QuantizeArgs<T>& args, int64_t begin, int64_t end, UndoLog* log) {
  alignas(64) float a[kLargestBlock];
  alignas(64) uint32_t words[kLargestBlock];
  alignas(64) int8_t codes[kLargestBlock];
  alignas(64) float values[kLargestBlock];
  uint32_t most = 0;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    if (args.residual != nullptr && args.rng.state == nullptr && args.block % kLineBytes == 0) {
      const int64_t whole = args.numel / args.block < end ? args.numel / args.block : end;
      most = log == nullptr ? feed_blocks<kFormat, false>(args, begin, whole, log)
                            : feed_blocks<kFormat, true>(args, begin, whole, log);
      begin = whole > begin ? whole : begin;
    }
  }
#endif
  for (int64_t block = begin; block < end; ++block) {
    uint8_t* out = args.codes + code_bytes(block * args.block, kFormat);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float> && bits_of(kFormat) == 8) {
      if (args.rng.state == nullptr && read_in_place(args, block)) {
        const float* x = args.x + block * args.block;
        const uint32_t key = args.largest != nullptr ? *args.largest : largest_of(x, args.block);
        most = key > most ? key : most;
        if (key >= kInfinityKey<float>) {
          refuse_block<T, kFormat>(args, block, x, args.block, log);
          continue;
        }
        const Scaling s = scaling_of(bit_cast<float>(key), largest_code(kFormat));
        encode<kFormat, false>(x, words, s, args.block, reinterpret_cast<int8_t*>(out));
        put_scale(args, block, s.scale);
        continue;
      }
    }
#endif
    const auto [n, padded, of_block] = load_block(args, block, a);
    const uint32_t key = key_of_scale(args, of_block);
    most = key > most ? key : most;
    if (key >= kInfinityKey<float>) {
      refuse_block<T, kFormat>(args, block, a, n, log);
      continue;
    }
    const Scaling s = scaling_of(bit_cast<float>(key), largest_code(kFormat));
    if (args.rng.state != nullptr) {
      draw(words, args.rng, args.offset + block * args.block, n);
      encode<kFormat, true>(a, words, s, padded, codes);
    } else {
      encode<kFormat, false>(a, words, s, padded, codes);
    }
    put_scale(args, block, s.scale);
    pack<kFormat>(out, codes, n);
    if (args.residual != nullptr) {
      for (int64_t i = 0; i < n; ++i) {
        values[i] = value_of<kFormat>(codes[i], s.scale);
      }
      keep_rest(args, block * args.block, a, values, n, log);
    }
  }
  return most;
}

// Quantises blocks as signs with the mean magnitude as scale.
template <typename T>
uint32_t quantize_signs(const QuantizeArgs<T>& args, int64_t begin, int64_t end, UndoLog* log) {
  alignas(64) float a[kLargestBlock];
  alignas(64) float values[kLargestBlock];
  uint32_t most = 0;
  for (int64_t block = begin; block < end; ++block) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) {
      if (read_in_place(args, block)) {
        float sum;
        const uint32_t key =
            signs_of(args.x + block * args.block, args.block, args.codes + block * args.block / 8, &sum);
        if (key < kInfinityKey<float> && sign_factor(key) == 1) {
          most = key > most ? key : most;
          args.scales[block] = sign_scale(sum, args.block, 1);
          continue;
        }
      }
    }
#endif
    const auto [n, padded, key] = load_block(args, block, a);
    most = key > most ? key : most;
    if (key >= kInfinityKey<float>) {
      refuse_block<T, Format::kSign>(args, block, a, n, log);
      continue;
    }
    const float factor = sign_factor(key);
    const float scale = sign_scale(magnitude_sum(a, padded, factor), n, factor);
    args.scales[block] = scale;
    pack_signs(args.codes + block * args.block / 8, a, (n + 7) / 8 * 8);
    if (args.residual != nullptr) {
      for (int64_t i = 0; i < n; ++i) {
        values[i] = a[i] < 0 ? -scale : scale;
      }
      keep_rest(args, block * args.block, a, values, n, log);
    }
  }
  return most;
}

template <typename T>
uint32_t largest(const QuantizeArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) float a[kLargestBlock];
  uint32_t most = 0;
  for (int64_t block = begin; block < end; ++block) {
    const uint32_t key = load_block(args, block, a).largest;
    most = key > most ? key : most;
  }
  return most;
}

// Decodes n codes. `values` must have room for all codes of the last byte.
template <Format kFormat>
MOE_INLINE void decode(float* __restrict values, const uint8_t* __restrict codes, float scale, int64_t n) {
  if constexpr (kFormat == Format::kInt8) {
    for (int64_t i = 0; i < n; ++i) {
      values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
    }
  } else if constexpr (kFormat == Format::kFp8) {
    for (int64_t i = 0; i < n; ++i) {
      values[i] = from_e4m3(codes[i]) * scale;
    }
  } else if constexpr (8 % bits_of(kFormat) == 0 && kFormat != Format::kSign) {
    constexpr int64_t kBits = bits_of(kFormat), kPerByte = 8 / kBits;
    for (int64_t i = 0; i < code_bytes(n, kFormat); ++i) {
      for (int64_t j = 0; j < kPerByte; ++j) {
        values[kPerByte * i + j] = static_cast<float>(from_low_bits<kBits>(codes[i] >> kBits * j)) * scale;
      }
    }
  } else if constexpr (kFormat != Format::kSign) {
    alignas(64) int8_t high[kLargestBlock];
    unpack<kFormat>(high, codes, n);
    for (int64_t i = 0; i < n; ++i) {
      values[i] = static_cast<float>(high[i] >> (8 - bits_of(kFormat))) * scale;
    }
  } else {
    constexpr uint32_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint32_t positive = bit_cast<uint32_t>(scale);
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512i all_positive = _mm512_set1_epi32(static_cast<int32_t>(positive));
    const __m512i sign_bit = _mm512_set1_epi32(INT32_MIN);
    for (; (i + 2) * 8 <= n; i += 2) {
      __mmask16 bits;
      __builtin_memcpy(&bits, codes + i, sizeof(bits));
      _mm512_storeu_si512(values + 8 * i, _mm512_mask_xor_epi32(all_positive, bits, all_positive, sign_bit));
    }
#endif
    for (; i < (n + 7) / 8; ++i) {
      const uint32_t byte = codes[i];
      uint32_t eight[8];
      for (int64_t j = 0; j < 8; ++j) {
        eight[j] = positive ^ ((byte & kBits[j]) != 0 ? 0x80000000u : 0u);
      }
      __builtin_memcpy(values + 8 * i, eight, sizeof(eight));
    }
  }
}

template <typename T, Format kFormat>
void undo(const QuantizeArgs<T>& args, int64_t begin, int64_t end, const UndoLog& log) {
  alignas(64) float values[kLargestBlock];
  int64_t kept = 0;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * args.block;
    const int64_t n = args.numel - first < args.block ? args.numel - first : args.block;
    const float scale = args.scales[block];
    if (scale != scale) {
      continue; // a NaN scale: `quantize` left the residual of this block unchanged
    }
    decode<kFormat>(values, args.codes + code_bytes(first, kFormat), scale, n);
    float* __restrict residual = args.residual + first;
    for (int64_t i = 0; i < n; ++i) {
      const float guess = (residual[i] + values[i]) - to_acc(args.x[first + i]);
      const int32_t step = log.steps[first + i];
      residual[i] =
          is_far(step) ? log.values[kept++] : bit_cast<float>(bit_cast<uint32_t>(guess) + static_cast<uint32_t>(step));
    }
  }
}

template <typename T, Format kFormat>
void dequantize(const DequantizeArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) float values[kLargestBlock];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * args.block;
    const int64_t n = args.numel - first < args.block ? args.numel - first : args.block;
    const float scale = args.scales[args.shared ? 0 : block];
    decode<kFormat>(values, args.codes + code_bytes(first, kFormat), scale, n);
    T* __restrict out = args.out + first;
    if (args.add) {
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_acc<T>(to_acc(out[i]) + values[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_acc<T>(values[i]);
      }
    }
  }
}

template <typename T>
constexpr QuantizeKernels<T> kTable = {
    {quantize<T, Format::kInt8>, quantize<T, Format::kInt4>, quantize<T, Format::kFp8>, quantize_signs<T>,
     quantize<T, Format::kInt6>, quantize<T, Format::kInt3>, quantize<T, Format::kInt2>},
    largest<T>,
    {undo<T, Format::kInt8>, undo<T, Format::kInt4>, undo<T, Format::kFp8>, undo<T, Format::kSign>,
     undo<T, Format::kInt6>, undo<T, Format::kInt3>, undo<T, Format::kInt2>},
    {dequantize<T, Format::kInt8>, dequantize<T, Format::kInt4>, dequantize<T, Format::kFp8>,
     dequantize<T, Format::kSign>, dequantize<T, Format::kInt6>, dequantize<T, Format::kInt3>,
     dequantize<T, Format::kInt2>},
    {quantize_rows<T, RowFormat::kInt8>, quantize_rows<T, RowFormat::kFp8>, quantize_rows<T, RowFormat::kMx>},
    {dequantize_rows<T, RowFormat::kInt8>, dequantize_rows<T, RowFormat::kFp8>, dequantize_rows<T, RowFormat::kMx>}};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kTable<float>, kTable<BFloat16>, kTable<Half>};

} // namespace moe_ext::quantize::MOE_ISA
