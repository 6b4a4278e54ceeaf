// Loops of the gradient selection, compiled once per instruction set: a block is computed into buffers that stay in the
// first cache, its keys are compacted from there, and what is left of it goes to the state.
#include "common/stream.h"
#include "selection/undo_simd.h"

namespace moe_ext::topk::MOE_ISA {
namespace {

enum class Mode { kRead, kFeed, kLog };

// New values of a block of the state.
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
constexpr int64_t kAhead = 2048; // elements

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

// Writes a block without the elements whose keys are larger than `low`, past the caches where that is asked for.
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

#if defined(__AVX512F__)
MOE_INLINE void write_block(float* block, const uint32_t* keys, uint32_t low, int64_t n, float* out, bool streamed) {
  if (n < kBlock) {
    write_block<float, uint32_t>(block, keys, low, n, out, false);
    return;
  }
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(low));
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const __mmask16 stays = _mm512_cmple_epu32_mask(_mm512_load_si512(keys + i), bound);
    const __m512 left = _mm512_maskz_load_ps(stays, block + i);
    if (streamed) {
      _mm512_stream_ps(out + i, left);
    } else {
      _mm512_storeu_ps(out + i, left);
    }
  }
}
#endif

// Calls f(offset, size, keys, fed) for each block, after its keys have been computed, and writes what is fed without
// the keys larger than `low`. The keys of a block that is not full are zero behind its end, if kPadded.
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
      log_block(block.residual, kScaled ? 1 / args.residual_scale : Acc{1}, size, log->codes + i / 4, log);
      if constexpr (kVelocity) {
        log_block(block.velocity, 1 / args.momentum, size, log->codes + kCodeBytes + i / 4, log);
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
  *seen = found;
  return count;
}

template <Mode kMode, typename T, typename Acc, typename Key>
int64_t scan(const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen) {
  return scan_logged<kMode>(args, begin, n, low, out, seen, static_cast<UndoLog<Acc>*>(nullptr));
}

#if defined(__AVX512F__)
// True if a product of the block is slow, through subnormal numbers; such a product costs more than this check.
MOE_INLINE bool has_slow_products(const float* block, float factor) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), one = _mm512_set1_epi32(1);
  const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(normal_from(factor) - 1));
  unsigned slow = 0;
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const __m512i key = _mm512_and_si512(_mm512_loadu_si512(block + i), magnitude);
    // For zeros, the key less one is the largest number.
    slow |= _mm512_cmplt_epu32_mask(_mm512_sub_epi32(key, one), least);
  }
  return slow != 0;
}

// A whole block in one go, where no product is slow: else false, and nothing is written. A logged block is in place.
template <bool kScaled, bool kLogged>
MOE_INLINE bool feed_block(
    const Feedback<float>& args, int64_t begin, uint32_t low, uint32_t* keys, float* fed, Bits* chosen,
    Scanned<uint32_t>* seen, UndoLog<float>* log, uint8_t* log_codes) {
  if (kScaled && has_slow_products(args.residual_in + begin, args.residual_scale)) {
    return false;
  }
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), bound = _mm512_set1_epi32(static_cast<int32_t>(low));
  const __m512i one = _mm512_set1_epi32(1);
  const __m512 factor = _mm512_set1_ps(args.residual_scale), inverse = _mm512_set1_ps(1 / args.residual_scale);
  __m512i most = _mm512_set1_epi32(static_cast<int32_t>(seen->largest)), equal = _mm512_setzero_si512();
  Codes codes;
  for (int64_t w = 0; w < kWords; ++w) {
    uint64_t word = 0, code_low = 0, code_high = 0;
    for (int64_t i = 64 * w; i < 64 * (w + 1); i += kLanes) {
      __builtin_prefetch(args.residual_in + begin + i + kAhead);
      __builtin_prefetch(args.grad + begin + i + kAhead);
      const __m512 before = _mm512_loadu_ps(args.residual_in + begin + i);
      const __m512 grad = _mm512_loadu_ps(args.grad + begin + i);
      const __m512 a = _mm512_add_ps(kScaled ? _mm512_mul_ps(factor, before) : before, grad);
      if constexpr (kLogged) {
        const __m512 carried = _mm512_sub_ps(a, grad);
        const __m512 guess = kScaled ? _mm512_mul_ps(inverse, carried) : carried;
        add_codes(before, guess, i % 64, &code_low, &code_high, log);
      }
      const __m512i key = _mm512_and_si512(_mm512_castps_si512(a), magnitude);
      most = _mm512_max_epu32(most, key);
      equal = _mm512_mask_add_epi32(equal, _mm512_cmpeq_epi32_mask(key, bound), equal, one);
      word |= static_cast<uint64_t>(_mm512_cmpgt_epu32_mask(key, bound)) << (i % 64);
      _mm512_store_ps(fed + i, a);
      _mm512_store_si512(keys + i, key);
    }
    chosen->word[w] = word;
    codes.low.word[w] = code_low;
    codes.high.word[w] = code_high;
  }
  if constexpr (kLogged) {
    __builtin_memcpy(log_codes, &codes, sizeof(codes));
  }
  seen->largest = _mm512_reduce_max_epu32(most);
  seen->equal += _mm512_reduce_add_epi32(equal);
  return true;
}

template <bool kScaled, bool kLogged>
int64_t feed_and_scan_blocks(
    const Feedback<float>& args, int64_t begin, int64_t n, uint32_t low, const Found<float>& out,
    Scanned<uint32_t>* seen, UndoLog<float>* log) {
  alignas(64) uint32_t keys[kBlock];
  alignas(64) float fed[kBlock];
  Bits chosen;
  const bool streamed = args.streamed && reinterpret_cast<uintptr_t>(args.residual + begin) % kLineBytes == 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    int64_t place = count;
    uint8_t* log_codes = kLogged ? log->codes + i / 4 : nullptr;
    if (n - i >= kBlock &&
        feed_block<kScaled, kLogged>(args, begin + i, low, keys, fed, &chosen, seen, log, log_codes)) {
      count = compact(keys, chosen, i, out.keys, out.offsets, count);
      for (; place < count; ++place) {
        out.offsets[place] |= bit_cast<uint32_t>(fed[out.offsets[place] - i]) & kSignBit;
      }
      write_block(fed, keys, low, kBlock, args.residual + begin + i, streamed);
      continue;
    }
    const Found<float> rest{out.keys + count, out.offsets + count, nullptr};
    const int64_t size = n - i < kBlock ? n - i : kBlock;
    if constexpr (kLogged) {
      UndoLog<float> own{log_codes, log->values, log->count};
      count += scan_logged<Mode::kLog, float, float, uint32_t>(args, begin + i, size, low, rest, seen, &own);
      log->count = own.count;
    } else {
      count += scan<Mode::kFeed, float, float, uint32_t>(args, begin + i, size, low, rest, seen);
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

// With a log or, where it is null, without.
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
  *seen = found;
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
