// The format of coded exponents, and the loops that exponent_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::exponent {

constexpr int64_t kBlock = 8192; // elements
constexpr int64_t kBlockHeader = 24;
constexpr int64_t kHeader = 16;
constexpr uint32_t kMagic = 0x31505845; // "EXP1"

constexpr int64_t kStride = 9; // of the sample; odd, so that no column of a matrix is taken alone
constexpr int kMostLevels = 3, kMostSymbols = 22;

// Widths of the levels, by the first byte of a block less one; 0 ends them. A block of 0 holds elements as they are.
constexpr int kNumPlans = 8;
constexpr int kPlans[kNumPlans][kMostLevels] = {{1, 2, 2}, {1, 2, 3}, {2, 2, 2}, {2, 2, 3},
                                                {2, 3, 3}, {3, 3, 0}, {3, 4, 0}, {4, 3, 0}};

enum Kind : uint32_t { kBFloat16 = 0, kHalf = 1, kFloat = 2, kNumKinds = 3 };

// In front of a payload.
struct Header {
  uint32_t magic;
  uint32_t kind;
  uint64_t numel;
};
static_assert(sizeof(Header) == kHeader);

struct Kernels {
  // For n <= kBlock elements; dst has room for the header and the elements, padded to 8. Returns bytes written.
  int64_t (*encode[kNumKinds])(uint8_t* dst, const void* x, int64_t n);
  // False where src, of size bytes, is no block of n elements; reads and writes within both.
  bool (*decode[kNumKinds])(void* out, const uint8_t* src, int64_t size, int64_t n);
};

} // namespace moe_ext::exponent
