// The format of coded exponents, and the loops that exponent_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::exponent {

constexpr int64_t kBlock = 8192; // elements
constexpr int64_t kBlockHeader = 24;
constexpr int64_t kHeader = 16;
constexpr uint32_t kMagic = 0x31505845; // "EXP1"

enum Kind : uint32_t { kBFloat16 = 0, kHalf = 1, kFloat = 2, kNumKinds = 3 };

struct Kernels {
  // Of n <= kBlock elements; dst has room for the header and the elements, padded to 8. Returns bytes written.
  int64_t (*encode[kNumKinds])(uint8_t* dst, const void* x, int64_t n);
  // False where src, of size bytes, is no block of n elements; reads and writes within both.
  bool (*decode[kNumKinds])(void* out, const uint8_t* src, int64_t size, int64_t n);
};

} // namespace moe_ext::exponent
