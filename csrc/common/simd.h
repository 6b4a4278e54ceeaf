// Scalar types and maths of the loops that are compiled once per instruction set (<family>_simd.cpp). Everything here
// has internal linkage, and such a file includes nothing else. The linker could otherwise keep the AVX-512 object's
// copy of an inline function for every processor.
#pragma once

#include <cstdint>
#include <type_traits>

// CUDA kernels use the same maths.
#if defined(__CUDACC__)
#define MOE_INLINE __host__ __device__ __forceinline__
#else
#define MOE_INLINE inline __attribute__((always_inline))
#endif

namespace moe_ext {

// Storage types only, with the bits of torch's types of the same names.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Type of sums and products: double for double, else float.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// One table of loops for each floating dtype.
template <template <typename> class Table>
struct PerDtype {
  Table<float> f32;
  Table<double> f64;
  Table<BFloat16> bf16;
  Table<Half> f16;

  template <typename T>
  const Table<T>& of() const {
    if constexpr (std::is_same_v<T, float>) {
      return f32;
    } else if constexpr (std::is_same_v<T, double>) {
      return f64;
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      return bf16;
    } else {
      return f16;
    }
  }
};

namespace {

template <typename To, typename From>
MOE_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

MOE_INLINE float to_acc(float x) {
  return x;
}

MOE_INLINE double to_acc(double x) {
  return x;
}

MOE_INLINE float to_acc(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Exact: a product with 2^112 corrects the shifted exponent and normalises subnormals. NaN and inf keep their exponent
// of all ones.
MOE_INLINE float to_acc(Half x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7FFFu) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0F800000u ? 0x7F800000u : 0u;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | sign);
}

template <typename T>
MOE_INLINE T from_acc(acc_t<T> x);

template <>
MOE_INLINE float from_acc<float>(float x) {
  return x;
}

template <>
MOE_INLINE double from_acc<double>(double x) {
  return x;
}

// Rounds to nearest, ties to even, as torch does. NaN is set apart, because the increment could carry it into infinity.
template <>
MOE_INLINE BFloat16 from_acc<BFloat16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7FC0u : rounded)};
}

// Rounds to nearest, ties to even. Subnormal results come from adding 0.5, a float whose last place is 2^-24, the
// smallest step of half.
template <>
MOE_INLINE Half from_acc<Half>(float x) {
  const uint32_t sign = (bit_cast<uint32_t>(x) >> 16) & 0x8000u;
  const uint32_t bits = bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
  const uint32_t normal = (bits - 0x38000000u + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3F000000u;
  uint32_t magnitude = bits < 0x38800000u ? subnormal : normal;
  magnitude = bits >= 0x477FF000u ? 0x7C00u : magnitude;
  magnitude = bits > 0x7F800000u ? 0x7E00u : magnitude;
  return {static_cast<uint16_t>(sign | magnitude)};
}

// a b + c, rounded once. Nothing else is fused (-ffp-contract=off), so that every instruction set computes the same
// bits. Without the instruction, the sum is taken in double, where the product is exact, and rounded to odd: truncated,
// with the last bit set if anything was lost, so that the second rounding, to float, is correct.
MOE_INLINE float fma_acc(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return ::fmaf(a, b, c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * static_cast<double>(b), addend = static_cast<double>(c);
  const double sum = product + addend;
  const double of_addend = sum - product;
  const double lost = (product - (sum - of_addend)) + (addend - of_addend);
  // Integers only, because the vectoriser has no comparisons of doubles here.
  const uint64_t bits = bit_cast<uint64_t>(sum), lost_bits = bit_cast<uint64_t>(lost), magnitude = lost_bits << 1;
  const uint64_t finite = (((bits >> 52) & 0x7FFu) - 0x7FFu) >> 63;
  const uint64_t inexact = finite & ((magnitude | (0 - magnitude)) >> 63);
  const uint64_t above = (lost_bits ^ bits) >> 63; // the lost part points towards zero
  return static_cast<float>(bit_cast<double>((bits - (inexact & above)) | inexact));
#endif
}

// exp(x) to about one unit in the last place, for x <= 88; results below 2^-126 are flushed to zero.
// x = n ln 2 + r, |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds n to an integer and leaves it in the low bits.
MOE_INLINE float exp_acc(float x) {
#if defined(__CUDA_ARCH__)
  return ::expf(x); // as exact, and shorter, because the device has an instruction for 2^x
#else
  const float clamped = x < -87.33654f ? -87.33654f : x;
  const float shifted = fma_acc(clamped, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  const float r = fma_acc(n, 2.12194440e-4f, fma_acc(n, -0.693359375f, clamped));
  float p = 1.9875691500e-4f;
  p = fma_acc(p, r, 1.3981999507e-3f);
  p = fma_acc(p, r, 8.3334519073e-3f);
  p = fma_acc(p, r, 4.1665795894e-2f);
  p = fma_acc(p, r, 1.6666665459e-1f);
  p = fma_acc(p, r, 5.0000001201e-1f);
  p = fma_acc(p * r, r, r) + 1.0f;
  const float scale = bit_cast<float>((bit_cast<int32_t>(shifted) - 0x4B400000 + 127) << 23);
  return x < -87.33654f ? 0.0f : p * scale;
#endif
}

MOE_INLINE double exp_acc(double x) {
#if defined(__CUDA_ARCH__)
  return ::exp(x);
#else
  return __builtin_exp(x);
#endif
}

MOE_INLINE double erfc_acc(double x) {
#if defined(__CUDA_ARCH__)
  return ::erfc(x);
#else
  return __builtin_erfc(x);
#endif
}

// Does not overflow for either sign, because exp gets -|x|.
template <typename Acc>
MOE_INLINE Acc sigmoid_acc(Acc x) {
  const Acc e = exp_acc(x < 0 ? x : -x);
  return (x < 0 ? e : Acc(1)) / (Acc(1) + e);
}

// Sum of n products in a fixed order of 16 lanes, so that the width of the vectors does not change the bits.
template <typename Acc, typename A, typename B>
MOE_INLINE Acc dot(const A* a, const B* b, int64_t n) {
  constexpr int64_t kLanes = 16;
  Acc lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += Acc(to_acc(a[i + lane])) * Acc(to_acc(b[i + lane]));
    }
  }
  for (int64_t lane = 0; i + lane < n; ++lane) {
    lanes[lane] += Acc(to_acc(a[i + lane])) * Acc(to_acc(b[i + lane]));
  }
  Acc sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum += lanes[lane];
  }
  return sum;
}

} // namespace
} // namespace moe_ext
