// Kernels that merge rows, and their gradients. A row is split over the smallest power of two of lanes such that each
// takes at most four columns, or over a warp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "attention/attention_tables.h"
#include "attention/tile_products.cuh"
#include "common/launch.cuh"
#include "common/warp.cuh"

namespace moe_ext::attention {

constexpr int64_t kMostBlocksAlongY = 65535;

struct RowPlan {
  int64_t num_rows;
  int lanes; // that share a row
};

inline RowPlan plan_rows(int64_t num_rows, int64_t dim) {
  int lanes = 1;
  while (lanes < kWarpSize && 4 * lanes < dim) {
    lanes *= 2;
  }
  return {num_rows, lanes};
}

// The row of a lane and the first of its columns. Lanes without a row take the last row and write nothing, because all
// lanes of a warp must take part in shuffles.
struct RowLane {
  int64_t row;
  int first, step;
  bool real;

  __device__ __forceinline__ explicit RowLane(const RowPlan& plan) {
    const int64_t mine = (int64_t{blockIdx.x} * kNumThreads + threadIdx.x) / plan.lanes;
    real = mine < plan.num_rows;
    row = real ? mine : plan.num_rows - 1;
    first = 4 * (static_cast<int>(threadIdx.x) % plan.lanes);
    step = 4 * plan.lanes;
  }

  __device__ __forceinline__ bool leads() const {
    return real && first == 0;
  }

  template <typename Acc>
  __device__ __forceinline__ Acc sum(Acc value) const {
    for (int offset = step / 8; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(kFullMask, value, offset);
    }
    return value;
  }
};

// Reads four columns of a dense row.
template <typename T>
__device__ __forceinline__ Quad<acc_t<T>> read_columns(const T* row, int col, int64_t dim, bool aligned) {
  return read_quad(Rows<T>{row, 0, 1, static_cast<int>(dim), aligned}, 0, col);
}

template <typename T>
__device__ __forceinline__ void write_columns(
    T* row, int col, int64_t dim, bool aligned, acc_t<T> scale, const Quad<acc_t<T>>& x) {
  Quad<T> quad;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    quad.v[e] = static_cast<T>(scale * x.v[e]);
  }
  if (aligned) {
    store_quad(row + col, quad);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (col + e < dim) {
      row[col + e] = quad.v[e];
    }
  }
}

template <typename Acc>
__device__ __forceinline__ Acc dot_quad(const Quad<Acc>& a, const Quad<Acc>& b) {
  return a.v[0] * b.v[0] + a.v[1] * b.v[1] + (a.v[2] * b.v[2] + a.v[3] * b.v[3]);
}

// out = weight_a a + weight_b b. An output with weight 0 may hold anything, and is not read.
template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    merge_kernel(MergeArgs<T> args, RowPlan plan, bool aligned, acc_t<T>* out, acc_t<T>* lse) {
  using Acc = acc_t<T>;
  const RowLane lane(plan);
  if (!lane.real) {
    return;
  }
  const MergeWeights<Acc> w = merge_weights(args.lse_a[lane.row], args.lse_b[lane.row]);
  const int64_t offset = lane.row * args.dim;
  const bool has_a = !(w.a == 0), has_b = args.out_b != nullptr && !(w.b == 0);
  if (lane.leads()) {
    lse[lane.row] = w.lse;
  }
  for (int64_t col = lane.first; col < args.dim; col += lane.step) {
    const int c = static_cast<int>(col);
    const Quad<Acc> a = has_a ? read_columns(args.out_a + offset, c, args.dim, aligned) : Quad<Acc>{};
    const Quad<Acc> b = has_b ? read_columns(args.out_b + offset, c, args.dim, aligned) : Quad<Acc>{};
    Quad<Acc> sum;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Acc of_b = has_b ? w.b * b.v[e] : Acc(0);
      sum.v[e] = has_a ? w.a * a.v[e] + of_b : of_b;
    }
    write_columns(out + offset, c, args.dim, aligned, Acc(1), sum);
  }
}

// Merges b into `out` in place. blockIdx.y runs over the heads of all batches, and `plan` covers the rows of one head.
template <typename T>
__global__ void __launch_bounds__(kNumThreads) merge_into_kernel(MergeIntoArgs<T> args, RowPlan plan, bool aligned) {
  using Acc = acc_t<T>;
  const RowLane lane(plan);
  for (int64_t pair = blockIdx.y; pair < args.batch * args.heads; pair += gridDim.y) {
    const int64_t b = pair / args.heads, h = pair % args.heads;
    Acc* const lse = args.lse + args.of_lse.at(b, h, lane.row);
    const MergeWeights<Acc> w = merge_weights(*lse, args.lse_b[args.of_lse_b.at(b, h, lane.row)]);
    // All lanes of the row must have read the LSE before one of them overwrites it.
    __syncwarp();
    if (lane.leads()) {
      *lse = w.lse;
    }
    const bool has_a = !(w.a == 0), has_b = !(w.b == 0);
    if (!lane.real || (has_a && !has_b)) {
      continue;
    }
    Acc* const out = args.out + args.of_out.at(b, h, lane.row);
    const T* const other = args.out_b + args.of_out_b.at(b, h, lane.row);
    for (int64_t col = lane.first; col < args.dim; col += lane.step) {
      const int c = static_cast<int>(col);
      const Quad<Acc> of_a = has_a ? read_columns(out, c, args.dim, aligned) : Quad<Acc>{};
      const Quad<Acc> of_b = has_b ? read_columns(other, c, args.dim, aligned) : Quad<Acc>{};
      Quad<Acc> sum;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Acc part = has_b ? w.b * of_b.v[e] : Acc(0);
        sum.v[e] = has_a ? w.a * of_a.v[e] + part : part;
      }
      write_columns(out, c, args.dim, aligned, Acc(1), sum);
    }
  }
}

// d lse_a = w_a d lse + w_a w_b d out . (a - b); in d lse_b the product has the opposite sign.
template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    merge_backward_kernel(MergeGrads<T> grads, MergeArgs<T> args, RowPlan plan, bool aligned) {
  using Acc = acc_t<T>;
  const RowLane lane(plan);
  const MergeWeights<Acc> w = merge_weights(args.lse_a[lane.row], args.lse_b[lane.row]);
  const int64_t offset = lane.row * args.dim;
  // With one weight 0 the product is 0, and that output may hold anything.
  const bool both = !(w.a == 0) && !(w.b == 0);
  Acc of_a = 0, of_b = 0;
  for (int64_t col = lane.first; col < args.dim; col += lane.step) {
    const int c = static_cast<int>(col);
    const Quad<Acc> grad = read_columns(grads.grad_out + offset, c, args.dim, aligned);
    if (both) {
      of_a += dot_quad(grad, read_columns(args.out_a + offset, c, args.dim, aligned));
    }
    if (both && args.out_b != nullptr) {
      of_b += dot_quad(grad, read_columns(args.out_b + offset, c, args.dim, aligned));
    }
    if (lane.real) {
      write_columns(grads.grad_a + offset, c, args.dim, aligned, w.a, grad);
    }
    if (lane.real && grads.grad_b != nullptr) {
      write_columns(grads.grad_b + offset, c, args.dim, aligned, w.b, grad);
    }
  }
  const Acc product = lane.sum(of_a - of_b);
  if (lane.leads()) {
    const Acc share = both ? w.a * w.b * product : Acc(0);
    grads.grad_lse_a[lane.row] = w.a * grads.grad_lse[lane.row] + share;
    grads.grad_lse_b[lane.row] = w.b * grads.grad_lse[lane.row] - share;
  }
}

// delta = grad_out . out - grad_lse
template <typename Acc>
__global__ void __launch_bounds__(kNumThreads) delta_kernel(
    const Acc* grad_out, const Acc* out, const Acc* grad_lse, RowPlan plan, int64_t dim, bool aligned, Acc* delta) {
  const RowLane lane(plan);
  Acc product = 0;
  for (int64_t col = lane.first; col < dim; col += lane.step) {
    const int c = static_cast<int>(col);
    product += dot_quad(
        read_columns(grad_out + lane.row * dim, c, dim, aligned), read_columns(out + lane.row * dim, c, dim, aligned));
  }
  product = lane.sum(product);
  if (lane.leads()) {
    delta[lane.row] = grad_lse != nullptr ? product - grad_lse[lane.row] : product;
  }
}

inline Dim3 row_grid(const RowPlan& plan) {
  return Dim3(ceil_div(plan.num_rows * plan.lanes, int64_t{kNumThreads}));
}

// Return true if rows of `dim` elements may be read four at a time at all these addresses. Null counts as aligned.
template <typename... T>
bool quads_are_aligned(int64_t dim, const T*... data) {
  return dim % 4 == 0 && (is_aligned(data, std::min<int64_t>(kAccessBytes, 4 * sizeof(T))) && ...);
}

template <typename T>
void launch_merge(const MergeArgs<T>& args, int64_t num_rows, acc_t<T>* out, acc_t<T>* lse, cudaStream_t stream) {
  const RowPlan plan = plan_rows(num_rows, args.dim);
  const bool aligned = quads_are_aligned(args.dim, args.out_a, args.out_b, out);
  if (num_rows > 0) {
    launch({row_grid(plan), Dim3(kNumThreads), 0, stream}, merge_kernel<T>, args, plan, aligned, out, lse);
  }
}

template <typename T>
void launch_merge_into(const MergeIntoArgs<T>& args, cudaStream_t stream) {
  const RowPlan plan = plan_rows(args.rows, args.dim);
  bool aligned = quads_are_aligned(args.dim, args.out, args.out_b);
  // A named array, because nvcc fails to compile a range-for over a braced list inside a template.
  const RowStrides both[] = {args.of_out, args.of_out_b};
  for (const RowStrides& strides : both) {
    aligned = aligned && (args.batch == 1 || strides.batch % 4 == 0) && (args.heads == 1 || strides.head % 4 == 0) &&
              (args.rows == 1 || strides.row % 4 == 0);
  }
  Dim3 grid = row_grid(plan);
  grid.y = std::min<int64_t>(args.batch * args.heads, kMostBlocksAlongY);
  if (args.rows * args.batch * args.heads > 0) {
    launch({grid, Dim3(kNumThreads), 0, stream}, merge_into_kernel<T>, args, plan, aligned);
  }
}

template <typename T>
void launch_merge_backward(
    const MergeGrads<T>& grads, const MergeArgs<T>& args, int64_t num_rows, cudaStream_t stream) {
  const RowPlan plan = plan_rows(num_rows, args.dim);
  const bool aligned = quads_are_aligned(args.dim, args.out_a, args.out_b, grads.grad_out, grads.grad_a, grads.grad_b);
  if (num_rows > 0) {
    launch({row_grid(plan), Dim3(kNumThreads), 0, stream}, merge_backward_kernel<T>, grads, args, plan, aligned);
  }
}

// Shapes are [rows, dim] or [rows]. grad_lse may be null.
template <typename Acc>
void launch_delta(
    const Acc* grad_out, const Acc* out, const Acc* grad_lse, int64_t num_rows, int64_t dim, Acc* delta,
    cudaStream_t stream) {
  const RowPlan plan = plan_rows(num_rows, dim);
  const bool aligned = quads_are_aligned(dim, grad_out, out);
  if (num_rows > 0) {
    launch(
        {row_grid(plan), Dim3(kNumThreads), 0, stream}, delta_kernel<Acc>, grad_out, out, grad_lse, plan, dim, aligned,
        delta);
  }
}

} // namespace moe_ext::attention
