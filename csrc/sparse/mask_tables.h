// The loops that mask_simd.cpp provides for each instruction set, on elements as unsigned integers. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::mask {

template <typename Bits>
struct MaskKernels {
  // Sets bit i if any bit of element i is set, for i in [0, n). Writes whole bytes.
  void (*pack_bits)(uint8_t* bitmap, const Bits* x, int64_t n);
  // Copies the marked ones of n elements to `packed`; returns their number.
  int64_t (*pack)(Bits* packed, const Bits* x, const uint8_t* bitmap, int64_t n);
  // Copies `packed` to the marked ones of n elements and zeros to the others; returns the number of marks.
  int64_t (*unpack)(Bits* out, const Bits* packed, const uint8_t* bitmap, int64_t n);
};

// Floats after the end of `RowsArgs::x` that the loops may read.
constexpr int64_t kReadBehind = 8;

// Arguments of a product of rows of a pruned matrix with tokens.
struct RowsArgs {
  const uint8_t* bitmap; // [num_rows, dim / 8]; dim is a multiple of 8
  const float* x;        // [num_tokens, dim], followed by kReadBehind readable floats
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
  // Multiply; `values` holds the marked elements of the rows, in float32 or bfloat16. Sums go through 16 lanes.
  void (*rows_f32)(const RowsArgs& args, const uint32_t* values);
  void (*rows_bf16)(const RowsArgs& args, const uint16_t* values);
};

} // namespace moe_ext::mask
