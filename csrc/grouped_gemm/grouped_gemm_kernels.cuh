// Kernels that complete torch's grouped product: bias, rows of no expert, experts without rows, and sums of rows. They
// find their rows by the offsets on the device, so that the host need not know them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/expert_bounds.cuh"
#include "common/launch.cuh"
#include "common/simd.h"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::grouped_gemm {

constexpr int kNumThreads = 256;
constexpr int kNumWarps = kNumThreads / kWarpSize;

// Returns the last expert that starts at or before the row. That expert owns the row, because an expert without rows
// starts at the same row as the next one.
__device__ __forceinline__ int64_t expert_of_row(const ExpertBounds& experts, int64_t row) {
  int64_t low = 0, high = experts.num_experts - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (experts.begin(middle) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Adds each expert's bias to its rows, unless `bias` is null, and zeroes the rows of no expert. A warp handles a row.
template <typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads) finish_rows_kernel(
    ExpertBounds experts, const T* __restrict__ bias, int64_t num_rows, int64_t dim, T* __restrict__ out) {
  for (int64_t row = int64_t{blockIdx.x} * kNumWarps + warp_id(); row < num_rows;
       row += int64_t{gridDim.x} * kNumWarps) {
    const bool owned = experts.begin(0) <= row && row < experts.begin(experts.num_experts);
    if (owned && bias == nullptr) {
      continue;
    }
    const T* const add = owned ? bias + expert_of_row(experts, row) * dim : nullptr;
#pragma unroll 4
    for (int64_t column = lane_id() * kSize; column < dim; column += kWarpSize * kSize) {
      T* const place = out + row * dim + column;
      Vec<T, kSize> value = {};
      if (owned) {
        const Vec<T, kSize> sum = load<kSize>(place), term = load<kSize>(add + column);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          value.v[i] = static_cast<T>(static_cast<acc_t<T>>(sum.v[i]) + static_cast<acc_t<T>>(term.v[i]));
        }
      }
      store(place, value);
    }
  }
}

// Zeroes the `size` elements of each expert without rows. grid.y divides the elements of an expert.
template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    zero_empty_experts_kernel(ExpertBounds experts, int64_t size, T* __restrict__ out) {
  const int64_t expert = blockIdx.x;
  if (experts.begin(expert) != experts.end(expert)) {
    return;
  }
  for (int64_t i = int64_t{blockIdx.y} * kNumThreads + threadIdx.x; i < size; i += int64_t{gridDim.y} * kNumThreads) {
    out[expert * size + i] = static_cast<T>(acc_t<T>(0));
  }
}

// Adds product[e] to sum[e], `size` elements each, for experts with rows. grid.y divides the elements of an expert.
template <typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads)
    add_experts_kernel(ExpertBounds experts, const T* __restrict__ product, int64_t size, T* __restrict__ sum) {
  const int64_t expert = blockIdx.x;
  if (experts.begin(expert) == experts.end(expert)) {
    return;
  }
  const int64_t step = int64_t{gridDim.y} * kNumThreads * kSize;
#pragma unroll 4
  for (int64_t i = (int64_t{blockIdx.y} * kNumThreads + threadIdx.x) * kSize; i < size; i += step) {
    const Vec<T, kSize> added = load<kSize>(product + expert * size + i);
    Vec<T, kSize> value = load<kSize>(sum + expert * size + i);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      value.v[j] = static_cast<T>(static_cast<acc_t<T>>(value.v[j]) + static_cast<acc_t<T>>(added.v[j]));
    }
    store(sum + expert * size + i, value);
  }
}

// Computes out[e], the sum of the rows of expert e. Each warp adds every eighth row, with loads of kSumRows rows in
// flight, and the sums of the warps are added in order. grid.x is the expert, grid.y the tile of columns.
template <typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads)
    sum_rows_kernel(ExpertBounds experts, const T* __restrict__ rows, int64_t dim, T* __restrict__ out) {
  using Acc = acc_t<T>;
  constexpr int kSumRows = 4;
  MOE_SHARED(Acc, sums, kNumThreads * kSize);
  const int64_t expert = blockIdx.x;
  const int64_t column = (int64_t{blockIdx.y} * kWarpSize + lane_id()) * kSize;
  Acc sum[kSize] = {};
  const int64_t end = column < dim ? experts.end(expert) : 0;
  for (int64_t first = experts.begin(expert) + warp_id(); first < end; first += kSumRows * kNumWarps) {
    Vec<T, kSize> values[kSumRows] = {};
#pragma unroll
    for (int i = 0; i < kSumRows; ++i) {
      if (first + i * kNumWarps < end) {
        values[i] = load<kSize>(rows + (first + i * kNumWarps) * dim + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kSumRows; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        sum[j] += static_cast<Acc>(values[i].v[j]);
      }
    }
  }
  // The elements j of all threads are adjacent, so that neighbouring threads access different banks.
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    sums[j * kNumThreads + threadIdx.x] = sum[j];
  }
  __syncthreads();
  if (warp_id() == 0 && column < dim) {
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      for (int warp = 1; warp < kNumWarps; ++warp) {
        sum[j] += sums[j * kNumThreads + warp * kWarpSize + lane_id()];
      }
      result.v[j] = static_cast<T>(sum[j]);
    }
    store(out + expert * dim + column, result);
  }
}

// Calls f<kSize>() with the elements per access: 16 bytes if rows of `dim` at all these addresses allow it, else one.
template <typename T, typename F, typename... Pointers>
void with_row_access(int64_t dim, F&& f, const Pointers*... pointers) {
  if (rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), pointers...)) {
    f.template operator()<static_cast<int>(kAccessBytes / sizeof(T))>();
  } else {
    f.template operator()<1>();
  }
}

// Launches finish_rows_kernel for out [N, M] and bias [E, M] or null.
template <typename T>
void launch_finish_rows(
    const ExpertBounds& experts, const T* bias, int64_t num_rows, int64_t dim, T* out, cudaStream_t stream) {
  if (num_rows * dim > 0) {
    const Dim3 grid = persistent_grid(ceil_div(num_rows, kNumWarps), kNumThreads, device_properties());
    with_row_access<T>(
        dim,
        [&]<int kSize>() {
          launch({grid, Dim3(kNumThreads), 0, stream}, finish_rows_kernel<T, kSize>, experts, bias, num_rows, dim, out);
        },
        bias, out);
  }
}

// Launches zero_empty_experts_kernel for out [E, size].
template <typename T>
void launch_zero_empty_experts(const ExpertBounds& experts, int64_t size, T* out, cudaStream_t stream) {
  if (experts.num_experts * size > 0) {
    const int64_t shares = std::min<int64_t>(ceil_div(size, kNumThreads), 64);
    launch(
        {Dim3(experts.num_experts, shares), Dim3(kNumThreads), 0, stream}, zero_empty_experts_kernel<T>, experts, size,
        out);
  }
}

// Launches add_experts_kernel for product and sum [E, size].
template <typename T>
void launch_add_experts(const ExpertBounds& experts, const T* product, int64_t size, T* sum, cudaStream_t stream) {
  if (experts.num_experts * size > 0) {
    with_row_access<T>(
        size,
        [&]<int kSize>() {
          const int64_t shares = std::min<int64_t>(ceil_div(size, int64_t{4} * kNumThreads * kSize), 1024);
          const Dim3 grid(experts.num_experts, shares);
          launch({grid, Dim3(kNumThreads), 0, stream}, add_experts_kernel<T, kSize>, experts, product, size, sum);
        },
        product, sum);
  }
}

// Launches sum_rows_kernel for rows [N, M] and out [E, M].
template <typename T>
void launch_sum_rows(const ExpertBounds& experts, const T* rows, int64_t dim, T* out, cudaStream_t stream) {
  if (experts.num_experts * dim > 0) {
    with_row_access<T>(
        dim,
        [&]<int kSize>() {
          const int64_t tiles = ceil_div(dim, int64_t{kWarpSize} * kSize);
          const Dim3 grid(experts.num_experts, tiles);
          launch({grid, Dim3(kNumThreads), 0, stream}, sum_rows_kernel<T, kSize>, experts, rows, dim, out);
        },
        rows, out);
  }
}

} // namespace moe_ext::grouped_gemm
