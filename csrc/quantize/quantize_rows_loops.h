// Loops over the rows of a dispatch, compiled once per instruction set. A block of elements with one scale is read into
// registers once; its largest element and its codes are computed from there. All functions have internal linkage, for
// the reason in simd.h.
#pragma once

#include "common/vectors.h"
#include "quantize/quantize_tables.h"

namespace moe_ext::quantize {
namespace {

constexpr int64_t kAheadOfRows = 2048;

// max(low, x); `low` if x is NaN.
MOE_INLINE Floats at_least(float low, Floats x) {
  return x > low ? x : splat(low);
}

// Codes of `code_of` without kRandom, in the low byte of each lane.
template <Format kFormat>
MOE_INLINE Words codes_of(Floats a, Scaling s) {
  constexpr float kBound = largest_code(kFormat);
  const Floats scaled = (a * s.lift) * s.inverse;
  if constexpr (kFormat == Format::kFp8) {
    const Words bits = bit_cast<Words>(scaled);
    const Floats magnitude = at_most(kBound, bit_cast<Floats>(bits & 0x7FFFFFFFu));
    const Words of = bit_cast<Words>(magnitude);
    const Words normal = (of + (0x7FFFFu - (120u << 23)) + (of >> 20 & 1u)) >> 20;
    // Below 2^-6 the codes are subnormal, with steps of 2^-9, the last place of a float near 2^14.
    const Words subnormal = bit_cast<Words>(magnitude + 16384.0f) - 0x46800000u;
    return (bits >> 24 & 0x80u) | (of < 0x3C800000u ? subnormal : normal);
  } else {
    return bit_cast<Words>(at_least(-kBound, at_most(kBound, scaled)) + 12582912.0f);
  }
}

// Values of fp8 codes, one code per lane; equal to `value_of`.
MOE_INLINE Floats from_e4m3(Words codes) {
  const Words magnitude = codes & 0x7Fu;
  const Words subnormal = bit_cast<Words>(bit_cast<Floats>(magnitude + 0x46800000u) - 16384.0f);
  const Words value = magnitude < 8u ? subnormal : (magnitude << 20) + (120u << 23);
  return bit_cast<Floats>(value | (codes & 0x80u) << 24);
}

template <Format kFormat>
MOE_INLINE Floats values_of(Bytes codes, float scale) {
  if constexpr (kFormat == Format::kFp8) {
    return from_e4m3(widened(codes)) * scale;
  } else {
    return __builtin_convertvector(widened(bit_cast<SignedBytes>(codes)), Floats) * scale;
  }
}

// Writes the codes and the scale of a block: the scale NaN and codes of zero if an element is not finite.
template <RowFormat kRow, typename T>
MOE_INLINE void quantize_row_block(const T* __restrict x, uint8_t* __restrict codes, uint8_t* __restrict scale) {
  constexpr int64_t kVectors = row_block(kRow) / kLanes;
  Floats a[kVectors];
  Ints most = {};
  for (int64_t i = 0; i < kVectors; ++i) {
    a[i] = load_floats(x + kLanes * i);
    const Ints keys = bit_cast<Ints>(a[i]) & 0x7FFFFFFF;
    most = keys > most ? keys : most;
  }
  const uint32_t key = static_cast<uint32_t>(largest_lane(most));
  const Scaling s = row_scaling<kRow>(key);
  put_row_scale<kRow>(scale, key, s.scale);
  if (key >= kInfinityKey<float>) {
    __builtin_memset(codes, 0, row_block(kRow));
    return;
  }
  for (int64_t i = 0; i < kVectors; ++i) {
    store(codes + kLanes * i, lowest_bytes(codes_of<code_format(kRow)>(a[i], s)));
  }
}

template <RowFormat kRow, typename T>
MOE_INLINE void dequantize_row_block(T* __restrict out, const uint8_t* __restrict codes, float scale) {
  for (int64_t i = 0; i < row_block(kRow); i += kLanes) {
    const Floats values = values_of<code_format(kRow)>(load<Bytes>(codes + i), scale);
    if constexpr (kRow == RowFormat::kMx) {
      // As `within`: a code that was rounded up may decode to more than the largest finite number of T.
      constexpr float kMost = largest_finite<T>();
      const Floats low = values < -kMost ? splat(-kMost) : values;
      store_floats(out + i, low > kMost ? splat(kMost) : low);
    } else {
      store_floats(out + i, values);
    }
  }
}

template <typename T, RowFormat kRow>
void quantize_rows(const QuantizeRowsArgs<T>& args, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = row_block(kRow);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = args.x + row * args.dim;
    uint8_t* codes = args.rows + row * row_bytes(args.dim, kRow);
    uint8_t* scale = codes + args.dim;
    int64_t left = args.dim;
    for (; left >= kBlock; left -= kBlock, x += kBlock, codes += kBlock, scale += scale_bytes(kRow)) {
      for (int64_t i = 0; i < kBlock; i += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(x + kAheadOfRows + i);
      }
      quantize_row_block<kRow>(x, codes, scale);
    }
    if (left > 0) {
      T rest[kBlock] = {};
      uint8_t of_rest[kBlock];
      __builtin_memcpy(rest, x, left * sizeof(T));
      quantize_row_block<kRow>(rest, of_rest, scale);
      __builtin_memcpy(codes, of_rest, left);
    }
  }
}

template <typename T, RowFormat kRow>
void dequantize_rows(const DequantizeRowsArgs<T>& args, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = row_block(kRow);
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* codes = args.rows + row * row_bytes(args.dim, kRow);
    const uint8_t* scale = codes + args.dim;
    T* out = args.out + row * args.dim;
    int64_t left = args.dim;
    for (; left >= kBlock; left -= kBlock, out += kBlock, codes += kBlock, scale += scale_bytes(kRow)) {
      dequantize_row_block<kRow>(out, codes, get_row_scale<kRow>(scale));
    }
    if (left > 0) {
      T rest[kBlock];
      uint8_t of_rest[kBlock] = {};
      __builtin_memcpy(of_rest, codes, left);
      dequantize_row_block<kRow>(rest, of_rest, get_row_scale<kRow>(scale));
      __builtin_memcpy(out, rest, left * sizeof(T));
    }
  }
}

} // namespace
} // namespace moe_ext::quantize
