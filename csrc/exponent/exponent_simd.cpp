// Loops of coding exponents, compiled once per instruction set. A block of elements is split into exponents, one byte
// each, and the remaining bits, which are stored unchanged. Exponents are coded in levels: w bit planes give each
// exponent a code of w bits. The last code, an escape, means that the exponent is none of the 2^w - 1 symbols of the
// level. Escapes go to the next level, and after the last level they are stored as bytes. A sample determines widths
// and symbols of a block.
#include "exponent/exponent_tables.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moe_ext::exponent::MOE_ISA {
namespace {

constexpr int64_t kWord = 64;
constexpr int64_t kLine = 64;                 // bytes of a cache line
constexpr int64_t kRoom = kBlock + 2 * kWord; // whole vectors are read and written beyond the last escape

using Unaligned16 __attribute__((aligned(1), may_alias)) = uint16_t;

MOE_INLINE int64_t padded(int64_t n) {
  return (n + 7) & ~int64_t{7};
}

MOE_INLINE int64_t words_of(int64_t n) {
  return (n + kWord - 1) / kWord;
}

MOE_INLINE uint64_t load_word(const uint8_t* p) {
  uint64_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return word;
}

MOE_INLINE void store_word(uint8_t* p, uint64_t word) {
  __builtin_memcpy(p, &word, sizeof(word));
}

// `Bytes` holds sixty-four bytes. Masks are words with one bit for each byte.
#if defined(__AVX512F__)
using Bytes = __m512i;
MOE_INLINE Bytes load(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}
MOE_INLINE void store(uint8_t* p, Bytes x) {
  _mm512_storeu_si512(p, x);
}
MOE_INLINE Bytes splat(uint8_t x) {
  return _mm512_set1_epi8(static_cast<char>(x));
}
MOE_INLINE uint64_t equal(Bytes a, Bytes b) {
  return _mm512_cmpeq_epi8_mask(a, b);
}
MOE_INLINE uint64_t any(Bytes a, Bytes b) {
  return _mm512_test_epi8_mask(a, b);
}
MOE_INLINE Bytes blend(uint64_t mask, Bytes a, Bytes b) {
  return _mm512_mask_blend_epi8(mask, a, b);
}
#elif defined(__AVX2__)
struct Bytes {
  __m256i low, high;
};
MOE_INLINE Bytes load(const uint8_t* p) {
  const __m256i* from = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
MOE_INLINE void store(uint8_t* p, Bytes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, x.high);
}
MOE_INLINE Bytes splat(uint8_t x) {
  const __m256i all = _mm256_set1_epi8(static_cast<char>(x));
  return {all, all};
}
MOE_INLINE uint64_t equal(Bytes a, Bytes b) {
  const uint32_t low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a.low, b.low)));
  const uint32_t high = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a.high, b.high)));
  return low | static_cast<uint64_t>(high) << 32;
}
MOE_INLINE uint64_t any(Bytes a, Bytes b) {
  return ~equal({_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}, splat(0));
}
MOE_INLINE __m256i bytes_of(uint32_t mask) {
  const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(mask)), order);
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
}
MOE_INLINE Bytes blend(uint64_t mask, Bytes a, Bytes b) {
  return {
      _mm256_blendv_epi8(a.low, b.low, bytes_of(static_cast<uint32_t>(mask))),
      _mm256_blendv_epi8(a.high, b.high, bytes_of(static_cast<uint32_t>(mask >> 32)))};
}
#else
struct Bytes {
  uint8_t lanes[kWord];
};
MOE_INLINE Bytes load(const uint8_t* p) {
  Bytes x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
MOE_INLINE void store(uint8_t* p, Bytes x) {
  __builtin_memcpy(p, &x, sizeof(x));
}
MOE_INLINE Bytes splat(uint8_t x) {
  Bytes all;
  for (uint8_t& lane : all.lanes) {
    lane = x;
  }
  return all;
}
MOE_INLINE uint64_t equal(Bytes a, Bytes b) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < kWord; ++i) {
    mask |= static_cast<uint64_t>(a.lanes[i] == b.lanes[i]) << i;
  }
  return mask;
}
MOE_INLINE uint64_t any(Bytes a, Bytes b) {
  uint64_t mask = 0;
  for (int64_t i = 0; i < kWord; ++i) {
    mask |= static_cast<uint64_t>((a.lanes[i] & b.lanes[i]) != 0) << i;
  }
  return mask;
}
MOE_INLINE Bytes blend(uint64_t mask, Bytes a, Bytes b) {
  for (int64_t i = 0; i < kWord; ++i) {
    a.lanes[i] = mask >> i & 1 ? b.lanes[i] : a.lanes[i];
  }
  return a;
}
#endif

// Writes the marked bytes to `to` without gaps. May write up to 64 bytes.
template <bool kMoves>
MOE_INLINE void compress(uint8_t* to, const uint8_t* from, uint64_t mask) {
#if defined(__AVX512F__)
  if constexpr (kMoves) {
    // In assembly, because this file is not compiled for VBMI2.
    __m512i found;
    asm("vpcompressb %1, %0%{%2%}%{z%}" : "=v"(found) : "v"(load(from)), "Yk"(mask));
    store(to, found);
    return;
  }
#endif
  for (; mask != 0; mask &= mask - 1) {
    *to++ = from[__builtin_ctzll(mask)];
  }
}

// Writes consecutive bytes of `from` to the marked places, and the bytes of `others` to the other places.
template <bool kMoves>
MOE_INLINE void expand(uint8_t* to, const uint8_t* from, uint64_t mask, Bytes others) {
#if defined(__AVX512F__)
  if constexpr (kMoves) {
    asm("vpexpandb %1, %0%{%2%}" : "+v"(others) : "v"(load(from)), "Yk"(mask));
    store(to, others);
    return;
  }
#endif
  store(to, others);
  for (; mask != 0; mask &= mask - 1) {
    to[__builtin_ctzll(mask)] = *from++;
  }
}

bool moves_bytes() {
#if defined(__AVX512F__)
  static const bool has = __builtin_cpu_supports("avx512vbmi2") != 0;
  return has;
#else
  return false;
#endif
}

// Prefetch of the memory that the next block reads and writes, some bytes for each word of the current block. Without
// it the memory would be idle while a block is computed in the L1 cache.
struct Ahead {
  const uint8_t* read = nullptr;
  const uint8_t* written = nullptr;
  int64_t read_step = 0, written_step = 0;

  MOE_INLINE void fetch(int64_t w) const {
    for (int64_t i = 0; i < read_step; i += kLine) {
      __builtin_prefetch(read + w * read_step + i, 0, 2);
    }
    for (int64_t i = 0; i < written_step; i += kLine) {
      __builtin_prefetch(written + w * written_step + i, 1, 2);
    }
  }
};

// Encodes a level: writes its bit planes and its escapes. Returns the number of escapes.
template <int kWidth, bool kMoves>
int64_t encode_level(
    uint8_t* __restrict__ planes, const uint8_t* __restrict__ x, int64_t words, const uint8_t* symbols,
    uint8_t* __restrict__ escapes, Ahead ahead) {
  constexpr int kSymbols = (1 << kWidth) - 1;
  Bytes wanted[kSymbols];
  for (int code = 0; code < kSymbols; ++code) {
    wanted[code] = splat(symbols[code]);
  }
  int64_t count = 0;
  for (int64_t w = 0; w < words; ++w) {
    ahead.fetch(w);
    const Bytes found = load(x + w * kWord);
    uint64_t plane[kWidth] = {}, known = 0;
    for (int code = 0; code < kSymbols; ++code) {
      // A symbol that occurs twice in the list gets its first code.
      const uint64_t here = equal(found, wanted[code]) & ~known;
      known |= here;
      for (int j = 0; j < kWidth; ++j) {
        plane[j] |= code >> j & 1 ? here : 0;
      }
    }
    for (int j = 0; j < kWidth; ++j) {
      store_word(planes + (w * kWidth + j) * 8, plane[j] | ~known);
    }
    if (known != ~uint64_t{0}) {
      compress<kMoves>(escapes + count, x + w * kWord, ~known);
      count += __builtin_popcountll(~known);
    }
  }
  return count;
}

MOE_INLINE uint64_t escapes_at(const uint8_t* planes, int width) {
  uint64_t mask = ~uint64_t{0};
  for (int j = 0; j < width; ++j) {
    mask &= load_word(planes + 8 * j);
  }
  return mask;
}

template <int kWidth, bool kMoves>
void decode_level(
    uint8_t* __restrict__ out, const uint8_t* __restrict__ planes, int64_t words, const uint8_t* symbols,
    const uint8_t* __restrict__ escapes, Ahead ahead) {
  constexpr int kSymbols = (1 << kWidth) - 1;
  Bytes wanted[kSymbols];
  for (int code = 0; code < kSymbols; ++code) {
    wanted[code] = splat(symbols[code]);
  }
  for (int64_t w = 0; w < words; ++w) {
    ahead.fetch(w);
    uint64_t plane[kWidth];
    for (int j = 0; j < kWidth; ++j) {
      plane[j] = load_word(planes + (w * kWidth + j) * 8);
    }
    Bytes found = wanted[0];
    for (int code = 1; code < kSymbols; ++code) {
      uint64_t here = ~uint64_t{0};
      for (int j = 0; j < kWidth; ++j) {
        here &= code >> j & 1 ? plane[j] : ~plane[j];
      }
      found = blend(here, found, wanted[code]);
    }
    uint64_t mask = plane[0];
    for (int j = 1; j < kWidth; ++j) {
      mask &= plane[j];
    }
    expand<kMoves>(out + w * kWord, escapes, mask, found);
    escapes += __builtin_popcountll(mask);
  }
}

// Calls f.operator()<width>() with the width as a constant.
template <typename F>
MOE_INLINE auto with_width(int width, F f) {
  switch (width) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

// Writes the exponents of a sample to `symbols`, the most frequent first. Returns the plan with the fewest bits, or -1.
int choose(uint8_t* symbols, const uint8_t* x, int64_t n) {
  uint16_t counts[4][256] = {}, sums[256];
  int64_t i = 0, sampled = 0;
  // Four tables: neighbours are often equal, and an increment must wait for the last store to the same counter.
  for (; i + 3 * kStride < n; i += 4 * kStride, sampled += 4) {
    for (int j = 0; j < 4; ++j) {
      ++counts[j][x[i + j * kStride]];
    }
  }
  for (; i < n; i += kStride, ++sampled) {
    ++counts[0][x[i]];
  }
  for (int symbol = 0; symbol < 256; ++symbol) {
    sums[symbol] = static_cast<uint16_t>(counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol]);
  }
  const uint8_t* bytes_of_sums = reinterpret_cast<const uint8_t*>(sums);
  int64_t top[kMostSymbols] = {};
  int num_symbols = 0;
  for (int symbol = 0; symbol < 256; ++symbol) {
    // Most exponents do not occur, so eight are skipped at a time.
    if (symbol % 8 == 0 && (load_word(bytes_of_sums + 2 * symbol) | load_word(bytes_of_sums + 2 * symbol + 8)) == 0) {
      symbol += 7;
      continue;
    }
    const int64_t count = sums[symbol];
    if (count == 0 || (num_symbols == kMostSymbols && count <= top[kMostSymbols - 1])) {
      continue;
    }
    int place = num_symbols < kMostSymbols ? num_symbols++ : kMostSymbols - 1;
    for (; place > 0 && top[place - 1] < count; --place) {
      top[place] = top[place - 1];
      symbols[place] = symbols[place - 1];
    }
    top[place] = count;
    symbols[place] = static_cast<uint8_t>(symbol);
  }
  for (int place = num_symbols; place < kMostSymbols; ++place) {
    symbols[place] = symbols[0];
  }
  int best = -1;
  int64_t least = 8 * sampled;
  for (int plan = 0; plan < kNumPlans; ++plan) {
    int64_t left = sampled, bits = 0;
    int first = 0;
    for (const int width : kPlans[plan]) {
      bits += width * left;
      for (int code = 0; width != 0 && code < (1 << width) - 1; ++code) {
        left -= top[first++];
      }
    }
    bits += 8 * left;
    if (bits < least) {
      least = bits;
      best = plan;
    }
  }
  return best;
}

// -- the parts of an element: its exponent and the remaining bits -------------------------------------

template <typename T>
MOE_INLINE T rotated(T x) {
  return static_cast<T>(x << 1 | x >> (8 * sizeof(T) - 1));
}

template <typename T>
MOE_INLINE T rotated_back(T x) {
  return static_cast<T>(x >> 1 | x << (8 * sizeof(T) - 1));
}

struct BFloat16Parts {
  using Bits = uint16_t;
  static int64_t rest_bytes(int64_t n) {
    return padded(n);
  }
  static void split(
      uint8_t* __restrict__ exponents, uint8_t* __restrict__ rest, const Bits* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const Bits y = rotated(x[i]);
      exponents[i] = static_cast<uint8_t>(y >> 8);
      rest[i] = static_cast<uint8_t>(y);
    }
  }
  static void join(
      Bits* __restrict__ x, const uint8_t* __restrict__ exponents, const uint8_t* __restrict__ rest, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = rotated_back(static_cast<Bits>(exponents[i] << 8 | rest[i]));
    }
  }
};

struct FloatParts {
  using Bits = uint32_t;
  static int64_t rest_bytes(int64_t n) {
    return padded(3 * n);
  }
  static void split(
      uint8_t* __restrict__ exponents, uint8_t* __restrict__ rest, const Bits* __restrict__ x, int64_t n) {
    Unaligned16* __restrict__ low = reinterpret_cast<Unaligned16*>(rest);
    uint8_t* __restrict__ middle = rest + 2 * n;
    for (int64_t i = 0; i < n; ++i) {
      const Bits y = rotated(x[i]);
      exponents[i] = static_cast<uint8_t>(y >> 24);
      low[i] = static_cast<uint16_t>(y);
      middle[i] = static_cast<uint8_t>(y >> 16);
    }
  }
  static void join(
      Bits* __restrict__ x, const uint8_t* __restrict__ exponents, const uint8_t* __restrict__ rest, int64_t n) {
    const Unaligned16* __restrict__ low = reinterpret_cast<const Unaligned16*>(rest);
    const uint8_t* __restrict__ middle = rest + 2 * n;
    for (int64_t i = 0; i < n; ++i) {
      const Bits y = static_cast<Bits>(exponents[i]) << 24 | static_cast<Bits>(middle[i]) << 16 | low[i];
      x[i] = rotated_back(y);
    }
  }
};

// Five bits of exponent. Of the other eleven bits, eight are stored as a byte and three in bit planes.
struct HalfParts {
  using Bits = uint16_t;
  static int64_t rest_bytes(int64_t n) {
    return padded(n) + 3 * 8 * words_of(n);
  }
  static void split(
      uint8_t* __restrict__ exponents, uint8_t* __restrict__ rest, const Bits* __restrict__ x, int64_t n) {
    uint8_t three[kRoom];
    for (int64_t i = 0; i < n; ++i) {
      exponents[i] = static_cast<uint8_t>(x[i] >> 10 & 31);
      three[i] = static_cast<uint8_t>((x[i] >> 8 & 3) | (x[i] >> 13 & 4));
      rest[i] = static_cast<uint8_t>(x[i]);
    }
    for (int64_t i = n; i < words_of(n) * kWord; ++i) {
      three[i] = 0;
    }
    uint8_t* planes = rest + padded(n);
    for (int64_t w = 0; w < words_of(n); ++w) {
      for (int j = 0; j < 3; ++j) {
        store_word(planes + (3 * w + j) * 8, any(load(three + w * kWord), splat(static_cast<uint8_t>(1 << j))));
      }
    }
  }
  static void join(
      Bits* __restrict__ x, const uint8_t* __restrict__ exponents, const uint8_t* __restrict__ rest, int64_t n) {
    uint8_t three[kRoom];
    const uint8_t* planes = rest + padded(n);
    for (int64_t w = 0; w < words_of(n); ++w) {
      Bytes found = splat(0);
      for (int code = 1; code < 8; ++code) {
        uint64_t here = ~uint64_t{0};
        for (int j = 0; j < 3; ++j) {
          const uint64_t plane = load_word(planes + (3 * w + j) * 8);
          here &= code >> j & 1 ? plane : ~plane;
        }
        found = blend(here, found, splat(static_cast<uint8_t>(code)));
      }
      store(three + w * kWord, found);
    }
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t high = (three[i] & 4u) << 13 | (exponents[i] & 31u) << 10 | (three[i] & 3u) << 8;
      x[i] = static_cast<Bits>(high | rest[i]);
    }
  }
};

// -- blocks ------------------------------------------------------------------------------------------

template <typename Parts>
int64_t encode_block(uint8_t* dst, const void* from, int64_t n) {
  using Bits = typename Parts::Bits;
  const Bits* x = static_cast<const Bits*>(from);
  const int64_t raw_bytes = padded(n * static_cast<int64_t>(sizeof(Bits)));
  alignas(64) uint8_t level[2][kRoom];
  // Planes of all levels, at most 8 bits per element, and one byte for each escape.
  alignas(64) uint8_t coded[3 * kRoom];
  uint8_t* rest = dst + kBlockHeader;
  const int64_t rest_bytes = Parts::rest_bytes(n);
  store_word(dst, 0);
  store_word(dst + 8, 0);
  store_word(dst + 16, 0);
  int64_t size = kBlockHeader + raw_bytes;
  if (kBlockHeader + rest_bytes < size) {
    store_word(rest + padded(n) - 8, 0); // zeros for the padding; `split` overwrites the bytes before it
    store_word(rest + rest_bytes - 8, 0);
    Parts::split(level[0], rest, x, n);
    uint8_t symbols[kMostSymbols + 1] = {};
    const int plan = choose(symbols, level[0], n);
    if (plan >= 0) {
      int64_t count = n, bytes = 0;
      const uint8_t* wanted = symbols;
      int turn = 0;
      Ahead ahead = {
          reinterpret_cast<const uint8_t*>(x + n), dst + kBlockHeader + raw_bytes,
          kWord * static_cast<int64_t>(sizeof(Bits)), kLine};
      for (const int width : kPlans[plan]) {
        if (width == 0) {
          break;
        }
        const int64_t words = words_of(count);
        for (int64_t i = count; i < words * kWord; ++i) {
          level[turn][i] = wanted[0];
        }
        count = with_width(width, [&]<int kWidth>() {
          const auto run = moves_bytes() ? encode_level<kWidth, true> : encode_level<kWidth, false>;
          return run(coded + bytes, level[turn], words, wanted, level[1 - turn], ahead);
        });
        ahead = {};
        bytes += 8 * width * words;
        wanted += (1 << width) - 1;
        turn = 1 - turn;
      }
      const int64_t escape_bytes = padded(count), coded_size = kBlockHeader + rest_bytes + bytes + escape_bytes;
      if (coded_size < size) {
        for (int64_t i = count; i < escape_bytes; ++i) {
          level[turn][i] = 0;
        }
        __builtin_memcpy(rest + rest_bytes, coded, static_cast<uint64_t>(bytes));
        __builtin_memcpy(rest + rest_bytes + bytes, level[turn], static_cast<uint64_t>(escape_bytes));
        dst[0] = static_cast<uint8_t>(plan + 1);
        __builtin_memcpy(dst + 1, symbols, kMostSymbols);
        return coded_size;
      }
    }
  }
  store_word(rest + raw_bytes - 8, 0);
  __builtin_memcpy(rest, x, static_cast<uint64_t>(n) * sizeof(Bits));
  return size;
}

template <typename Parts>
bool decode_block(void* to, const uint8_t* src, int64_t size, int64_t n) {
  using Bits = typename Parts::Bits;
  Bits* out = static_cast<Bits*>(to);
  if (size < kBlockHeader || src[0] > kNumPlans) {
    return false;
  }
  const uint8_t* rest = src + kBlockHeader;
  if (src[0] == 0) {
    if (size != kBlockHeader + padded(n * static_cast<int64_t>(sizeof(Bits)))) {
      return false;
    }
    __builtin_memcpy(out, rest, static_cast<uint64_t>(n) * sizeof(Bits));
    return true;
  }
  const int* widths = kPlans[src[0] - 1];
  // Begin of the planes of each level, and the words of its elements, which are the escapes of the previous level.
  int64_t place[kMostLevels], words[kMostLevels];
  int64_t at = kBlockHeader + Parts::rest_bytes(n), count = n;
  int levels = 0;
  for (; levels < kMostLevels && widths[levels] != 0; ++levels) {
    const int width = widths[levels];
    place[levels] = at;
    words[levels] = words_of(count);
    if (at + 8 * width * words[levels] > size) {
      return false;
    }
    count = 0;
    for (int64_t w = 0; w < words[levels]; ++w, at += 8 * width) {
      count += __builtin_popcountll(escapes_at(src + at, width));
    }
  }
  // If `count` exceeds n, the padding holds escape codes, which belong to no element.
  if (count > n || at + padded(count) != size) {
    return false;
  }
  alignas(64) uint8_t level[2][kRoom];
  int turn = 0;
  __builtin_memcpy(level[turn], src + at, static_cast<uint64_t>(count));
  const Ahead ahead = {
      src + size, reinterpret_cast<const uint8_t*>(out + n), size / words[0],
      kWord * static_cast<int64_t>(sizeof(Bits))};
  const uint8_t* end_of_symbols = src + 1;
  for (int i = 0; i < levels; ++i) {
    end_of_symbols += (1 << widths[i]) - 1;
  }
  for (int i = levels - 1; i >= 0; --i) {
    end_of_symbols -= (1 << widths[i]) - 1;
    with_width(widths[i], [&]<int kWidth>() {
      const auto run = moves_bytes() ? decode_level<kWidth, true> : decode_level<kWidth, false>;
      run(level[1 - turn], src + place[i], words[i], end_of_symbols, level[turn], i == 0 ? ahead : Ahead{});
    });
    turn = 1 - turn;
  }
  Parts::join(out, level[turn], rest, n);
  return true;
}

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    {encode_block<BFloat16Parts>, encode_block<HalfParts>, encode_block<FloatParts>},
    {decode_block<BFloat16Parts>, decode_block<HalfParts>, decode_block<FloatParts>}};

} // namespace moe_ext::exponent::MOE_ISA
