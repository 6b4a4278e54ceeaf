// Loops of the gradient selection, compiled once per instruction set. A block is computed into buffers that stay in the
// L1 cache, its large keys are compacted from there, and its remaining elements are written to the state.
#include "common/stream.h"
#include "selection/undo_simd.h"

namespace moe_ext::topk::MOE_ISA {
namespace {

enum class Mode { kRead, kFeed, kLog };

// New residual and velocity of a block.
template <typename Acc>
struct Fed {
  alignas(64) Acc residual[kBlock];
  alignas(64) Acc velocity[kBlock];
};

template <bool kVelocity, bool kScaled, Mode kMode, typename T, typename Key>
MOE_INLINE void block_keys(
    const Feedback<T>& x, int64_t begin, int64_t n, Key* __restrict keys, Fed<acc_t<T>>* __restrict fed,
    BlockLog<acc_t<T>>* __restrict log) {
  using Acc = acc_t<T>;
  const T* __restrict grad = x.grad + begin;
  const Acc* __restrict residual = x.residual_in + begin;
  const Acc* __restrict velocity = kVelocity ? x.velocity_in + begin : nullptr;
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
      fed->residual[i] = a;
      if constexpr (kVelocity) {
        fed->velocity[i] = u;
      }
    }
    keys[i] = key_of(a);
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
    restore_block(residual, guess, 1 / args.residual_scale, size, log.steps + i, log.values, &count);
    if (velocity == nullptr) {
      continue;
    }
    for (int64_t j = 0; j < size; ++j) {
      guess[j] = velocity[j] - to_acc(grad[j]);
    }
    restore_block(velocity, guess, 1 / args.momentum, size, log.steps + kSegment + i, log.values, &count);
  }
}

// Distance of the prefetch, in elements. Out-of-order execution does not reach the loads of the next block while a
// block is compacted, and the hardware prefetcher stops at the end of a page.
constexpr int64_t kAhead = 2048;

template <typename T>
MOE_INLINE void prefetch(const T* block) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kBlock; i += kLine) {
    __builtin_prefetch(block + kAhead + i);
  }
}

template <bool kVelocity, typename T>
MOE_INLINE void prefetch(const Feedback<T>& args, int64_t begin) {
  prefetch(args.grad + begin);
  prefetch(args.residual_in + begin);
  if constexpr (kVelocity) {
    prefetch(args.velocity_in + begin);
  }
}

template <typename Key>
MOE_INLINE Key largest_of(const Key* keys, int64_t n, Key largest) {
  using Signed = std::make_signed_t<Key>;
  // The top bit of a key is 0, and more instruction sets have a maximum of signed numbers.
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

// Writes a block with zeros for the elements whose keys are larger than `low`. Stores bypass the caches if `streamed`.
template <typename Acc, typename Key>
MOE_INLINE void write_block(Acc* block, const Key* keys, Key low, int64_t n, Acc* out, bool streamed) {
  using Signed = std::make_signed_t<Key>;
  for (int64_t i = 0; i < n; ++i) {
    block[i] = static_cast<Signed>(keys[i]) > static_cast<Signed>(low) ? Acc(0) : block[i];
  }
  if (streamed && n == kBlock) {
    stream(out, block, kBlock * sizeof(Acc));
  } else {
    __builtin_memcpy(out, block, n * sizeof(Acc));
  }
}

// Computes the keys of each block, calls f(offset, size, keys, fed), and, unless kMode is kRead, writes the fed block
// with zeros for keys larger than `low`. With kPadded, zeros follow the keys of a block that is not full.
template <bool kVelocity, bool kScaled, Mode kMode, bool kPadded, typename T, typename F>
MOE_INLINE void for_blocks(
    const Feedback<T>& args, int64_t begin, int64_t n, key_t<acc_t<T>> low, UndoLog<acc_t<T>>* log, F f) {
  using Acc = acc_t<T>;
  alignas(64) key_t<Acc> keys[kBlock];
  Fed<Acc> fed;
  BlockLog<Acc> block;
  const auto streams = [&](const Acc* out) {
    return args.streamed && reinterpret_cast<uintptr_t>(out) % kLineBytes == 0;
  };
  const bool residual_streams = streams(args.residual + begin), velocity_streams = streams(args.velocity + begin);
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = n - i < kBlock ? n - i : kBlock;
    if (n > kBlock) {
      prefetch<kVelocity>(args, begin + i);
    }
    block_keys<kVelocity, kScaled, kMode>(args, begin + i, size, keys, &fed, &block);
    if constexpr (kMode == Mode::kLog) {
      log_block(block.residual, kScaled ? 1 / args.residual_scale : Acc{1}, size, log->steps + i, log);
      if constexpr (kVelocity) {
        log_block(block.velocity, 1 / args.momentum, size, log->steps + kSegment + i, log);
      }
    }
    if constexpr (kPadded) {
      fill(keys, size);
    }
    f(i, size, keys, fed);
    if constexpr (kMode != Mode::kRead) {
      write_block(fed.residual, keys, low, size, args.residual + begin + i, residual_streams);
      if constexpr (kVelocity) {
        write_block(fed.velocity, keys, low, size, args.velocity + begin + i, velocity_streams);
      }
    }
  }
  if (kMode != Mode::kRead && args.streamed) {
    stream_end();
  }
}

template <Mode kMode, bool kPadded = true, typename T, typename F>
MOE_INLINE void each_block(
    const Feedback<T>& args, int64_t begin, int64_t n, key_t<acc_t<T>> low, UndoLog<acc_t<T>>* log, F f) {
  const bool scaled = args.residual_scale != 1;
  if (args.velocity == nullptr) {
    scaled ? for_blocks<false, true, kMode, kPadded>(args, begin, n, low, log, f)
           : for_blocks<false, false, kMode, kPadded>(args, begin, n, low, log, f);
  } else {
    scaled ? for_blocks<true, true, kMode, kPadded>(args, begin, n, low, log, f)
           : for_blocks<true, false, kMode, kPadded>(args, begin, n, low, log, f);
  }
}

template <Mode kMode, typename T, typename Acc, typename Key>
int64_t scan_logged(
    const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen,
    UndoLog<Acc>* log) {
  int64_t count = 0;
  Scanned<Key> found = *seen;
  const auto collect = [&](int64_t offset, int64_t size, const Key* block, const Fed<Acc>& fed) {
    int64_t i = count;
    count = compact(block, larger(block, size, low, &found), offset, out.keys, out.offsets, count);
    if constexpr (kMode != Mode::kRead) {
      for (; i < count; ++i) {
        const int64_t place = out.offsets[i] - offset;
        out.offsets[i] |= __builtin_signbit(fed.residual[place]) ? kSignBit : 0u;
        if (out.velocities != nullptr) {
          out.velocities[i] = fed.velocity[place];
        }
      }
    }
  };
  each_block<kMode>(args, begin, n, low, log, collect);
  seen->equal = found.equal;
  seen->largest = largest_of(out.keys, count, seen->largest);
  return count;
}

template <Mode kMode, typename T, typename Acc, typename Key>
int64_t scan(const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen) {
  return scan_logged<kMode>(args, begin, n, low, out, seen, static_cast<UndoLog<Acc>*>(nullptr));
}

#if defined(__AVX512F__)
constexpr int64_t kWord = 64; // elements that are fed at once; a uint64_t holds one bit for each
constexpr int64_t kVectors = kWord / kLanes;

// Multiplies by a factor. The check costs less than a product with a subnormal operand or result.
MOE_INLINE void scale_word(__m512 (&x)[kVectors], float factor) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), one = _mm512_set1_epi32(1);
  __m512i least = _mm512_set1_epi32(-1); // of key - 1, which makes a zero the largest number
  for (const __m512 each : x) {
    least = _mm512_min_epu32(least, _mm512_sub_epi32(_mm512_and_si512(_mm512_castps_si512(each), magnitude), one));
  }
  const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(normal_from(factor) - 1));
  if (__builtin_expect(_mm512_cmplt_epu32_mask(least, limit) != 0, 0)) {
    alignas(64) float products[kWord];
    __builtin_memcpy(products, x, sizeof(products));
    scale(products, factor, kWord, products);
    __builtin_memcpy(x, products, sizeof(products));
    return;
  }
  for (__m512& each : x) {
    each = _mm512_mul_ps(each, _mm512_set1_ps(factor));
  }
}

// Logs a word, given the distances in floats from the inverted feed to the old values `before` (`UndoLog`).
MOE_INLINE void log_word(const __m512i (&steps)[kVectors], const float* before, int8_t* out, UndoLog<float>* log) {
  const __m512i low = _mm512_packs_epi32(steps[0], steps[1]), high = _mm512_packs_epi32(steps[2], steps[3]);
  // In the packed bytes, each 128 bits hold four steps of every vector; the permutation restores the order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
  _mm512_storeu_si512(out, bytes);
  uint64_t far = _mm512_cmpge_epu8_mask(_mm512_abs_epi8(bytes), _mm512_set1_epi8(kFarStep));
  for (; far != 0; far &= far - 1) {
    log->values[log->count++] = before[__builtin_ctzll(far)];
  }
}

// Feeds a word and returns the bits of the elements above `bound`, which leave the state. `fed` receives a of all
// elements. With kLogged the call must be in place.
template <bool kScaled, bool kLogged>
MOE_INLINE uint64_t feed_word(
    const Feedback<float>& args, int64_t begin, bool streamed, __m512i bound, float* fed, __m512i* equal,
    UndoLog<float>* log, int8_t* steps) {
  const float* const old = args.residual_in + begin;
  const float* const grad = args.grad + begin;
  __m512 a[kVectors], guess[kVectors];
  for (int64_t j = 0; j < kVectors; ++j) {
    __builtin_prefetch(old + kLanes * j + kAhead);
    __builtin_prefetch(grad + kLanes * j + kAhead);
    a[j] = _mm512_loadu_ps(old + kLanes * j);
  }
  if constexpr (kScaled) {
    scale_word(a, args.residual_scale);
  }
  for (int64_t j = 0; j < kVectors; ++j) {
    a[j] = _mm512_add_ps(a[j], _mm512_loadu_ps(grad + kLanes * j));
    guess[j] = _mm512_sub_ps(a[j], _mm512_loadu_ps(grad + kLanes * j));
  }
  if constexpr (kLogged) {
    if constexpr (kScaled) {
      scale_word(guess, 1 / args.residual_scale);
    }
    __m512i far[kVectors];
    for (int64_t j = 0; j < kVectors; ++j) {
      far[j] = _mm512_sub_epi32(_mm512_loadu_si512(old + kLanes * j), _mm512_castps_si512(guess[j]));
    }
    log_word(far, old, steps, log);
  }
  __mmask16 above[kVectors];
  for (int64_t j = 0; j < kVectors; ++j) {
    const __m512i key = _mm512_and_si512(_mm512_castps_si512(a[j]), _mm512_set1_epi32(0x7FFFFFFF));
    *equal = _mm512_mask_add_epi32(*equal, _mm512_cmpeq_epi32_mask(key, bound), *equal, _mm512_set1_epi32(1));
    above[j] = _mm512_cmpgt_epu32_mask(key, bound);
    _mm512_store_ps(fed + kLanes * j, a[j]);
    const __m512 left = _mm512_mask_blend_ps(above[j], a[j], _mm512_setzero_ps());
    float* const out = args.residual + begin + kLanes * j;
    streamed ? _mm512_stream_ps(out, left) : _mm512_storeu_ps(out, left);
  }
  return _mm512_kunpackd(_mm512_kunpackw(above[3], above[2]), _mm512_kunpackw(above[1], above[0]));
}

template <bool kScaled, bool kLogged>
int64_t feed_and_scan_blocks(
    const Feedback<float>& args, int64_t begin, int64_t n, uint32_t low, const Found<float>& out,
    Scanned<uint32_t>* seen, UndoLog<float>* log) {
  alignas(64) float fed[kBlock];
  Bits chosen;
  const bool streamed = args.streamed && reinterpret_cast<uintptr_t>(args.residual + begin) % kLineBytes == 0;
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(low));
  __m512i equal = _mm512_setzero_si512();
  int64_t count = 0, i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    for (int64_t w = 0; w < kWords; ++w) {
      const int64_t at = i + kWord * w;
      int8_t* const steps = kLogged ? log->steps + at : nullptr;
      chosen.word[w] =
          feed_word<kScaled, kLogged>(args, begin + at, streamed, bound, fed + kWord * w, &equal, log, steps);
    }
    count = compact_signed(fed, chosen, i, out.keys, out.offsets, count);
  }
  seen->equal += sum_of(equal);
  seen->largest = largest_of(out.keys, count, seen->largest);
  if (i < n) {
    const Found<float> rest{out.keys + count, out.offsets + count, nullptr};
    int64_t place = count;
    if constexpr (kLogged) {
      UndoLog<float> own{log->steps + i, log->values, log->count};
      count += scan_logged<Mode::kLog, float, float, uint32_t>(args, begin + i, n - i, low, rest, seen, &own);
      log->count = own.count;
    } else {
      count += scan<Mode::kFeed, float, float, uint32_t>(args, begin + i, n - i, low, rest, seen);
    }
    for (; place < count; ++place) {
      out.offsets[place] += static_cast<uint32_t>(i);
    }
  }
  if (args.streamed) {
    stream_end();
  }
  return count;
}
#endif

// Feeds and scans; logs the feed unless `log` is null.
template <typename T, typename Acc, typename Key>
int64_t logged_feed_and_scan(
    const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen,
    UndoLog<Acc>* log) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    if (args.velocity == nullptr) {
      const bool scaled = args.residual_scale != 1;
      const auto run = log == nullptr
                           ? (scaled ? feed_and_scan_blocks<true, false> : feed_and_scan_blocks<false, false>)
                           : (scaled ? feed_and_scan_blocks<true, true> : feed_and_scan_blocks<false, true>);
      return run(args, begin, n, low, out, seen, log);
    }
  }
#endif
  return log == nullptr ? scan<Mode::kFeed, T, Acc, Key>(args, begin, n, low, out, seen)
                        : scan_logged<Mode::kLog, T, Acc, Key>(args, begin, n, low, out, seen, log);
}

template <typename T, typename Acc, typename Key>
int64_t feed_and_scan(
    const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen) {
  return logged_feed_and_scan<T, Acc, Key>(args, begin, n, low, out, seen, nullptr);
}

template <typename Acc, typename Key>
int64_t scan_fed(const Acc* residual, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen) {
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
    count = compact(block, larger(block, size, low, &found), i, out.keys, out.offsets, count);
  }
  seen->equal = found.equal;
  seen->largest = largest_of(out.keys, count, seen->largest);
  return count;
}

template <typename T, typename Key>
void keys(const Feedback<T>& args, int64_t begin, int64_t n, Key* out) {
  const auto copy = [&](int64_t offset, int64_t size, const Key* block, auto&) {
    __builtin_memcpy(out + offset, block, size * sizeof(Key));
  };
  each_block<Mode::kRead, false>(args, begin, n, Key{}, nullptr, copy);
}

template <typename T>
key_t<acc_t<T>> largest(const Feedback<T>& args, int64_t begin, int64_t n) {
  using Key = key_t<acc_t<T>>;
  Key most = 0;
  each_block<Mode::kRead>(args, begin, n, Key{}, nullptr, [&](int64_t, int64_t size, const Key* block, auto&) {
    most = largest_of(block, size, most);
  });
  return most;
}

template <typename T>
void feed(const Feedback<T>& args, int64_t begin, int64_t n) {
  using Key = key_t<acc_t<T>>;
  constexpr Key kNone = static_cast<Key>(-1) >> 1;
  each_block<Mode::kFeed>(args, begin, n, kNone, nullptr, [](int64_t, int64_t, const Key*, auto&) {});
}

template <typename T, typename Acc = acc_t<T>, typename Key = key_t<acc_t<T>>>
constexpr FeedbackKernels<T> kTable = {
    keys<T, Key>,
    largest<T>,
    scan<Mode::kRead, T, Acc, Key>,
    feed<T>,
    feed_and_scan<T, Acc, Key>,
    logged_feed_and_scan<T, Acc, Key>,
    undo<T>,
    scan_fed<Acc, Key>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kTable<float>, kTable<double>, kTable<BFloat16>, kTable<Half>};

} // namespace moe_ext::topk::MOE_ISA
