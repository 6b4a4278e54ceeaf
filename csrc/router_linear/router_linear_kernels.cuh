// Split of matrices into parts in bfloat16, for products on tensor cores: x = high + middle + low, 8 bits each, exact
// above 2^-110. A product of two parts is exact in float32. A library product of a row of blocks with a column of
// blocks adds the wanted products of parts, the smallest first.
#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

#include "common/launch.cuh"
#include "common/threads.cuh"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::router_linear {

constexpr int kMostBlocks = 6;

// The part that each block holds: 0 is high, 1 is middle, 2 is low.
struct Blocks {
  int count;
  int parts[kMostBlocks];
};

// kThreeParts times kOnePart is the product of float32 with bfloat16. kLeftOfSix times kRightOfSix is that of float32
// with float32, without three products of parts that are below (2^-23 + 2^-32) of it.
constexpr Blocks kThreeParts = {3, {2, 1, 0}}, kOnePart = {3, {0, 0, 0}};
constexpr Blocks kLeftOfSix = {6, {0, 1, 2, 0, 1, 0}}, kRightOfSix = {6, {2, 1, 0, 1, 0, 0}};

// Writes the blocks of `in`, a warp per row. Element (row, col) of block b is at b block_stride + row row_stride + col.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads) split_kernel(
    const T* __restrict__ in, int64_t rows, int64_t cols, int64_t in_stride, Blocks blocks, int64_t block_stride,
    int64_t row_stride, c10::BFloat16* __restrict__ out) {
  constexpr int kWarps = kThreads / kWarpSize;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp_id(); row < rows; row += int64_t{gridDim.x} * kWarps) {
    for (int64_t col = lane_id() * kSize; col < cols; col += kWarpSize * kSize) {
      const Vec<T, kSize> x = load<kSize>(in + row * in_stride + col);
      Vec<c10::BFloat16, kSize> high, middle, low;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        float rest = static_cast<float>(x.v[i]);
        high.v[i] = static_cast<c10::BFloat16>(rest);
        rest -= static_cast<float>(high.v[i]);
        middle.v[i] = static_cast<c10::BFloat16>(rest);
        rest -= static_cast<float>(middle.v[i]);
        low.v[i] = static_cast<c10::BFloat16>(rest);
      }
      c10::BFloat16* const to = out + row * row_stride + col;
#pragma unroll
      for (int b = 0; b < kMostBlocks; ++b) {
        if (b < blocks.count) {
          store(to + b * block_stride, blocks.parts[b] == 0 ? high : blocks.parts[b] == 1 ? middle : low);
        }
      }
    }
  }
}

template <typename T>
void launch_split(
    const T* in, int64_t rows, int64_t cols, int64_t in_stride, const Blocks& blocks, int64_t block_stride,
    int64_t row_stride, c10::BFloat16* out, cudaStream_t stream) {
  if (rows * cols == 0) {
    return;
  }
  constexpr int kWide = 4;
  const Launch launch_on = over_threads(rows * kWarpSize, stream);
  const auto run = [&]<int kSize>() {
    launch(launch_on, split_kernel<T, kSize>, in, rows, cols, in_stride, blocks, block_stride, row_stride, out);
  };
  const auto fits = [](int64_t elements) { return elements % kWide == 0; };
  if (fits(cols) && fits(in_stride) && fits(block_stride) && fits(row_stride) && is_aligned(in, kWide * sizeof(T)) &&
      is_aligned(out, kWide * sizeof(c10::BFloat16))) {
    run.template operator()<kWide>();
  } else {
    run.template operator()<1>();
  }
}

} // namespace moe_ext::router_linear
