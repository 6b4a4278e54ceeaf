// The format of coded exponents, and the loops that exponent_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::exponent {

constexpr int64_t kBlock = 8192; // elements of a block
constexpr int64_t kBlockHeader = 24;
constexpr int64_t kHeader = 16;
constexpr uint32_t kMagic = 0x31505845; // "EXP1"

constexpr int64_t kStride = 9; // stride of the sample; odd, so that it does not stay in the same columns of a matrix
constexpr int kMostLevels = 3, kMostSymbols = 22;

// Widths of the levels of each plan; 0 ends them. The first byte of a block is the index of its plan plus one, or 0 if
// the block holds the elements unchanged.
constexpr int kNumPlans = 8;
constexpr int kPlans[kNumPlans][kMostLevels] = {{1, 2, 2}, {1, 2, 3}, {2, 2, 2}, {2, 2, 3},
                                                {2, 3, 3}, {3, 3, 0}, {3, 4, 0}, {4, 3, 0}};

enum Kind : uint32_t { kBFloat16 = 0, kHalf = 1, kFloat = 2, kNumKinds = 3 };

// First bytes of a payload.
struct Header {
  uint32_t magic;
  uint32_t kind;
  uint64_t numel;
};
static_assert(sizeof(Header) == kHeader);

struct Kernels {
  // Encodes n <= kBlock elements and returns the number of bytes written. `dst` must have room for the block header and
  // the unchanged elements, padded to 8 bytes.
  int64_t (*encode[kNumKinds])(uint8_t* dst, const void* x, int64_t n);
  // Decodes a block of n elements from `size` bytes, within bounds. Returns false if these are no such block.
  bool (*decode[kNumKinds])(void* out, const uint8_t* src, int64_t size, int64_t n);
};

} // namespace moe_ext::exponent
