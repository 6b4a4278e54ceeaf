// Arithmetic of the block quantisers, shared by all backends. No product is fused with a sum; see feedback_math.h.
#pragma once

#include <type_traits>
#include "common/feedback_math.h"

#include "common/philox.h"
#include "quantize/quantize_format.h"

namespace moe_ext::quantize {
namespace {

// Scaling of the elements of a block. The inverse of a subnormal scale would be infinite, so a block with a small scale
// is first multiplied by `lift`.
struct Scaling {
  float scale;   // value = code * scale
  float lift;    // power of two
  float inverse; // code = round(a * lift * inverse)
};

MOE_INLINE Scaling scaling_of(float largest, float largest_code) {
  float scale = largest / largest_code;
  // If the scale was rounded up, the largest finite numbers would be decoded as infinity.
  if (key_of(scale * largest_code) >= kInfinityKey<float> && key_of(largest) < kInfinityKey<float>) {
    scale = bit_cast<float>(bit_cast<uint32_t>(scale) - 1);
  }
  const float lift = scale < 0x1p-64f ? 0x1p64f : 1.0f;
  return {scale, lift, scale > 0 ? 1.0f / (scale * lift) : 0.0f};
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22.
MOE_INLINE float round_even(float x) {
  return (x + 12582912.0f) - 12582912.0f;
}

MOE_INLINE float clamped(float x, float bound) {
  const float low = x < -bound ? -bound : x;
  return low > bound ? bound : low;
}

// Rounds up with a probability equal to the fraction, so that the mean is x. `u` is uniform in [0, 1).
MOE_INLINE float round_random(float x, float u) {
  const float shifted = x + u;
  const float nearest = round_even(shifted);
  return nearest > shifted ? nearest - 1.0f : nearest;
}

// Converts to float8 e4m3fn, saturating: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; 0x7E is 448.
MOE_INLINE uint32_t to_e4m3(float x, bool random, uint32_t word) {
  const uint32_t sign = bit_cast<uint32_t>(x) >> 24 & 0x80u;
  const uint32_t bits = key_of(x);
  const uint32_t up = random ? word >> 12 : 0x7FFFFu + (bits >> 20 & 1u);
  const uint32_t normal = (bits + up - (120u << 23)) >> 20;
  // Below 2^-6 the codes are subnormal, with steps of 2^-9.
  const float steps = bit_cast<float>(bits) * 0x1p9f;
  const float whole = random ? round_random(steps, to_uniform(word)) : round_even(steps);
  const uint32_t subnormal = bit_cast<uint32_t>(clamped(whole, 8.0f) + 8388608.0f) & 0xFu;
  const uint32_t code = bits < 0x3C800000u ? subnormal : normal;
  return sign | (code > 0x7Eu ? 0x7Eu : code);
}

MOE_INLINE float from_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const float value = magnitude < 8 ? subnormal : bit_cast<float>((magnitude << 20) + (120u << 23));
  return bit_cast<float>(bit_cast<uint32_t>(value) | (code & 0x80u) << 24);
}

// The low kBits of `bits` as a signed number.
template <int64_t kBits>
MOE_INLINE int32_t from_low_bits(uint32_t bits) {
  constexpr uint32_t kTop = 1u << (kBits - 1);
  return static_cast<int32_t>((bits & (2 * kTop - 1)) ^ kTop) - static_cast<int32_t>(kTop);
}

// Converts a float that holds a small integer to its low 8 bits; the result for NaN is arbitrary.
MOE_INLINE int8_t to_int8(float whole) {
  return static_cast<int8_t>(bit_cast<uint32_t>(whole + 12582912.0f));
}

// Code of an element `a`. `word` is a random word, used with kRandom only.
template <Format kFormat, bool kRandom>
MOE_INLINE int8_t code_of(float a, Scaling s, uint32_t word) {
  constexpr float kBound = largest_code(kFormat);
  const float scaled = (a * s.lift) * s.inverse;
  if constexpr (kFormat == Format::kFp8) {
    return static_cast<int8_t>(to_e4m3(clamped(scaled, kBound), kRandom, word));
  }
  const float whole = kRandom ? round_random(scaled, to_uniform(word)) : round_even(scaled);
  return to_int8(clamped(whole, kBound));
}

template <Format kFormat>
MOE_INLINE float value_of(int8_t code, float scale) {
  const float number = kFormat == Format::kFp8 ? from_e4m3(static_cast<uint8_t>(code)) : static_cast<float>(code);
  return number * scale;
}

// Exponent of the scale of an MX block, biased by 127: the least power of two by which the largest element, of the
// given key, is at most 448, so that no element is clipped. 255 (NaN) if an element is not finite.
MOE_INLINE uint32_t mx_exponent(uint32_t key) {
  const int32_t exponent = static_cast<int32_t>(key >> 23) - 8 + ((key & 0x7FFFFFu) > 0x600000u);
  const uint32_t found = exponent < 0 ? 0u : static_cast<uint32_t>(exponent);
  return key >= kInfinityKey<float> ? 255u : found;
}

MOE_INLINE float mx_scale(uint32_t exponent) {
  const float power = bit_cast<float>(exponent == 0 ? 0x400000u : exponent << 23);
  return exponent == 255 ? bit_cast<float>(0x7FC00000u) : power;
}

// Scaling of a block of a row, from the key of its largest element. The scale is NaN if an element is not finite.
template <RowFormat kRow>
MOE_INLINE Scaling row_scaling(uint32_t key) {
  if constexpr (kRow == RowFormat::kMx) {
    const uint32_t exponent = mx_exponent(key);
    return {mx_scale(exponent), 1.0f, bit_cast<float>((254u - (exponent < 255u ? exponent : 0u)) << 23)};
  } else {
    Scaling s = scaling_of(bit_cast<float>(key), largest_code(code_format(kRow)));
    s.scale = key < kInfinityKey<float> ? s.scale : bit_cast<float>(0x7FC00000u);
    return s;
  }
}

template <RowFormat kRow>
MOE_INLINE void put_row_scale(uint8_t* to, uint32_t key, float scale) {
  if constexpr (kRow == RowFormat::kMx) {
    *to = static_cast<uint8_t>(mx_exponent(key));
  } else {
    const uint32_t bits = bit_cast<uint32_t>(scale);
    for (int i = 0; i < 4; ++i) {
      to[i] = static_cast<uint8_t>(bits >> 8 * i);
    }
  }
}

template <RowFormat kRow>
MOE_INLINE float get_row_scale(const uint8_t* from) {
  if constexpr (kRow == RowFormat::kMx) {
    return mx_scale(*from);
  } else {
    return bit_cast<float>(
        uint32_t{from[0]} | uint32_t{from[1]} << 8 | uint32_t{from[2]} << 16 | uint32_t{from[3]} << 24);
  }
}

// The largest finite number of T.
template <typename T>
constexpr float largest_finite() {
  return std::is_same_v<T, Half> ? 65504.0f : std::is_same_v<T, BFloat16> ? 0x1.FEp127f : 0x1.FFFFFEp127f;
}

// Clamps a decoded element of kMx to the finite numbers of T: a code that was rounded up may decode to more.
template <RowFormat kRow, typename T>
MOE_INLINE float within(float value) {
  return kRow == RowFormat::kMx ? clamped(value, largest_finite<T>()) : value;
}

// Random words of a block that begins at element `begin`; words(i) belong to the elements i to i + 3.
MOE_INLINE TokenDraws rounding_draws(const RngSource& rng, int64_t begin) {
  TokenDraws draws = token_draws(rng, Stream::kRounding, 0);
  draws.c1 ^= static_cast<uint32_t>(begin >> 34) << 20;
  return draws;
}

// Factor of the terms of the mean magnitude of signs. The sum of large terms might be infinite without it.
MOE_INLINE float sign_factor(uint32_t largest) {
  return bit_cast<float>(largest) > 0x1p100f ? 0x1p-32f : 1.0f;
}

MOE_INLINE float sign_scale(float sum, int64_t n, float factor) {
  return sum / static_cast<float>(n) / factor;
}

} // namespace
} // namespace moe_ext::quantize
