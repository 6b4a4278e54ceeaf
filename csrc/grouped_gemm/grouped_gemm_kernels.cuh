// Work around the library's grouped product: bias and rows of no expert, experts without rows, sums of rows.
// All find their rows by the offsets on the device, so that the host need not know them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/simd.h"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::grouped_gemm {

constexpr int kNumThreads = 256;
constexpr int kNumWarps = kNumThreads / kWarpSize;

// The rows of each expert, on the device: offsets [E + 1], or ends [E] of experts that have all rows.
struct ExpertBounds {
  const int64_t* offsets; // or null
  const int32_t* ends;
  int num_experts;

  // Of `expert` in [0, E]: before the rows of the next one.
  __device__ __forceinline__ int64_t begin(int64_t expert) const {
    return offsets != nullptr ? offsets[expert] : expert == 0 ? 0 : ends[expert - 1];
  }
  __device__ __forceinline__ int64_t end(int64_t expert) const {
    return begin(expert + 1);
  }
};

// The last expert that starts at or before the row: the owner, since experts without rows start where the next one
// does.
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

// Adds each expert's bias to its rows, unless it is null, and zeroes the rows of no expert. One warp a row.
template <typename T>
__global__ void __launch_bounds__(kNumThreads) finish_rows_kernel(
    ExpertBounds experts, const T* __restrict__ bias, int64_t num_rows, int64_t dim, T* __restrict__ out) {
  for (int64_t row = int64_t{blockIdx.x} * kNumWarps + warp_id(); row < num_rows;
       row += int64_t{gridDim.x} * kNumWarps) {
    const bool owned = experts.begin(0) <= row && row < experts.begin(experts.num_experts);
    if (owned && bias == nullptr) {
      continue;
    }
    const T* const add = owned ? bias + expert_of_row(experts, row) * dim : nullptr;
    for (int64_t column = lane_id(); column < dim; column += kWarpSize) {
      T& value = out[row * dim + column];
      value = owned ? static_cast<T>(static_cast<acc_t<T>>(value) + static_cast<acc_t<T>>(add[column]))
                    : static_cast<T>(acc_t<T>(0));
    }
  }
}

// Zeroes the [size] elements of each expert without rows; grid.y shares them out.
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

// out[e] = sum of the rows of expert e: each warp adds every eighth row, and the warps are added in order.
// grid.x is the expert, grid.y the tile of columns.
template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    sum_rows_kernel(ExpertBounds experts, const T* __restrict__ rows, int64_t dim, T* __restrict__ out) {
  using Acc = acc_t<T>;
  MOE_SHARED(Acc, sums, kNumThreads);
  const int64_t expert = blockIdx.x;
  const int64_t column = int64_t{blockIdx.y} * kWarpSize + lane_id();
  Acc sum = 0;
  const int64_t end = experts.end(expert);
  for (int64_t row = experts.begin(expert) + warp_id(); column < dim && row < end; row += kNumWarps) {
    sum += static_cast<Acc>(rows[row * dim + column]);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp_id() == 0 && column < dim) {
    for (int warp = 1; warp < kNumWarps; ++warp) {
      sum += sums[warp * kWarpSize + lane_id()];
    }
    out[expert * dim + column] = static_cast<T>(sum);
  }
}

// out [N, M], bias [E, M] or null
template <typename T>
void launch_finish_rows(
    const ExpertBounds& experts, const T* bias, int64_t num_rows, int64_t dim, T* out, cudaStream_t stream) {
  if (num_rows * dim > 0) {
    const dim3 grid = persistent_grid(ceil_div(num_rows, kNumWarps), kNumThreads, device_properties());
    launch({grid, dim3(kNumThreads), 0, stream}, finish_rows_kernel<T>, experts, bias, num_rows, dim, out);
  }
}

// out [E, size]
template <typename T>
void launch_zero_empty_experts(const ExpertBounds& experts, int64_t size, T* out, cudaStream_t stream) {
  if (experts.num_experts * size > 0) {
    const auto shares = static_cast<unsigned>(std::min<int64_t>(ceil_div(size, kNumThreads), 64));
    launch(
        {dim3(static_cast<unsigned>(experts.num_experts), shares), dim3(kNumThreads), 0, stream},
        zero_empty_experts_kernel<T>, experts, size, out);
  }
}

// rows [N, M], out [E, M]
template <typename T>
void launch_sum_rows(const ExpertBounds& experts, const T* rows, int64_t dim, T* out, cudaStream_t stream) {
  if (experts.num_experts * dim > 0) {
    const dim3 grid(static_cast<unsigned>(experts.num_experts), static_cast<unsigned>(ceil_div(dim, kWarpSize)));
    launch({grid, dim3(kNumThreads), 0, stream}, sum_rows_kernel<T>, experts, rows, dim, out);
  }
}

} // namespace moe_ext::grouped_gemm
