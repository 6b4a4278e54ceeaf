// The loops that quantize_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "quantize/quantize_math.h"

namespace moe_ext::quantize {

constexpr int64_t kLeastBlock = 64;
constexpr int64_t kLargestBlock = 1024;
// Elements of the blocks in which a tensor with one shared scale is encoded.
constexpr int64_t kSharedBlock = kLargestBlock;

// Arguments for blocks of neighbouring elements with one scale each; the last may be shorter. Codes have no gaps.
template <typename T>
struct QuantizeArgs {
  const T* x;
  const float* residual_in; // old residual, or null; equal to `residual` for a call in place
  float* residual;          // new residual, or null
  uint8_t* codes;
  float* scales;
  int64_t numel;
  int64_t block;
  RngSource rng;                     // a null state means rounding to nearest
  int64_t offset;                    // place of the first element in the streams of random numbers
  const uint32_t* largest = nullptr; // key of the largest element, if all blocks share the scale scales[0]
  bool streamed = false;             // stores bypass the caches; possible only for whole cache lines
};

// Distance from which on the log holds the old residual itself. Below, the log holds a step: the number of
// representable floats from (residual + code * scale) - x to the old residual.
constexpr int32_t kFarStep = 32767;

// Log of a call in place, by which `undo` restores the old residual bit for bit.
struct UndoLog {
  int16_t* steps;    // [numel]
  float* values;     // old residuals at a far step, in order; room for the elements of one call plus one
  int64_t count = 0; // number of values
};

template <typename T>
struct DequantizeArgs {
  T* out;
  const uint8_t* codes;
  const float* scales;
  int64_t numel;
  int64_t block;
  bool add;            // add to `out` instead of overwriting it
  bool shared = false; // all blocks have the scale scales[0]
};

// Arguments to encode rows of `dim` elements as rows of `row_bytes(dim, format)` bytes.
template <typename T>
struct QuantizeRowsArgs {
  const T* x;
  uint8_t* rows;
  int64_t dim;
};

// Arguments to decode rows.
template <typename T>
struct DequantizeRowsArgs {
  T* out;
  const uint8_t* rows;
  int64_t dim;
};

template <typename T>
struct QuantizeKernels {
  // Quantises the blocks [begin, end) and returns the key of the largest magnitude, which tells if all are finite. If
  // `log` is not null, logs a call in place; a block that is not finite then keeps its residual.
  uint32_t (*quantize[kNumFormats])(const QuantizeArgs<T>& args, int64_t begin, int64_t end, UndoLog* log);
  // Returns the key of the largest magnitude in the blocks [begin, end).
  uint32_t (*largest)(const QuantizeArgs<T>& args, int64_t begin, int64_t end);
  // Restores the residual to the state before a logged call of `quantize`.
  void (*undo[kNumFormats])(const QuantizeArgs<T>& args, int64_t begin, int64_t end, const UndoLog& log);
  void (*dequantize[kNumFormats])(const DequantizeArgs<T>& args, int64_t begin, int64_t end);
  // Encode and decode the rows [begin, end).
  void (*quantize_rows[kNumRowFormats])(const QuantizeRowsArgs<T>& args, int64_t begin, int64_t end);
  void (*dequantize_rows[kNumRowFormats])(const DequantizeRowsArgs<T>& args, int64_t begin, int64_t end);
};

struct Kernels {
  QuantizeKernels<float> f32;
  QuantizeKernels<BFloat16> bf16;
  QuantizeKernels<Half> f16;

  template <typename T>
  const QuantizeKernels<T>& of() const {
    if constexpr (std::is_same_v<T, float>) {
      return f32;
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      return bf16;
    } else {
      return f16;
    }
  }
};

} // namespace moe_ext::quantize
