// The loops that quantize_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "quantize/quantize_math.h"

namespace moe_ext::quantize {

constexpr int64_t kLeastBlock = 64;
constexpr int64_t kLargestBlock = 1024;
// A tensor with one scale is coded in blocks of so many elements, too.
constexpr int64_t kSharedBlock = kLargestBlock;

// Blocks of neighbouring elements with one scale each; the last may be shorter. Codes follow each other without gaps.
template <typename T>
struct QuantizeArgs {
  const T* x;
  const float* residual_in; // what is owed, or null; `residual` itself where that is changed in place
  float* residual;          // or null
  uint8_t* codes;
  float* scales;
  int64_t numel;
  int64_t block;
  RngSource rng;                     // its state is null to round to the nearest
  int64_t offset;                    // elements before these in the streams of random numbers
  const uint32_t* largest = nullptr; // key of the largest element, where all blocks share the scale scales[0]
  bool streamed = false;             // what is written is whole lines, and goes past the caches
};

// Log for taking back, bit for bit, what blocks have done to a residual in place: how many floats the old value is
// above (residual + code * scale) - x. Where those are kFarStep or more either way, the value itself is kept.
constexpr int32_t kFarStep = 32767;

struct UndoLog {
  int16_t* steps;    // of all elements
  float* values;     // room for the elements of one call, and one
  int64_t count = 0; // of values
};

template <typename T>
struct DequantizeArgs {
  T* out;
  const uint8_t* codes;
  const float* scales;
  int64_t numel;
  int64_t block;
  bool add;            // out += value
  bool shared = false; // all blocks have the scale scales[0]
};

// Rows of `dim` elements as rows of `row_bytes(dim, format)` bytes, and back.
template <typename T>
struct QuantizeRowsArgs {
  const T* x;
  uint8_t* rows;
  int64_t dim;
};

template <typename T>
struct DequantizeRowsArgs {
  T* out;
  const uint8_t* rows;
  int64_t dim;
};

template <typename T>
struct QuantizeKernels {
  // The blocks [begin, end); both return the largest magnitude as a key, which tells NaN and infinity. With a log, or
  // null, of what is done in place: then the residual of a block that is not finite stays as it is.
  uint32_t (*quantize[kNumFormats])(const QuantizeArgs<T>& args, int64_t begin, int64_t end, UndoLog* log);
  uint32_t (*largest)(const QuantizeArgs<T>& args, int64_t begin, int64_t end);
  // The residual as it was before a logged call of `quantize`.
  void (*undo[kNumFormats])(const QuantizeArgs<T>& args, int64_t begin, int64_t end, const UndoLog& log);
  void (*dequantize[kNumFormats])(const DequantizeArgs<T>& args, int64_t begin, int64_t end);
  // The rows [begin, end).
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
