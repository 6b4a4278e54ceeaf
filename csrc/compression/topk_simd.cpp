// Loops of the gradient selection, compiled once per instruction set: a block of keys is computed into a buffer that
// stays in the first cache, then compacted from there.
#include "compression/topk_tables.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace moe_ext::compression::topk::MOE_ISA {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kLanes = 16;
constexpr int64_t kWords = kBlock / 64;
constexpr int64_t kFewHits = 32; // of a block; more are compacted a vector at a time

struct Bits { // one for each element of a block
  uint64_t word[kWords];
};

// From a byte that is 0 or 1 for each element: the product moves eight of them into the highest byte.
MOE_INLINE Bits bits_of(const uint8_t* flags) {
  Bits bits;
  for (int64_t w = 0; w < kWords; ++w) {
    uint64_t word = 0;
    for (int64_t i = 0; i < 8; ++i) {
      uint64_t eight;
      __builtin_memcpy(&eight, flags + 64 * w + 8 * i, sizeof(eight));
      word |= (eight * 0x0102040810204080u >> 56) << (8 * i);
    }
    bits.word[w] = word;
  }
  return bits;
}

MOE_INLINE int64_t num_bits(const Bits& bits) {
  int64_t count = 0;
  for (const uint64_t word : bits.word) {
    count += __builtin_popcountll(word);
  }
  return count;
}

// Calls store(slot, i) for each bit i, in order, with slots from `slot` on; returns the next one. The first kAlways of
// a word are stored in any case, since whether there are any cannot be predicted: slots behind the last are scratch.
template <int kAlways, typename F>
MOE_INLINE int64_t for_bits(const Bits& bits, int64_t slot, F store) {
  for (int64_t w = 0; w < kWords; ++w) {
    constexpr uint64_t kNever = uint64_t{1} << 63;
    uint64_t rest = bits.word[w];
    const int64_t next = slot + __builtin_popcountll(rest);
    for (int j = 0; j < kAlways; ++j) {
      store(slot + j, 64 * w + __builtin_ctzll(rest | kNever));
      rest &= rest - 1;
    }
    for (slot += kAlways; rest != 0; ++slot) {
      store(slot, 64 * w + __builtin_ctzll(rest));
      rest &= rest - 1;
    }
    slot = next;
  }
  return slot;
}

// Which of n keys, which zeros fill up to a block, are larger than `low`.
template <typename Key>
MOE_INLINE Bits larger(const Key* keys, int64_t n, Key low, Scanned<Key>* seen) {
  using Signed = std::make_signed_t<Key>;
  alignas(64) uint8_t flags[kBlock] = {};
  // A key has no sign bit, and more instruction sets have a maximum of signed numbers.
  Signed most = static_cast<Signed>(seen->largest);
  Key equal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Signed key = static_cast<Signed>(keys[i]);
    most = key > most ? key : most;
    equal += static_cast<Key>(keys[i] == low);
    flags[i] = static_cast<uint8_t>(key > static_cast<Signed>(low));
  }
  seen->largest = static_cast<Key>(most);
  seen->equal += static_cast<int64_t>(equal);
  return bits_of(flags);
}

template <typename Key>
MOE_INLINE int64_t
compact(const Key* keys, const Bits& chosen, int64_t offset, Key* out_keys, uint32_t* out_offsets, int64_t count) {
  return for_bits<2>(chosen, count, [&](int64_t slot, int64_t i) {
    out_keys[slot] = keys[i];
    out_offsets[slot] = static_cast<uint32_t>(offset + i);
  });
}

#if defined(__AVX512F__)
MOE_INLINE Bits larger(const uint32_t* keys, int64_t n, uint32_t low, Scanned<uint32_t>* seen) {
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(low));
  __m512i most = _mm512_set1_epi32(static_cast<int32_t>(seen->largest)), equal = _mm512_setzero_si512();
  Bits bits;
  for (int64_t w = 0; w < kWords; ++w) {
    uint64_t word = 0;
    for (int64_t i = 0; i < 64; i += kLanes) {
      const __m512i key = _mm512_loadu_si512(keys + 64 * w + i);
      most = _mm512_max_epu32(most, key);
      const __mmask16 same = _mm512_cmpeq_epi32_mask(key, bound);
      equal = _mm512_mask_sub_epi32(equal, same, equal, _mm512_set1_epi32(-1));
      word |= static_cast<uint64_t>(_mm512_cmpgt_epu32_mask(key, bound)) << i;
    }
    bits.word[w] = word;
  }
  seen->largest = _mm512_reduce_max_epu32(most);
  seen->equal += _mm512_reduce_add_epi32(equal) - (low == 0 ? kBlock - n : 0);
  return bits;
}

// Compressed in a register and stored whole: a compressing store is microcode on some processors.
MOE_INLINE int64_t compact_many(
    const uint32_t* keys, const Bits& chosen, int64_t offset, uint32_t* out_keys, uint32_t* out_offsets,
    int64_t count) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const __mmask16 mask = static_cast<__mmask16>(chosen.word[i / 64] >> (i % 64));
    const __m512i place = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(offset + i)));
    _mm512_storeu_si512(out_keys + count, _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(keys + i)));
    _mm512_storeu_si512(out_offsets + count, _mm512_maskz_compress_epi32(mask, place));
    count += __builtin_popcount(mask);
  }
  return count;
}

MOE_INLINE int64_t compact(
    const uint32_t* keys, const Bits& chosen, int64_t offset, uint32_t* out_keys, uint32_t* out_offsets,
    int64_t count) {
  return num_bits(chosen) > kFewHits ? compact_many(keys, chosen, offset, out_keys, out_offsets, count)
                                     : compact<uint32_t>(keys, chosen, offset, out_keys, out_offsets, count);
}
#endif

// Keys below which a product with `factor` may be subnormal.
MOE_INLINE uint32_t normal_from(float factor) {
  const float bound = factor >= 1 || factor == 0 ? 0x1p-126f : factor > 0x1p-100f ? 0x1p-125f / factor : 0x1p-25f;
  return key_of(bound);
}

// |x| * factor for small x, rounded once: exact in double, then a whole number of 2^-149 where it is subnormal. `x` is
// converted by its bits, since the processor's own conversion is as slow as its product.
MOE_INLINE float small_product(float x, double factor) {
  const uint32_t key = key_of(x);
  const bool subnormal = key < 0x00800000u;
  const uint64_t exponent = subnormal ? uint64_t{897} << 52 : uint64_t{896} << 52;
  const double wide = bit_cast<double>((static_cast<uint64_t>(key) << 29) + exponent) - (subnormal ? 0x1p-126 : 0.0);
  const double product = wide * factor;
  const bool below = product < 0x1p-126;
  const uint32_t whole = static_cast<uint32_t>(bit_cast<uint64_t>(product * 0x1p149 + 0x1p52));
  const float rounded = static_cast<float>(below ? 1.0 : product);
  return bit_cast<float>((below ? whole : bit_cast<uint32_t>(rounded)) | (bit_cast<uint32_t>(x) & 0x80000000u));
}

// `x` may be `out`. Kept out of line, where the compiler makes vectors of it.
__attribute__((noinline)) void scale_small(const float* x, float factor, uint32_t limit, int64_t n, float* out) {
  alignas(64) float products[kBlock];
  // Products with a subnormal factor of anything below the limit are zero.
  const double wide = key_of(factor) < 0x00800000u ? 0.0 : static_cast<double>(factor);
  for (int64_t i = 0; i < n; ++i) {
    const bool large = key_of(x[i]) >= limit;
    const float usual = factor * (large ? x[i] : 0.0f);
    const float small = small_product(x[i], wide);
    products[i] = large ? usual : small;
  }
  __builtin_memcpy(out, products, n * sizeof(float));
}

// A product of, or to, a subnormal number takes over a hundred cycles: a block that may hold one goes another way.
MOE_INLINE void scale(const float* x, float factor, int64_t n, float* out) {
  const uint32_t limit = normal_from(factor);
  uint32_t slow = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    slow |= static_cast<uint32_t>(key != 0) & static_cast<uint32_t>(key < limit);
  }
  if (slow != 0) {
    scale_small(x, factor, limit, n, out);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    out[i] = factor * x[i];
  }
}

MOE_INLINE void scale(const double* x, double factor, int64_t n, double* out) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = factor * x[i];
  }
}

enum class Mode { kRead, kFeed, kLog };

// What a block of residual or velocity was, and what the feed taken backwards gives for it.
template <typename Acc>
struct Backwards {
  alignas(64) Acc before[kBlock];
  alignas(64) Acc guess[kBlock];
};

template <typename Acc>
struct BlockLog {
  Backwards<Acc> residual, velocity;
};

template <bool kVelocity, bool kScaled, Mode kMode, typename T, typename Key>
MOE_INLINE void block_keys(
    const Feedback<T>& x, int64_t begin, int64_t n, Key* __restrict keys, BlockLog<acc_t<T>>* __restrict log) {
  using Acc = acc_t<T>;
  const T* __restrict grad = x.grad + begin;
  Acc* __restrict residual = x.residual + begin;
  Acc* __restrict velocity = kVelocity ? x.velocity + begin : nullptr;
  alignas(64) Acc carried[kBlock], kept[kBlock];
  if constexpr (kScaled) {
    scale(residual, x.residual_scale, n, carried);
  }
  if constexpr (kVelocity) {
    scale(velocity, x.momentum, n, kept);
  }
  for (int64_t i = 0; i < n; ++i) {
    const Acc g = to_acc(grad[i]);
    Acc u = g;
    if constexpr (kVelocity) {
      u = kept[i] + g;
    }
    const Acc e = residual[i];
    Acc a = e + u;
    if constexpr (kScaled) {
      a = carried[i] + u;
    }
    if constexpr (kMode == Mode::kLog) {
      log->residual.before[i] = e;
      log->residual.guess[i] = a - u;
      if constexpr (kVelocity) {
        log->velocity.before[i] = velocity[i];
        log->velocity.guess[i] = u - g;
      }
    }
    if constexpr (kMode != Mode::kRead) {
      residual[i] = a;
      if constexpr (kVelocity) {
        velocity[i] = u;
      }
    }
    keys[i] = key_of(a);
  }
}

struct Codes { // two bits an element; both are set where the value is kept
  Bits low, high;
};
static_assert(sizeof(Codes) == kBlock / 4);

template <typename Acc>
MOE_INLINE Codes codes_of(const Backwards<Acc>& block) {
  using Key = key_t<Acc>;
  alignas(64) uint8_t low[kBlock], high[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) {
    const Key step = bit_cast<Key>(block.before[i]) - bit_cast<Key>(block.guess[i]);
    // A NaN need not have the same bits the next time.
    const bool lost = key_of(block.guess[i]) >= kInfinityKey<Acc>, other = step != 0;
    low[i] = static_cast<uint8_t>(lost | (other & (step != static_cast<Key>(-1))));
    high[i] = static_cast<uint8_t>(lost | (other & (step != 1)));
  }
  return {bits_of(low), bits_of(high)};
}

#if defined(__AVX512F__)
MOE_INLINE Codes codes_of(const Backwards<float>& block) {
  Codes codes;
  for (int64_t w = 0; w < kWords; ++w) {
    uint64_t low = 0, high = 0;
    for (int64_t i = 0; i < 64; i += kLanes) {
      const __m512i before = _mm512_load_si512(block.before + 64 * w + i);
      const __m512i guess = _mm512_load_si512(block.guess + 64 * w + i);
      const __m512i step = _mm512_sub_epi32(before, guess);
      const __m512i key = _mm512_and_si512(guess, _mm512_set1_epi32(0x7FFFFFFF));
      const __mmask16 lost = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(0x7F800000));
      const __mmask16 other = _mm512_test_epi32_mask(step, step);
      const __mmask16 not_below = _mm512_mask_cmpneq_epi32_mask(other, step, _mm512_set1_epi32(-1));
      const __mmask16 not_above = _mm512_mask_cmpneq_epi32_mask(other, step, _mm512_set1_epi32(1));
      low |= static_cast<uint64_t>(_kor_mask16(lost, not_below)) << i;
      high |= static_cast<uint64_t>(_kor_mask16(lost, not_above)) << i;
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
  const Codes codes = codes_of(block);
  Bits kept;
  for (int64_t w = 0; w < kWords; ++w) {
    kept.word[w] = codes.low.word[w] & codes.high.word[w];
  }
  log->count = for_bits<6>(kept, log->count, [&](int64_t slot, int64_t i) { log->values[slot] = block.before[i]; });
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

template <typename T>
void undo(const Feedback<T>& args, int64_t begin, int64_t n, const UndoLog<acc_t<T>>& log) {
  using Acc = acc_t<T>;
  alignas(64) Acc guess[kBlock];
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = n - i < kBlock ? n - i : kBlock;
    const T* grad = args.grad + begin + i;
    Acc* residual = args.residual + begin + i;
    Acc* velocity = args.velocity == nullptr ? nullptr : args.velocity + begin + i;
    for (int64_t j = 0; j < size; ++j) {
      guess[j] = residual[j] - (velocity == nullptr ? to_acc(grad[j]) : velocity[j]);
    }
    restore_block(residual, guess, 1 / args.residual_scale, size, log.codes + i / 4, log.values, &count);
    if (velocity == nullptr) {
      continue;
    }
    for (int64_t j = 0; j < size; ++j) {
      guess[j] = velocity[j] - to_acc(grad[j]);
    }
    restore_block(velocity, guess, 1 / args.momentum, size, log.codes + kCodeBytes + i / 4, log.values, &count);
  }
}

// A block is read in one go and compacted after: the processor does not see far enough ahead to read the next one in
// the meantime, and its own prefetcher stops at the end of a page.
template <typename T>
MOE_INLINE void prefetch(const T* block) {
  constexpr int64_t kAhead = 2048, kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kBlock; i += kLine) {
    __builtin_prefetch(block + kAhead + i);
  }
}

template <bool kVelocity, typename T>
MOE_INLINE void prefetch(const Feedback<T>& args, int64_t begin) {
  prefetch(args.grad + begin);
  prefetch(args.residual + begin);
  if constexpr (kVelocity) {
    prefetch(args.velocity + begin);
  }
}

template <typename Key>
MOE_INLINE Key largest_of(const Key* keys, int64_t n, Key largest) {
  using Signed = std::make_signed_t<Key>;
  // A key has no sign bit, and more instruction sets have a maximum of signed numbers.
  Signed most = static_cast<Signed>(largest);
  for (int64_t i = 0; i < n; ++i) {
    const Signed key = static_cast<Signed>(keys[i]);
    most = key > most ? key : most;
  }
  return static_cast<Key>(most);
}

template <typename Key>
MOE_INLINE void fill(Key* block, int64_t size) {
  for (int64_t i = size; i < kBlock; ++i) {
    block[i] = 0;
  }
}

// Calls f(offset, size, keys) for each block, after its keys have been computed.
template <bool kVelocity, bool kScaled, Mode kMode, typename T, typename F>
MOE_INLINE void for_blocks(const Feedback<T>& args, int64_t begin, int64_t n, UndoLog<acc_t<T>>* log, F f) {
  using Acc = acc_t<T>;
  alignas(64) key_t<Acc> keys[kBlock];
  BlockLog<Acc> block;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = n - i < kBlock ? n - i : kBlock;
    if (n > kBlock) {
      prefetch<kVelocity>(args, begin + i);
    }
    block_keys<kVelocity, kScaled, kMode>(args, begin + i, size, keys, &block);
    if constexpr (kMode == Mode::kLog) {
      log_block(block.residual, kScaled ? 1 / args.residual_scale : Acc{1}, size, log->codes + i / 4, log);
      if constexpr (kVelocity) {
        log_block(block.velocity, 1 / args.momentum, size, log->codes + kCodeBytes + i / 4, log);
      }
    }
    fill(keys, size);
    f(i, size, keys);
  }
}

template <Mode kMode, typename T, typename F>
MOE_INLINE void each_block(const Feedback<T>& args, int64_t begin, int64_t n, UndoLog<acc_t<T>>* log, F f) {
  const bool scaled = args.residual_scale != 1;
  if (args.velocity == nullptr) {
    scaled ? for_blocks<false, true, kMode>(args, begin, n, log, f)
           : for_blocks<false, false, kMode>(args, begin, n, log, f);
  } else {
    scaled ? for_blocks<true, true, kMode>(args, begin, n, log, f)
           : for_blocks<true, false, kMode>(args, begin, n, log, f);
  }
}

template <Mode kMode, typename T, typename Key>
int64_t scan_logged(
    const Feedback<T>& args, int64_t begin, int64_t n, Key low, Key* keys, uint32_t* offsets, Scanned<Key>* seen,
    UndoLog<acc_t<T>>* log) {
  int64_t count = 0;
  Scanned<Key> found = *seen;
  each_block<kMode>(args, begin, n, log, [&](int64_t offset, int64_t size, const Key* block) {
    count = compact(block, larger(block, size, low, &found), offset, keys, offsets, count);
  });
  *seen = found;
  return count;
}

template <Mode kMode, typename T, typename Key>
int64_t scan(
    const Feedback<T>& args, int64_t begin, int64_t n, Key low, Key* keys, uint32_t* offsets, Scanned<Key>* seen) {
  return scan_logged<kMode>(args, begin, n, low, keys, offsets, seen, nullptr);
}

template <typename Acc, typename Key>
int64_t scan_fed(const Acc* residual, int64_t n, Key low, Key* keys, uint32_t* offsets, Scanned<Key>* seen) {
  alignas(64) Key block[kBlock];
  int64_t count = 0;
  Scanned<Key> found = *seen;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = n - i < kBlock ? n - i : kBlock;
    prefetch(residual + i);
    for (int64_t j = 0; j < size; ++j) {
      block[j] = key_of(residual[i + j]);
    }
    fill(block, size);
    count = compact(block, larger(block, size, low, &found), i, keys, offsets, count);
  }
  *seen = found;
  return count;
}

template <typename T, typename Key>
void keys(const Feedback<T>& args, int64_t begin, int64_t n, Key* out) {
  each_block<Mode::kRead>(args, begin, n, nullptr, [&](int64_t offset, int64_t size, const Key* block) {
    __builtin_memcpy(out + offset, block, size * sizeof(Key));
  });
}

template <typename T>
key_t<acc_t<T>> largest(const Feedback<T>& args, int64_t begin, int64_t n) {
  using Key = key_t<acc_t<T>>;
  Key most = 0;
  each_block<Mode::kRead>(
      args, begin, n, nullptr, [&](int64_t, int64_t size, const Key* block) { most = largest_of(block, size, most); });
  return most;
}

template <typename T>
void feed(const Feedback<T>& args, int64_t begin, int64_t n) {
  each_block<Mode::kFeed>(args, begin, n, nullptr, [](int64_t, int64_t, const key_t<acc_t<T>>*) {});
}

template <typename T, typename Acc = acc_t<T>, typename Key = key_t<acc_t<T>>>
constexpr FeedbackKernels<T> kTable = {
    keys<T, Key>,
    largest<T>,
    scan<Mode::kRead, T, Key>,
    feed<T>,
    scan<Mode::kFeed, T, Key>,
    scan_logged<Mode::kLog, T, Key>,
    undo<T>,
    scan_fed<Acc, Key>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kTable<float>, kTable<double>, kTable<BFloat16>, kTable<Half>};

} // namespace moe_ext::compression::topk::MOE_ISA
