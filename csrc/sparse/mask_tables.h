// The loops that mask_simd.cpp provides for each instruction set. Torch-free; elements are taken as bits.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::mask {

template <typename Bits>
struct MaskKernels {
  // Of elements [0, n): a bit where any bit of the element is set; whole bytes are written.
  void (*pack_bits)(uint8_t* bitmap, const Bits* x, int64_t n);
  // The marked ones of n elements; returns their number.
  int64_t (*pack)(Bits* packed, const Bits* x, const uint8_t* bitmap, int64_t n);
  // Back, with zeros where there is no mark.
  int64_t (*unpack)(Bits* out, const Bits* packed, const uint8_t* bitmap, int64_t n);
};

// One row of a pruned matrix times tokens.
struct RowArgs {
  const uint8_t* bitmap; // of the row, dim bits, a multiple of 8
  const float* x;        // [num_tokens, dim]
  float* sums;           // [num_tokens]
  int64_t num_tokens;
  int64_t dim;
};

struct Kernels {
  MaskKernels<uint8_t> b8;
  MaskKernels<uint16_t> b16;
  MaskKernels<uint32_t> b32;
  MaskKernels<uint64_t> b64;
  int64_t (*count)(const uint8_t* bitmap, int64_t num_bytes);
  // values: the marked ones of the row, in float32 or bfloat16. Sums go through 16 lanes.
  void (*row_f32)(const RowArgs& args, const uint32_t* values);
  void (*row_bf16)(const RowArgs& args, const uint16_t* values);
};

} // namespace moe_ext::mask
