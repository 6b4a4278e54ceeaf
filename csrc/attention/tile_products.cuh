// Products of tiles in registers, from operands staged through shared memory. Blocks have 16 x 16 threads. Thread (ty,
// tx) has rows ty + 16 i, columns tx + 16 j of scores, and columns 64 c + 4 tx + e of sums over a tile. A warp then
// reads whole lines of shared memory without bank conflicts, and each row of scores lies in half a warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/tokens_kernels.cuh"
#include "common/simd.h"
#include "common/vec.cuh"

namespace moe_ext::attention {

constexpr int kSide = 16;                 // threads along each side
constexpr int kPerThread = kTile / kSide; // rows, and columns of scores
constexpr int kGroupCols = 4 * kSide;     // columns of a sum that a row of threads holds at a time
constexpr int kDepth = 32;                // head dims, or keys, staged at a time
constexpr int kStageStride = kDepth + 4;  // a multiple of 4 that spreads rows over the banks
constexpr int kWeightStride = kTile + 4;
constexpr int kStageSize = 2 * kTile * kStageStride;

__device__ __forceinline__ int thread_row() {
  return static_cast<int>(threadIdx.x) / kSide;
}

__device__ __forceinline__ int thread_col() {
  return static_cast<int>(threadIdx.x) % kSide;
}

// Layout of a thread's scores: s[i][j] has row(i) and column col(j). The kLanes threads that share rows are neighbours
// in a warp, and lane() is a thread's place among them.
struct SquareLayout {
  static constexpr int kRows = kPerThread, kCols = kPerThread, kLanes = kSide;

  __device__ __forceinline__ static int row(int i) {
    return thread_row() + kSide * i;
  }
  __device__ __forceinline__ static int col(int j) {
    return thread_col() + kSide * j;
  }
  __device__ __forceinline__ static int lane() {
    return thread_col();
  }
};

template <typename Acc, typename Layout = SquareLayout>
using Scores = Acc[Layout::kRows][Layout::kCols];

template <typename T>
struct Quad {
  T v[4];
};

// Rows of a matrix in memory. `aligned`: four elements at a column that is a multiple of 4 may be read at once.
template <typename T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t num_rows;
  int cols;
  bool aligned;

  // Columns [first, first + most), as far as they exist.
  __device__ __forceinline__ Rows columns(int first, int most) const {
    return {data + first, stride, num_rows, min(most, max(cols - first, 0)), aligned};
  }
};

// [B, H, S, D]
template <typename T>
struct Heads {
  const T* data;
  int64_t batch_stride, head_stride, row_stride;
  int64_t num_rows;
  int cols;
  bool aligned;

  __device__ __forceinline__ Rows<T> of(int64_t b, int64_t h) const {
    return {data + b * batch_stride + h * head_stride, row_stride, num_rows, cols, aligned};
  }
};

// Loads a quad in accesses of 16 bytes.
template <typename T>
__device__ __forceinline__ Quad<T> load_quad(const T* from) {
  constexpr int kSize = sizeof(T) * 4 <= kAccessBytes ? 4 : kAccessBytes / sizeof(T);
  Quad<T> quad;
#pragma unroll
  for (int i = 0; i < 4; i += kSize) {
    const Vec<T, kSize> part = load<kSize>(from + i);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      quad.v[i + e] = part.v[e];
    }
  }
  return quad;
}

template <typename T>
__device__ __forceinline__ void store_quad(T* to, const Quad<T>& quad) {
  constexpr int kSize = sizeof(T) * 4 <= kAccessBytes ? 4 : kAccessBytes / sizeof(T);
  using Access = access_t<kSize * sizeof(T)>;
#pragma unroll
  for (int i = 0; i < 4; i += kSize) {
    Access raw;
    memcpy(&raw, quad.v + i, sizeof(raw));
    // `to` may be shared memory, where vec.cuh's `store`, for global memory, would fault.
    *reinterpret_cast<Access*>(to + i) = raw;
  }
}

// Reads four elements of a row; zeros beyond the matrix.
template <typename T>
__device__ __forceinline__ Quad<acc_t<T>> read_quad(const Rows<T>& m, int64_t row, int col) {
  Quad<acc_t<T>> quad = {};
  if (row >= m.num_rows) {
    return quad;
  }
  const T* const from = m.data + row * m.stride + col;
  if (m.aligned && col + 4 <= m.cols) {
    const Quad<T> raw = load_quad(from);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      quad.v[e] = static_cast<acc_t<T>>(raw.v[e]);
    }
    return quad;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    quad.v[e] = col + e < m.cols ? static_cast<acc_t<T>>(from[e]) : acc_t<T>(0);
  }
  return quad;
}

// Elements [row, row + kRows) x [col, col + kCols) on their way to shared memory. They are read before the product that
// hides the latency, and written after it.
template <typename Acc, int kRows, int kCols>
struct Fetched {
  static constexpr int kPerRow = kCols / 4;
  static constexpr int kQuads = kRows * kPerRow / kNumThreads;
  Quad<Acc> quads[kQuads];

  template <typename T>
  __device__ __forceinline__ void read(const Rows<T>& m, int64_t row, int col) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int place = static_cast<int>(threadIdx.x) + i * kNumThreads;
      quads[i] = read_quad(m, row + place / kPerRow, col + place % kPerRow * 4);
    }
  }

  template <int kStride>
  __device__ __forceinline__ void write(Acc* to) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int place = static_cast<int>(threadIdx.x) + i * kNumThreads;
      store_quad(to + place / kPerRow * kStride + place % kPerRow * 4, quads[i]);
    }
  }
};

// scores = a[a_row + i] . b[b_row + j], for equal numbers of columns. Ends with a barrier if there are any columns.
template <typename Acc, typename A, typename B>
__device__ __forceinline__ void multiply_rows(
    Scores<Acc>& scores, Acc* stage, const Rows<A>& a, int64_t a_row, const Rows<B>& b, int64_t b_row) {
  Acc* const stage_b = stage + kTile * kStageStride;
  const Acc* const mine_a = stage + thread_row() * kStageStride;
  const Acc* const mine_b = stage_b + thread_col() * kStageStride;
  Fetched<Acc, kTile, kDepth> next_a, next_b;
#pragma unroll
  for (int i = 0; i < kPerThread * kPerThread; ++i) {
    scores[i / kPerThread][i % kPerThread] = 0;
  }
  next_a.read(a, a_row, 0);
  next_b.read(b, b_row, 0);
  for (int col = 0; col < a.cols; col += kDepth) {
    next_a.template write<kStageStride>(stage);
    next_b.template write<kStageStride>(stage_b);
    __syncthreads();
    next_a.read(a, a_row, col + kDepth);
    next_b.read(b, b_row, col + kDepth);
#pragma unroll 1
    for (int d = 0; d < kDepth; d += 4) {
      Quad<Acc> x[kPerThread], y[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        x[i] = load_quad(mine_a + i * kSide * kStageStride + d);
        y[i] = load_quad(mine_b + i * kSide * kStageStride + d);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < kPerThread * kPerThread; ++i) {
          scores[i / kPerThread][i % kPerThread] += x[i / kPerThread].v[e] * y[i % kPerThread].v[e];
        }
      }
    }
    __syncthreads();
  }
}

// Writes scores to shared memory. `Sums::add`, which reads them, has barriers before and after its reads.
template <typename Acc>
__device__ __forceinline__ void write_weights(Acc* weights, const Scores<Acc>& scores) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      weights[(thread_row() + kSide * i) * kWeightStride + thread_col() + kSide * j] = scores[i][j];
    }
  }
}

// A thread's part of the sums of a tile of kCols columns.
template <typename Acc, int kCols>
struct Sums {
  static constexpr int kGroups = kCols / kGroupCols;
  static_assert(kDepth * kCols <= kStageSize);
  Quad<Acc> v[kPerThread][kGroups];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      clear_row(i);
    }
  }

  __device__ __forceinline__ void scale_row(int i, Acc factor) {
#pragma unroll
    for (int c = 0; c < kGroups; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[i][c].v[e] *= factor;
      }
    }
  }

  // += weights m[row, row + 64), for the columns of m. Ends with a barrier.
  template <typename T>
  __device__ __forceinline__ void add(Acc* stage, const Acc* weights, const Rows<T>& m, int64_t row) {
    const Acc* const mine = weights + thread_row() * kWeightStride;
    Fetched<Acc, kDepth, kCols> next;
    next.read(m, row, 0);
    // The last tile may have rows in its first half only.
    const int rows = m.num_rows - row < kTile ? static_cast<int>(m.num_rows - row) : kTile;
    for (int first = 0; first < rows; first += kDepth) {
      next.template write<kCols>(stage);
      __syncthreads();
      next.read(m, row + first + kDepth, 0);
#pragma unroll 1
      for (int k = 0; k < kDepth; k += 4) {
        add_rows(mine + first + k, stage + k * kCols + thread_col() * 4);
      }
      __syncthreads();
    }
  }

  // Adds the weighted sum of four rows.
  __device__ __forceinline__ void add_rows(const Acc* weights, const Acc* rows) {
    Quad<Acc> w[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      w[i] = load_quad(weights + i * kSide * kWeightStride);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int c = 0; c < kGroups; ++c) {
        const Quad<Acc> x = load_quad(rows + k * kCols + c * kGroupCols);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            v[i][c].v[e] += w[i].v[k] * x.v[e];
          }
        }
      }
    }
  }

  // Loads the thread's row i from columns [first, ...) of a row of m.
  __device__ __forceinline__ void load_row(int i, const Rows<Acc>& m, int64_t row, int first) {
#pragma unroll
    for (int c = 0; c < kGroups; ++c) {
      v[i][c] = read_quad(m, row, first + c * kGroupCols + thread_col() * 4);
    }
  }

  __device__ __forceinline__ void clear_row(int i) {
#pragma unroll
    for (int c = 0; c < kGroups; ++c) {
      v[i][c] = {};
    }
  }

  // Stores the thread's row i to columns [first, ...) of a row.
  __device__ __forceinline__ void store_row(int i, Acc* row, int cols, int first, bool aligned) const {
#pragma unroll
    for (int c = 0; c < kGroups; ++c) {
      const int col = first + c * kGroupCols + thread_col() * 4;
      if (aligned && col + 4 <= cols) {
        store_quad(row + col, v[i][c]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (col + e < cols) {
          row[col + e] = v[i][c].v[e];
        }
      }
    }
  }

  // Stores every row of a tile to dense rows of a new tensor. Its memory is aligned, hence so are rows of a multiple of
  // 4 columns.
  __device__ __forceinline__ void store_tile(Acc* rows, int64_t num_rows, int cols, int first) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = thread_row() + kSide * i;
      if (row < num_rows) {
        store_row(i, rows + int64_t{row} * cols, cols, first, cols % 4 == 0);
      }
    }
  }
};

} // namespace moe_ext::attention
