// The loops that quantized_mm_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::quantized_mm {

// Arguments of a product of rows of codes with tokens, without outliers.
struct RowsArgs {
  const uint8_t* codes; // [num_rows, dim bits / 8]
  const float* scales;  // [num_rows, dim / block]
  const float* x;       // [num_tokens, dim]; for 4 bits, the 16 even columns of each 32 come before the odd ones
  float* sums;          // [num_rows, num_tokens]
  int64_t num_rows;
  int64_t num_tokens;
  int64_t dim;
  int64_t block; // columns that share a scale, a multiple of 32
};

struct Kernels {
  void (*rows8)(const RowsArgs& args);
  void (*rows4)(const RowsArgs& args);
};

} // namespace moe_ext::quantized_mm
