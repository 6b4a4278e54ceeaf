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

// Appends the keys that are at least `low`. Few are: a run of lanes without one is passed over as a whole.
template <typename Key>
MOE_INLINE int64_t
compact(const Key* keys, int64_t n, Key low, int64_t offset, Key* out_keys, uint32_t* out_offsets, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Key any = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      any |= static_cast<Key>(keys[i + lane] >= low);
    }
    if (any == 0) {
      continue;
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      out_keys[count] = keys[i + lane];
      out_offsets[count] = static_cast<uint32_t>(offset + i + lane);
      count += keys[i + lane] >= low;
    }
  }
  for (; i < n; ++i) {
    out_keys[count] = keys[i];
    out_offsets[count] = static_cast<uint32_t>(offset + i);
    count += keys[i] >= low;
  }
  return count;
}

#if defined(__AVX512F__)
// Compressed in a register and stored whole: a compressing store is microcode on some processors. Without a branch,
// which would be mispredicted for every seventh vector where one element of a hundred is collected.
MOE_INLINE int64_t compact(
    const uint32_t* keys, int64_t n, uint32_t low, int64_t offset, uint32_t* out_keys, uint32_t* out_offsets,
    int64_t count) {
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(low));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 inside = static_cast<__mmask16>(n - i >= kLanes ? 0xFFFF : (1 << (n - i)) - 1);
    const __m512i key = _mm512_maskz_loadu_epi32(inside, keys + i);
    const __mmask16 chosen = _mm512_mask_cmpge_epu32_mask(inside, key, bound);
    const __m512i place = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(offset + i)));
    _mm512_storeu_si512(out_keys + count, _mm512_maskz_compress_epi32(chosen, key));
    _mm512_storeu_si512(out_offsets + count, _mm512_maskz_compress_epi32(chosen, place));
    count += __builtin_popcount(chosen);
  }
  return count;
}
#endif

template <bool kVelocity, bool kFeed, typename T, typename Key>
MOE_INLINE void block_keys(const Feedback<T>& x, int64_t begin, int64_t n, Key* __restrict keys) {
  using Acc = acc_t<T>;
  const T* __restrict grad = x.grad + begin;
  Acc* __restrict residual = x.residual + begin;
  Acc* __restrict velocity = kVelocity ? x.velocity + begin : nullptr;
  const Feedback<T> block{grad, residual, velocity, x.residual_scale, x.momentum};
  for (int64_t i = 0; i < n; ++i) {
    const Acc u = momentum_of<kVelocity>(block, i);
    const Acc a = owed(block, u, i);
    if constexpr (kFeed) {
      residual[i] = a;
      if constexpr (kVelocity) {
        velocity[i] = u;
      }
    }
    keys[i] = key_of(a);
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

template <bool kVelocity, bool kFeed, typename T, typename Key>
MOE_INLINE int64_t
scan_blocks(const Feedback<T>& args, int64_t begin, int64_t n, Key low, Key* keys, uint32_t* offsets, Key* largest) {
  alignas(64) Key block[kBlock];
  int64_t count = 0;
  Key most = *largest;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t size = n - i < kBlock ? n - i : kBlock;
    prefetch<kVelocity>(args, begin + i);
    block_keys<kVelocity, kFeed>(args, begin + i, size, block);
    most = largest_of(block, size, most);
    count = compact(block, size, low, i, keys, offsets, count);
  }
  *largest = most;
  return count;
}

template <bool kFeed, typename T, typename Key>
int64_t scan_segment(
    const Feedback<T>& args, int64_t begin, int64_t n, Key low, Key* keys, uint32_t* offsets, Key* largest) {
  return args.velocity == nullptr ? scan_blocks<false, kFeed>(args, begin, n, low, keys, offsets, largest)
                                  : scan_blocks<true, kFeed>(args, begin, n, low, keys, offsets, largest);
}

template <typename T, typename Key>
void keys(const Feedback<T>& args, int64_t begin, int64_t n, Key* out) {
  if (args.velocity == nullptr) {
    block_keys<false, false>(args, begin, n, out);
  } else {
    block_keys<true, false>(args, begin, n, out);
  }
}

template <bool kVelocity, typename T>
MOE_INLINE void feed_blocks(const Feedback<T>& args, int64_t begin, int64_t n) {
  alignas(64) key_t<acc_t<T>> unused[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    prefetch<kVelocity>(args, begin + i);
    block_keys<kVelocity, true>(args, begin + i, n - i < kBlock ? n - i : kBlock, unused);
  }
}

template <typename T>
void feed(const Feedback<T>& args, int64_t begin, int64_t n) {
  if (args.velocity == nullptr) {
    feed_blocks<false>(args, begin, n);
  } else {
    feed_blocks<true>(args, begin, n);
  }
}

template <typename T, typename Key = key_t<acc_t<T>>>
constexpr FeedbackKernels<T> kTable = {keys<T, Key>, scan_segment<false, T, Key>, feed<T>, scan_segment<true, T, Key>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kTable<float>, kTable<double>, kTable<BFloat16>, kTable<Half>};

} // namespace moe_ext::compression::topk::MOE_ISA
