// Rows of the permutation: copies to expert order and the weighted sums back, bound by memory.
// A warp handles one token or row at a time, with a stride over the grid; blockIdx.y is the tile of columns. An access
// is 16 bytes if the width of a row allows it, otherwise one element. A token is read once, whatever its number of
// rows. Slots are 32-bit numbers, because a 64-bit division is a function call, whose callers spill registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"
#include "common/simd.h"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::permutation {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarpSize;
constexpr int kMinBlocks = 4; // blocks per SM; without this bound ptxas uses 32 registers and spills
constexpr int kUnroll = 4;    // accesses of a lane in flight

struct WarpRange {
  int64_t first;
  int64_t stride;
};

__device__ __forceinline__ WarpRange warps_of_grid() {
  return {int64_t{blockIdx.x} * kRowWarps + warp_id(), int64_t{gridDim.x} * kRowWarps};
}

__device__ __forceinline__ int64_t token_of(int64_t slot, int top_k) {
  return static_cast<uint32_t>(slot) / static_cast<uint32_t>(top_k);
}

// With kCheck, traps on a table entry that is neither in [0, bound) nor -1.
template <bool kCheck>
__device__ __forceinline__ void check_entry(int64_t entry, int64_t bound) {
  if constexpr (kCheck) {
    if (entry < -1 || entry >= bound) {
      __trap();
    }
  }
}

// Writes zeros to the rows without a slot. A warp checks 32 rows at a time.
template <typename Access>
__device__ __forceinline__ void zero_rows_without_slot(
    const int64_t* __restrict__ slot_of_row, int64_t num_rows, int64_t width, Access* __restrict__ out) {
  const WarpRange range = warps_of_grid();
  for (int64_t base = range.first * kWarpSize; base < num_rows; base += range.stride * kWarpSize) {
    const int64_t row = base + lane_id();
    unsigned empty = __ballot_sync(kFullMask, row < num_rows && slot_of_row[row] < 0);
    for (; empty != 0; empty &= empty - 1) {
      Access* const to = out + (base + __ffs(static_cast<int>(empty)) - 1) * width;
      for (int64_t column = lane_id(); column < width; column += kWarpSize) {
        to[column] = Access{};
      }
    }
  }
}

// Sets out[row_of_slot[t K + k]] = x[t] for every k, and rows without a slot to zero. `width` is in accesses.
template <typename Access, bool kCheck>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks) scatter_tokens_kernel(
    const Access* __restrict__ x, const int64_t* __restrict__ row_of_slot, const int64_t* __restrict__ slot_of_row,
    int64_t num_tokens, int64_t num_rows, int top_k, int64_t width, Access* __restrict__ out) {
  const int64_t first = int64_t{blockIdx.y} * kUnroll * kWarpSize + lane_id();
  const WarpRange range = warps_of_grid();
  for (int64_t token = range.first; token < num_tokens; token += range.stride) {
    Access values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpSize < width) {
        values[i] = x[token * width + first + i * kWarpSize];
      }
    }
    for (int k = 0; k < top_k; ++k) {
      const int64_t row = row_of_slot[token * top_k + k];
      check_entry<kCheck>(row, num_rows);
      if (row < 0) {
        continue;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpSize < width) {
          out[row * width + first + i * kWarpSize] = values[i];
        }
      }
    }
  }
  if (blockIdx.y == 0) {
    zero_rows_without_slot(slot_of_row, num_rows, width, out);
  }
}

// Sets out[r] = x[slot_of_row[r] / K], or zeros for a row without a slot. `width` is in accesses.
template <typename Access, bool kCheck>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks) gather_tokens_kernel(
    const Access* __restrict__ x, const int64_t* __restrict__ slot_of_row, int64_t num_tokens, int64_t num_rows,
    int top_k, int64_t width, Access* __restrict__ out) {
  const int64_t first = int64_t{blockIdx.y} * kUnroll * kWarpSize + lane_id();
  const WarpRange range = warps_of_grid();
  for (int64_t row = range.first; row < num_rows; row += range.stride) {
    const int64_t slot = slot_of_row[row];
    check_entry<kCheck>(slot, num_tokens * top_k);
    const int64_t token = token_of(slot, top_k);
    Access values[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (slot >= 0 && first + i * kWarpSize < width) {
        values[i] = x[token * width + first + i * kWarpSize];
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpSize < width) {
        out[row * width + first + i * kWarpSize] = values[i];
      }
    }
  }
}

// Computes y[t] = sum_k w[t, k] rows[row_of_slot[t K + k]], in the order of k. Null weights mean ones.
template <typename T, int kSize, bool kCheck>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks) unpermute_tokens_kernel(
    const T* __restrict__ rows, const int64_t* __restrict__ row_of_slot, const acc_t<T>* __restrict__ weights,
    int64_t num_tokens, int64_t num_rows, int top_k, int64_t dim, T* __restrict__ y) {
  const int64_t column = (int64_t{blockIdx.y} * kWarpSize + lane_id()) * kSize;
  if (column >= dim) {
    return;
  }
  const WarpRange range = warps_of_grid();
  for (int64_t token = range.first; token < num_tokens; token += range.stride) {
    acc_t<T> sum[kSize] = {};
    for (int first = 0; first < top_k; first += kUnroll) {
      // All loads of a batch are issued before the first sum. A slot without a row adds zero.
      Vec<T, kSize> values[kUnroll] = {};
      acc_t<T> weight[kUnroll] = {};
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t slot = token * top_k + first + i;
        const int64_t row = first + i < top_k ? row_of_slot[slot] : -1;
        check_entry<kCheck>(row, num_rows);
        if (row >= 0) {
          weight[i] = weights == nullptr ? acc_t<T>(1) : weights[slot];
          values[i] = load<kSize>(rows + row * dim + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          sum[j] += weight[i] * static_cast<acc_t<T>>(values[i].v[j]);
        }
      }
    }
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      result.v[j] = static_cast<T>(sum[j]);
    }
    store(y + token * dim + column, result);
  }
}

// For every slot s with row r, computes grad_rows[r] = w[s] grad[s / K] and grad_weights[s] = <grad[s / K], rows[r]>. A
// warp handles a slot, so that the slots of a token, which read the same gradient, are neighbours in a block.
template <typename T, int kSize, bool kCheck>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks) unpermute_tokens_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ rows, const int64_t* __restrict__ slot_of_row,
    const int64_t* __restrict__ row_of_slot, const acc_t<T>* __restrict__ weights, int64_t num_slots, int64_t num_rows,
    int top_k, int64_t dim, T* __restrict__ grad_rows, acc_t<T>* __restrict__ grad_weights) {
  const WarpRange range = warps_of_grid();
  for (int64_t slot = range.first; slot < num_slots; slot += range.stride) {
    const int64_t row = row_of_slot[slot];
    check_entry<kCheck>(row, num_rows);
    acc_t<T> dot = 0;
    if (row >= 0) {
      const acc_t<T> weight = weights[slot];
      const int64_t token = token_of(slot, top_k);
#pragma unroll 2
      for (int64_t column = lane_id() * kSize; column < dim; column += kWarpSize * kSize) {
        const Vec<T, kSize> g = load<kSize>(grad + token * dim + column);
        const Vec<T, kSize> value = load<kSize>(rows + row * dim + column);
        Vec<T, kSize> scaled;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          scaled.v[j] = static_cast<T>(weight * static_cast<acc_t<T>>(g.v[j]));
          dot += static_cast<acc_t<T>>(g.v[j]) * static_cast<acc_t<T>>(value.v[j]);
        }
        store(grad_rows + row * dim + column, scaled);
      }
    }
    dot = warp_sum(dot);
    if (lane_id() == 0) {
      grad_weights[slot] = dot;
    }
  }
  using Access = access_t<kSize * sizeof(T)>;
  zero_rows_without_slot(slot_of_row, num_rows, dim / kSize, reinterpret_cast<Access*>(grad_rows));
}

// Launches a warp for each item and tile of columns, up to the threads that the device holds. Because of registers only
// half of these blocks are resident, which costs no time: other blocks start when the first ones end, each with half
// the work that it would have in a grid by occupancy. Resident blocks have enough loads in flight: 4.3 TB/s for 0.7 us
// are 23 KiB per SM, and four blocks of eight warps with four accesses of 16 bytes per lane have 64 KiB.
inline Launch row_launch(int64_t num_items, int64_t num_tiles, cudaStream_t stream) {
  const DeviceProperties device = device_properties();
  Dim3 grid = persistent_grid(ceil_div(num_items, kRowWarps), kRowThreads, device);
  const int64_t resident = persistent_grid(INT64_MAX, kRowThreads, device).x;
  grid.x = std::min(grid.x, ceil_div(resident, num_tiles));
  grid.y = num_tiles;
  return {grid, Dim3(kRowThreads), 0, stream};
}

// Calls f<Access>(width) with the widest access that both addresses and the rows of `row_bytes` allow. `width` is the
// number of accesses per row.
template <typename F>
void with_access(const void* from, const void* to, int64_t row_bytes, int64_t element_bytes, F&& f) {
  if (rows_are_aligned(row_bytes, from, to)) {
    f.template operator()<access_t<16>>(row_bytes / 16);
  } else if (element_bytes % 8 == 0) {
    f.template operator()<access_t<8>>(row_bytes / 8);
  } else if (element_bytes == 4) {
    f.template operator()<access_t<4>>(row_bytes / 4);
  } else if (element_bytes == 2) {
    f.template operator()<access_t<2>>(row_bytes / 2);
  } else {
    f.template operator()<access_t<1>>(row_bytes);
  }
}

// Works for any dtype; `element_bytes` is the size of an element.
template <bool kCheck>
void launch_scatter_tokens(
    const void* x,              // [T, D]
    const int64_t* row_of_slot, // [T K]
    const int64_t* slot_of_row, // [N]
    int64_t num_tokens, int64_t num_rows, int top_k, int64_t dim, int64_t element_bytes,
    void* out, // [N, D]
    cudaStream_t stream) {
  if (num_rows * dim == 0) {
    return;
  }
  with_access(x, out, dim * element_bytes, element_bytes, [&]<typename Access>(int64_t width) {
    const int64_t items = std::max(num_tokens, ceil_div(num_rows, kWarpSize));
    launch(
        row_launch(items, ceil_div(width, kUnroll * kWarpSize), stream), scatter_tokens_kernel<Access, kCheck>,
        static_cast<const Access*>(x), row_of_slot, slot_of_row, num_tokens, num_rows, top_k, width,
        static_cast<Access*>(out));
  });
}

template <bool kCheck>
void launch_gather_tokens(
    const void* x,              // [T, D]
    const int64_t* slot_of_row, // [N]
    int64_t num_tokens, int64_t num_rows, int top_k, int64_t dim, int64_t element_bytes,
    void* out, // [N, D]
    cudaStream_t stream) {
  if (num_rows * dim == 0) {
    return;
  }
  with_access(x, out, dim * element_bytes, element_bytes, [&]<typename Access>(int64_t width) {
    launch(
        row_launch(num_rows, ceil_div(width, kUnroll * kWarpSize), stream), gather_tokens_kernel<Access, kCheck>,
        static_cast<const Access*>(x), slot_of_row, num_tokens, num_rows, top_k, width, static_cast<Access*>(out));
  });
}

template <bool kCheck, typename T>
void launch_unpermute_tokens(
    const T* rows,              // [N, D]
    const int64_t* row_of_slot, // [T K]
    const acc_t<T>* weights,    // [T, K] or null
    int64_t num_tokens, int64_t num_rows, int top_k, int64_t dim,
    T* y, // [T, D]
    cudaStream_t stream) {
  if (num_tokens * dim == 0) {
    return;
  }
  const auto run = [&]<int kSize>() {
    launch(
        row_launch(num_tokens, ceil_div(dim, kSize * kWarpSize), stream), unpermute_tokens_kernel<T, kSize, kCheck>,
        rows, row_of_slot, weights, num_tokens, num_rows, top_k, dim, y);
  };
  if (rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), rows, y)) {
    run.template operator()<kAccessBytes / sizeof(T)>();
  } else {
    run.template operator()<1>();
  }
}

template <bool kCheck, typename T>
void launch_unpermute_tokens_backward(
    const T* grad,              // [T, D]
    const T* rows,              // [N, D]
    const int64_t* slot_of_row, // [N]
    const int64_t* row_of_slot, // [T K]
    const acc_t<T>* weights,    // [T, K]
    int64_t num_slots, int64_t num_rows, int top_k, int64_t dim,
    T* grad_rows,           // [N, D]
    acc_t<T>* grad_weights, // [T, K]
    cudaStream_t stream) {
  if (num_slots == 0 && num_rows * dim == 0) {
    return;
  }
  const auto run = [&]<int kSize>() {
    launch(
        row_launch(std::max(num_slots, ceil_div(num_rows, kWarpSize)), 1, stream),
        unpermute_tokens_backward_kernel<T, kSize, kCheck>, grad, rows, slot_of_row, row_of_slot, weights, num_slots,
        num_rows, top_k, dim, grad_rows, grad_weights);
  };
  if (rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), grad, rows, grad_rows)) {
    run.template operator()<kAccessBytes / sizeof(T)>();
  } else {
    run.template operator()<1>();
  }
}

} // namespace moe_ext::permutation
