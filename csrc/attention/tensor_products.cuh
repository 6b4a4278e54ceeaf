// Products of tiles of 64 x 64 on tensor cores, for 16-bit operands. A block has four warps of 16 rows each. Sums are
// float32. Scores and their gradients, which are operands too, are split into two 16-bit numbers each, which keep 16
// bits in bfloat16 and 22 in float16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/block_kernels.cuh"
#include "common/tensor_cores.cuh"

namespace moe_ext::attention {

constexpr int kTensorThreads = kTile / 16 * kWarpSize;

// Layout of the sums of multiply_add, for kNumCols columns of a tile from kFirst on: s[i][2 n] and s[i][2 n + 1] belong
// to the n-th eight columns.
template <int kNumCols = kTile, int kFirst = 0>
struct TensorLayout {
  static constexpr int kRows = 2, kCols = kNumCols / 4, kLanes = 4;

  __device__ __forceinline__ static int row(int i) {
    return warp_id() * 16 + lane_id() / 4 + 8 * i;
  }
  __device__ __forceinline__ static int col(int j) {
    return kFirst + j / 2 * 8 + lane_id() % 4 * 2 + j % 2;
  }
  __device__ __forceinline__ static int lane() {
    return lane_id() % 4;
  }
};

template <int kNumCols = kTile>
using TensorScores = Scores<float, TensorLayout<kNumCols>>;

// 64 rows of a matrix in shared memory, padded with zeros to a multiple of 16 columns. Another 16 bytes behind each row
// put eight rows of one column into different banks.
template <typename T>
struct SharedTile {
  T* data;
  int cols; // multiple of 16

  MOE_HD static int64_t size(int num_cols) {
    return int64_t{kTile} * (ceil_div(num_cols, 16) * 16 + 8);
  }
  __device__ __forceinline__ SharedTile(T* at, int num_cols) : data(at), cols(ceil_div(num_cols, 16) * 16) {
  }
  __device__ __forceinline__ T* at(int row, int col) const {
    return data + row * (cols + 8) + col;
  }
  // The first element behind the tile.
  __device__ __forceinline__ T* end() const {
    return data + kTile * (cols + 8);
  }

  // Starts copies of m[row, row + 64). Rows of m are multiples of 16 bytes.
  __device__ __forceinline__ void fetch(const Rows<T>& m, int64_t row) const {
    const int thread = static_cast<int>(threadIdx.x);
    for (int r = thread / 8; r < kTile; r += kTensorThreads / 8) {
      for (int col = thread % 8 * 8; col < cols; col += 64) {
        const bool real = row + r < m.num_rows && col < m.cols;
        copy_async(at(r, col), real ? m.data + (row + r) * m.stride + col : m.data, real);
      }
    }
  }
};

// Packs two numbers into one operand register. The first is in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(T first, T second) {
  const T pair[2] = {first, second};
  uint32_t bits;
  memcpy(&bits, pair, sizeof(bits));
  return bits;
}

// Two float32 numbers as 16-bit parts: each is high + low.
template <typename T>
struct SplitPair {
  uint32_t high, low;

  __device__ __forceinline__ SplitPair(float first, float second) {
    const T a = static_cast<T>(first), b = static_cast<T>(second);
    high = pack_pair(a, b);
    low = pack_pair(static_cast<T>(first - static_cast<float>(a)), static_cast<T>(second - static_cast<float>(b)));
  }
};

// Splits float32 rows m[row, row + 64), multiples of 16 bytes, into high and low parts. A thread loads two rows before
// it uses the first, to hide latency; registers have no room for more.
template <typename T>
__device__ __forceinline__ void split_rows(
    const SharedTile<T>& high, const SharedTile<T>& low, const Rows<float>& m, int64_t row) {
  constexpr int kRows = kTensorThreads / 8;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int place = thread / 8; place < kTile; place += 2 * kRows) {
#pragma unroll 1
    for (int col = thread % 8 * 8; col < high.cols; col += 64) {
      Vec<float, 4> quads[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t r = row + place + i * kRows;
        const bool real = r < m.num_rows && col < m.cols;
        const float* const from = m.data + r * m.stride + col;
        quads[i][0] = real ? load_global<4>(from) : Vec<float, 4>{};
        quads[i][1] = real ? load_global<4>(from + 4) : Vec<float, 4>{};
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const auto& x = quads[i][part].v;
          const SplitPair<T> first(x[0], x[1]), second(x[2], x[3]);
          *reinterpret_cast<uint2*>(high.at(place + i * kRows, col + 4 * part)) = {first.high, second.high};
          *reinterpret_cast<uint2*>(low.at(place + i * kRows, col + 4 * part)) = {first.low, second.low};
        }
      }
    }
  }
}

// scores += a[i] . b[first + j]
template <int kNumCols, typename T>
__device__ __forceinline__ void add_products(
    TensorScores<kNumCols>& scores, const SharedTile<T>& a, const SharedTile<T>& b, int first) {
  const int lane = lane_id();
  const T* const of_a = a.at(warp_id() * 16 + lane % 16, lane / 16 * 8);
  const T* const of_b = b.at(first + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
#pragma unroll 1
  for (int k = 0; k < a.cols; k += 16) {
    uint32_t x[4];
    load_matrices<false>(x, of_a + k);
#pragma unroll
    for (int n = 0; n < kNumCols / 16; ++n) {
      uint32_t y[4];
      load_matrices<false>(y, of_b + n * 16 * (b.cols + 8) + k);
      multiply_add<T>(scores[0][4 * n], scores[0][4 * n + 1], scores[1][4 * n], scores[1][4 * n + 1], x, y[0], y[1]);
      multiply_add<T>(
          scores[0][4 * n + 2], scores[0][4 * n + 3], scores[1][4 * n + 2], scores[1][4 * n + 3], x, y[2], y[3]);
    }
  }
}

// A thread's part of the sums of a tile of kCols columns, in the layout of its scores.
template <int kCols>
struct TensorSums {
  float v[2][kCols / 4];

  __device__ __forceinline__ void clear_row(int i) {
#pragma unroll
    for (int j = 0; j < kCols / 4; ++j) {
      v[i][j] = 0;
    }
  }

  __device__ __forceinline__ void clear() {
    clear_row(0);
    clear_row(1);
  }

  __device__ __forceinline__ void scale_row(int i, float factor) {
#pragma unroll
    for (int j = 0; j < kCols / 4; ++j) {
      v[i][j] *= factor;
    }
  }

  // += weights m[first, first + kNumCols), for at most kCols columns. Without kLowPart the low part of the weights is
  // dropped.
  template <bool kLowPart = true, int kNumCols, typename T>
  __device__ __forceinline__ void add(const TensorScores<kNumCols>& weights, const SharedTile<T>& m, int first) {
    const int lane = lane_id();
    const T* const of_m = m.at(first + lane % 16, lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < kNumCols / 16; ++k) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* const pair = weights[part % 2] + 4 * k + part / 2 * 2;
        const SplitPair<T> split(pair[0], pair[1]);
        high[part] = split.high;
        low[part] = split.low;
      }
#pragma unroll
      for (int n = 0; n < kCols / 16; ++n) {
        if (n * 16 < m.cols) {
          uint32_t y[4];
          load_matrices<true>(y, of_m + k * 16 * (m.cols + 8) + n * 16);
          add_pair<T>(n, high, y);
          if constexpr (kLowPart) {
            add_pair<T>(n, low, y);
          }
        }
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void add_pair(int n, const uint32_t (&weights)[4], const uint32_t (&y)[4]) {
    multiply_add<T>(v[0][4 * n], v[0][4 * n + 1], v[1][4 * n], v[1][4 * n + 1], weights, y[0], y[1]);
    multiply_add<T>(v[0][4 * n + 2], v[0][4 * n + 3], v[1][4 * n + 2], v[1][4 * n + 3], weights, y[2], y[3]);
  }

  // Loads the thread's row i from columns [first, ...) of a row of m, whose number of columns is a multiple of 8.
  __device__ __forceinline__ void load_row(int i, const Rows<float>& m, int64_t row, int first) {
#pragma unroll
    for (int j = 0; j < kCols / 4; j += 2) {
      const int col = first + TensorLayout<>::col(j);
      const bool real = row < m.num_rows && col < m.cols;
      const Vec<float, 2> pair = real ? load<2>(m.data + row * m.stride + col) : Vec<float, 2>{};
      v[i][j] = pair.v[0];
      v[i][j + 1] = pair.v[1];
    }
  }

  __device__ __forceinline__ void store_row(int i, float* row, int cols, int first, bool) const {
#pragma unroll
    for (int j = 0; j < kCols / 4; j += 2) {
      const int col = first + TensorLayout<>::col(j);
      if (col < cols) {
        store(row + col, Vec<float, 2>{{v[i][j], v[i][j + 1]}});
      }
    }
  }

  __device__ __forceinline__ void store_tile(float* rows, int64_t num_rows, int cols) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = TensorLayout<>::row(i);
      if (row < num_rows) {
        store_row(i, rows + int64_t{row} * cols, cols, 0, true);
      }
    }
  }
};

} // namespace moe_ext::attention
