// The loops that mask_simd.cpp provides for each instruction set. Torch-free; elements are taken as bits.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::mask {

template <typename Bits>
struct MaskKernels {
  // For elements [0, n): a bit where any bit of the element is set; whole bytes are written.
  void (*pack_bits)(uint8_t* bitmap, const Bits* x, int64_t n);
  // The marked ones of n elements; returns their number.
  int64_t (*pack)(Bits* packed, const Bits* x, const uint8_t* bitmap, int64_t n);
  // Back, with zeros where there is no mark.
  int64_t (*unpack)(Bits* out, const Bits* packed, const uint8_t* bitmap, int64_t n);
};

// Floats behind the tokens that can be read.
constexpr int64_t kReadBehind = 8;

// Rows of a pruned matrix times tokens.
struct RowsArgs {
  const uint8_t* bitmap; // [num_rows, dim / 8]; dim is a multiple of 8
  const float* x;        // [num_tokens, dim], and kReadBehind more
  float* sums;           // [num_rows, num_tokens]
  int64_t num_rows;
  int64_t num_tokens;
  int64_t dim;
};

struct Kernels {
  MaskKernels<uint8_t> b8;
  MaskKernels<uint16_t> b16;
  MaskKernels<uint32_t> b32;
  MaskKernels<uint64_t> b64;
  int64_t (*count)(const uint8_t* bitmap, int64_t num_bytes);
  // values: the marked ones of the rows, in float32 or bfloat16. Sums go through 16 lanes.
  void (*rows_f32)(const RowsArgs& args, const uint32_t* values);
  void (*rows_bf16)(const RowsArgs& args, const uint16_t* values);
};

} // namespace moe_ext::mask
