// Products with weights of 8 or 4 bits. A warp multiplies a row of codes with four tokens or, with experts, with all
// tokens of the row's expert. The sixteen lanes of a half correspond to the sixteen sums of the CPU; the first half has
// the columns of the CPU's even sums, the second half those of its odd sums. Products are rounded before they are added
// (-fmad=false), so the bits are those of the CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/expert_bounds.cuh"
#include "common/simd.h"
#include "common/threads.cuh"
#include "common/warp.cuh"

namespace moe_ext::quantized_mm {

constexpr int kSums = 16;
constexpr int kTokens = 4; // tokens that share one read of a row

template <typename T>
struct Product {
  const T* x;             // [num_tokens, dim]
  const uint8_t* codes;   // [num_rows, dim bits / 8]
  const float* scales;    // [num_rows, dim / block]
  const T* outliers;      // [num_outliers]
  const int32_t* columns; // [num_outliers]
  const int64_t* offsets; // [num_rows + 1]
  T* out;                 // [num_tokens, num_rows]; with E experts [num_tokens, num_rows / E]
  int64_t num_tokens, dim, num_rows, block, num_outliers;
  ExpertBounds experts = {}; // bounds of the tokens of each expert; if empty, all tokens are multiplied with all rows
};

// Column of each 32 that a lane multiplies. With 4 bits, a byte holds two neighbouring columns, the low half first.
template <int kBits>
__device__ __forceinline__ int lane_column() {
  return kBits == 8 ? lane_id() : 2 * (lane_id() % kSums) + lane_id() / kSums;
}

template <int kBits>
__device__ __forceinline__ float lane_code(const uint8_t* codes) {
  if constexpr (kBits == 8) {
    return static_cast<float>(static_cast<int8_t>(codes[lane_id()]));
  } else {
    const int byte = static_cast<int8_t>(codes[lane_id() % kSums]);
    return static_cast<float>(lane_id() < kSums ? static_cast<int8_t>(byte << 4) >> 4 : byte >> 4);
  }
}

// Adds the values of the first sixteen lanes, one after the other, as the CPU does.
__device__ __forceinline__ float sum_in_order(float value) {
  float sum = 0;
#pragma unroll
  for (int lane = 0; lane < kSums; ++lane) {
    sum += __shfl_sync(kFullMask, value, lane);
  }
  return sum;
}

// Multiplies. Outliers out of range trap with kCheck; otherwise they touch no memory.
template <int kBits, bool kCheck, typename T>
__global__ void __launch_bounds__(kThreads) quantized_mm_kernel(Product<T> p) {
  constexpr int kWarps = kThreads / kWarpSize;
  const RowTokens<kTokens> of(p.experts, p.num_rows, p.num_tokens);
  const int64_t row_bytes = p.dim * kBits / 8;
  for (int64_t unit = int64_t{blockIdx.x} * kWarps + warp_id(); unit < of.num_units();
       unit += int64_t{gridDim.x} * kWarps) {
    const int64_t row = of.row(unit), last = of.template end<kCheck>(unit);
    for (int64_t first_token = of.begin(unit); first_token < last; first_token += kTokens) {
      const int count = static_cast<int>(min(last - first_token, int64_t{kTokens}));
      const T* tokens[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        tokens[t] = p.x + (first_token + min(t, count - 1)) * p.dim;
      }
      const uint8_t* codes = p.codes + row * row_bytes;
      const float* scale = p.scales + row * (p.dim / p.block);
      float sums[kTokens] = {};
      for (int64_t begin = 0; begin < p.dim; begin += p.block, ++scale) {
        float parts[kTokens] = {};
#pragma unroll 4
        for (int64_t i = begin; i < begin + p.block; i += kWarpSize) {
          const float code = lane_code<kBits>(codes + i * kBits / 8);
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
            if (t < count) {
              parts[t] += code * to_acc(tokens[t][i + lane_column<kBits>()]);
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          sums[t] += (parts[t] + __shfl_down_sync(kFullMask, parts[t], kSums)) * *scale;
        }
      }
      const int64_t end = min(p.offsets[row + 1], p.num_outliers);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float sum = sum_in_order(sums[t]);
        if (lane_id() == t && t < count) {
          for (int64_t i = max(p.offsets[row], int64_t{0}); i < end; ++i) {
            const int32_t column = p.columns[i];
            const bool inside = column >= 0 && column < p.dim;
            if constexpr (kCheck) {
              if (!inside || p.offsets[row] < 0 || p.offsets[row + 1] > p.num_outliers) {
                __trap();
              }
            }
            if (inside) {
              sum += to_acc(p.outliers[i]) * to_acc(p.x[(first_token + t) * p.dim + column]);
            }
          }
          p.out[(first_token + t) * of.rows_each() + row % of.rows_each()] = from_acc<T>(sum);
        }
      }
    }
  }
}

template <bool kCheck, typename T>
void launch_quantized_mm(const Product<T>& product, int64_t bits, cudaStream_t stream) {
  const int64_t warps = RowTokens<kTokens>(product.experts, product.num_rows, product.num_tokens).num_units();
  if (warps > 0 && product.num_tokens > 0) {
    const auto kernel = bits == 8 ? quantized_mm_kernel<8, kCheck, T> : quantized_mm_kernel<4, kCheck, T>;
    launch(over_threads(warps * kWarpSize, stream), kernel, product);
  }
}

} // namespace moe_ext::quantized_mm
