// The loops that quantized_mm_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::quantized_mm {

// One row of codes times tokens, without outliers.
struct RowArgs {
  const uint8_t* codes;
  const float* scales; // [num_blocks]
  const float* x;      // [num_tokens, dim]; for 4 bits, of each 32 columns the 16 even ones come first
  float* sums;         // [num_tokens]
  int64_t num_tokens;
  int64_t dim;
  int64_t block; // columns that share a scale, a multiple of 32
};

struct Kernels {
  void (*row8)(const RowArgs& args);
  void (*row4)(const RowArgs& args);
};

} // namespace moe_ext::quantized_mm
