// Products of a block with a factor. A product with a subnormal operand or result takes over a hundred cycles on many
// processors, so a block that may hold one is multiplied in double. Compiled once per instruction set.
#pragma once

#include "selection/compact_simd.h"

namespace moe_ext::topk::MOE_ISA {
namespace {

// Key from which on neither x nor factor * x can be subnormal.
MOE_INLINE uint32_t normal_from(float factor) {
  const float bound = factor >= 1 || factor == 0 ? 0x1p-126f : factor > 0x1p-100f ? 0x1p-125f / factor : 0x1p-25f;
  return key_of(bound);
}

// x * factor for small x, rounded once: the product in double is exact, and a subnormal result is rounded to a multiple
// of 2^-149. `x` is converted to double by its bits, because the processor's conversion is as slow as its product.
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

// `x` may be `out`. Not inlined: the compiler vectorises this loop only as a function of its own.
__attribute__((noinline)) void scale_small(const float* x, float factor, uint32_t limit, int64_t n, float* out) {
  alignas(64) float products[kBlock];
  // The product of a subnormal factor and an x below the limit rounds to zero.
  const double wide = key_of(factor) < 0x00800000u ? 0.0 : static_cast<double>(factor);
  for (int64_t i = 0; i < n; ++i) {
    const bool large = key_of(x[i]) >= limit;
    const float usual = factor * (large ? x[i] : 0.0f);
    const float small = small_product(x[i], wide);
    products[i] = large ? usual : small;
  }
  __builtin_memcpy(out, products, n * sizeof(float));
}

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

} // namespace
} // namespace moe_ext::topk::MOE_ISA
