// Comparison of a block of keys with a bound, and compaction of the larger keys. Compiled once per instruction set.
#pragma once

#include "selection/topk_tables.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace moe_ext::topk::MOE_ISA {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kLanes = 16;
constexpr int64_t kWords = kBlock / 64;
constexpr int64_t kFewHits = 32; // with more chosen elements in a block, AVX-512 compacts whole vectors

struct Bits { // one bit for each element of a block
  uint64_t word[kWords];
};

// Packs bytes that are 0 or 1 into bits. The multiplication gathers eight bytes in the highest byte of the product.
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

// Calls store(slot, i) for each bit i that is set, in order, with slots from `slot` on, and returns the next free slot.
// The first kAlways slots of each word are stored even without a bit: a branch on the number of bits would be
// mispredicted. `store` must therefore accept kAlways slots beyond the last, whose contents are garbage.
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

// Bits of the keys that are larger than `low`; adds the number of keys equal to `low`, among the first n, to `seen`.
// `keys` has kBlock elements, zeros after the first n.
template <typename Key>
MOE_INLINE Bits larger(const Key* keys, int64_t n, Key low, Scanned<Key>* seen) {
  // The top bit of a key is 0, and every instruction set can compare signed numbers.
  using Signed = std::make_signed_t<Key>;
  alignas(64) uint8_t flags[kBlock] = {};
  Key equal = 0;
  for (int64_t i = 0; i < n; ++i) {
    equal += static_cast<Key>(keys[i] == low);
    flags[i] = static_cast<uint8_t>(static_cast<Signed>(keys[i]) > static_cast<Signed>(low));
  }
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
// Replaces _mm512_reduce_add_epi32, whose header makes some compilers warn of an uninitialised variable.
MOE_INLINE int64_t sum_of(__m512i counts) {
  alignas(64) int32_t lanes[kLanes];
  _mm512_store_si512(lanes, counts);
  int64_t sum = 0;
  for (const int32_t lane : lanes) {
    sum += lane;
  }
  return sum;
}

MOE_INLINE Bits larger(const uint32_t* keys, int64_t n, uint32_t low, Scanned<uint32_t>* seen) {
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(low));
  __m512i equal = _mm512_setzero_si512();
  Bits bits;
  for (int64_t w = 0; w < kWords; ++w) {
    uint64_t word = 0;
    for (int64_t i = 0; i < 64; i += kLanes) {
      const __m512i key = _mm512_loadu_si512(keys + 64 * w + i);
      const __mmask16 same = _mm512_cmpeq_epi32_mask(key, bound);
      equal = _mm512_mask_sub_epi32(equal, same, equal, _mm512_set1_epi32(-1));
      word |= static_cast<uint64_t>(_mm512_cmpgt_epu32_mask(key, bound)) << i;
    }
    bits.word[w] = word;
  }
  seen->equal += sum_of(equal) - (low == 0 ? kBlock - n : 0);
  return bits;
}

// Compacts the chosen numbers, or keys, of a block: magnitudes to `out_keys`, sign bits to the top bits of
// `out_offsets`. Many elements are compressed in a register and stored as whole vectors, because a compressing store is
// microcode, and slow, on some processors.
template <typename Number>
MOE_INLINE int64_t compact_signed(
    const Number* block, const Bits& chosen, int64_t offset, uint32_t* out_keys, uint32_t* out_offsets, int64_t count) {
  static_assert(sizeof(Number) == sizeof(uint32_t));
  if (num_bits(chosen) <= kFewHits) {
    return for_bits<2>(chosen, count, [&](int64_t slot, int64_t i) {
      const uint32_t bits = bit_cast<uint32_t>(block[i]);
      out_keys[slot] = bits & ~kSignBit;
      out_offsets[slot] = static_cast<uint32_t>(offset + i) | (bits & kSignBit);
    });
  }
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const __mmask16 mask = static_cast<__mmask16>(chosen.word[i / 64] >> (i % 64));
    const __m512i bits = _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(block + i));
    const __m512i place = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(offset + i)));
    const __m512i signs = _mm512_and_si512(bits, sign);
    _mm512_storeu_si512(out_keys + count, _mm512_andnot_si512(sign, bits));
    _mm512_storeu_si512(out_offsets + count, _mm512_or_si512(signs, _mm512_maskz_compress_epi32(mask, place)));
    count += __builtin_popcount(mask);
  }
  return count;
}

MOE_INLINE int64_t compact(
    const uint32_t* keys, const Bits& chosen, int64_t offset, uint32_t* out_keys, uint32_t* out_offsets,
    int64_t count) {
  return compact_signed(keys, chosen, offset, out_keys, out_offsets, count);
}
#endif

} // namespace
} // namespace moe_ext::topk::MOE_ISA
