// Kernels of activations, which are bound by memory. A thread computes 16 bytes of output at a time, or one element if
// the width of a row or an address is not aligned. It loops over vectors with the stride of the grid. Backward kernels
// recompute everything from x.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "activation/activation_math.h"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::activation {

constexpr int kNumThreads = 256;
constexpr int kMinBlocks = 3; // of an SM. By default ptxas would aim at fewer registers and spill.

__device__ __forceinline__ int64_t grid_thread() {
  return int64_t{blockIdx.x} * kNumThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t grid_stride() {
  return int64_t{gridDim.x} * kNumThreads;
}

// out[i] = f(x[i])
template <Kind kKind, typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads)
    activation_kernel(const T* __restrict__ x, int64_t num_vectors, T* __restrict__ out) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const Vec<T, kSize> in = load<kSize>(x + i * kSize);
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      result.v[j] = static_cast<T>(Function<kKind>::value(static_cast<acc_t<T>>(in.v[j])));
    }
    store(out + i * kSize, result);
  }
}

// grad_x[i] = grad[i] f'(x[i])
template <Kind kKind, typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads) activation_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ x, int64_t num_vectors, T* __restrict__ grad_x) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const Vec<T, kSize> g = load<kSize>(grad + i * kSize);
    const Vec<T, kSize> in = load<kSize>(x + i * kSize);
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      acc_t<T> slope;
      Function<kKind>::value_and_grad(static_cast<acc_t<T>>(in.v[j]), static_cast<acc_t<T>>(g.v[j]), slope);
      result.v[j] = static_cast<T>(slope);
    }
    store(grad_x + i * kSize, result);
  }
}

// Gates and ups of kSize neighbouring outputs.
template <typename T, int kSize>
struct Halves {
  Vec<T, kSize> gate;
  Vec<T, kSize> up;
};

// Offset of the inputs of vector `i` of a row: a concatenated row has `dim` gates and then `dim` ups.
template <Layout kLayout, int kSize>
__device__ __forceinline__ int64_t first_input_of_row(int64_t row, uint32_t i, int64_t dim) {
  return row * 2 * dim + int64_t{i} * (kLayout == Layout::kInterleaved ? 2 * kSize : kSize);
}

// Offset of the inputs of vector i of all rows. Interleaved rows have no seam. The division has 32 bits, because a
// 64-bit division is a function call.
template <Layout kLayout, int kSize>
__device__ __forceinline__ int64_t first_input(uint32_t i, uint32_t vectors_per_row, int64_t dim) {
  if constexpr (kLayout == Layout::kInterleaved) {
    return int64_t{i} * 2 * kSize;
  } else {
    const uint32_t row = i / vectors_per_row;
    return first_input_of_row<kLayout, kSize>(row, i - row * vectors_per_row, dim);
  }
}

template <Layout kLayout, typename T, int kSize>
__device__ __forceinline__ Halves<T, kSize> load_halves(const T* x, int64_t dim) {
  if constexpr (kLayout == Layout::kConcatenated) {
    return {load<kSize>(x), load<kSize>(x + dim)};
  } else {
    const Vec<T, kSize> pairs[2] = {load<kSize>(x), load<kSize>(x + kSize)};
    Halves<T, kSize> halves;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      halves.gate.v[j] = pairs[2 * j / kSize].v[2 * j % kSize];
      halves.up.v[j] = pairs[(2 * j + 1) / kSize].v[(2 * j + 1) % kSize];
    }
    return halves;
  }
}

template <Layout kLayout, typename T, int kSize>
__device__ __forceinline__ void store_halves(T* x, const Halves<T, kSize>& halves, int64_t dim) {
  if constexpr (kLayout == Layout::kConcatenated) {
    store(x, halves.gate);
    store(x + dim, halves.up);
  } else {
    Vec<T, kSize> pairs[2];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      pairs[2 * j / kSize].v[2 * j % kSize] = halves.gate.v[j];
      pairs[(2 * j + 1) / kSize].v[(2 * j + 1) % kSize] = halves.up.v[j];
    }
    store(x, pairs[0]);
    store(x + kSize, pairs[1]);
  }
}

// out[i] = f(gate[i]) up[i]
template <Kind kKind, typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> activate(const Halves<T, kSize>& in, acc_t<T> weight) {
  Vec<T, kSize> result;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const acc_t<T> value = Function<kKind>::value(static_cast<acc_t<T>>(in.gate.v[j]));
    result.v[j] = static_cast<T>(value * static_cast<acc_t<T>>(in.up.v[j]) * weight);
  }
  return result;
}

// grad_gate[i] = g[i] up[i] f'(gate[i]), grad_up[i] = g[i] f(gate[i]), with g = grad weight. Adds the gradient of the
// weight to `grad_weight`.
template <Kind kKind, typename T, int kSize>
__device__ __forceinline__ Halves<T, kSize> activate_backward(
    const Vec<T, kSize>& grad, const Halves<T, kSize>& in, acc_t<T> weight, acc_t<T>& grad_weight) {
  Halves<T, kSize> result;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const acc_t<T> up = static_cast<acc_t<T>>(in.up.v[j]);
    const acc_t<T> g = static_cast<acc_t<T>>(grad.v[j]) * weight;
    acc_t<T> slope;
    const acc_t<T> value = Function<kKind>::value_and_grad(static_cast<acc_t<T>>(in.gate.v[j]), g * up, slope);
    result.gate.v[j] = static_cast<T>(slope);
    result.up.v[j] = static_cast<T>(g * value);
    grad_weight += static_cast<acc_t<T>>(grad.v[j]) * (value * up);
  }
  return result;
}

// x [rows, 2 dim], out [rows, dim].
template <Kind kKind, Layout kLayout, typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads) gated_activation_kernel(
    const T* __restrict__ x, uint32_t num_vectors, uint32_t vectors_per_row, int64_t dim, T* __restrict__ out) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const T* const from = x + first_input<kLayout, kSize>(static_cast<uint32_t>(i), vectors_per_row, dim);
    store(out + i * kSize, activate<kKind, T, kSize>(load_halves<kLayout, T, kSize>(from, dim), acc_t<T>(1)));
  }
}

template <Kind kKind, Layout kLayout, typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads) gated_activation_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ x, uint32_t num_vectors, uint32_t vectors_per_row, int64_t dim,
    T* __restrict__ grad_x) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const int64_t at = first_input<kLayout, kSize>(static_cast<uint32_t>(i), vectors_per_row, dim);
    acc_t<T> unused = 0;
    const Halves<T, kSize> result = activate_backward<kKind, T, kSize>(
        load<kSize>(grad + i * kSize), load_halves<kLayout, T, kSize>(x + at, dim), acc_t<T>(1), unused);
    store_halves<kLayout, T, kSize>(grad_x + at, result, dim);
  }
}

// The weight of a row, by its slot. 0 for a padding row, whose slot is -1.
template <bool kCheck, typename Weight>
__device__ __forceinline__ Weight weight_of(int64_t slot, const Weight* weights, int64_t num_slots) {
  if constexpr (kCheck) {
    if (slot < -1 || slot >= num_slots) {
      __trap();
    }
  }
  return slot < 0 ? Weight(0) : weights[slot];
}

// As gated_activation_kernel, with row r multiplied by weights[slot_of_row[r]].
template <Kind kKind, Layout kLayout, typename T, int kSize, bool kCheck>
__global__ void __launch_bounds__(kNumThreads) gated_activation_weighted_kernel(
    const T* __restrict__ x, const acc_t<T>* __restrict__ weights, const int64_t* __restrict__ slot_of_row,
    int64_t num_slots, uint32_t num_vectors, uint32_t vectors_per_row, int64_t dim, T* __restrict__ out) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const uint32_t row = static_cast<uint32_t>(i) / vectors_per_row;
    const uint32_t vector = static_cast<uint32_t>(i) - row * vectors_per_row;
    const T* const from = x + first_input_of_row<kLayout, kSize>(row, vector, dim);
    const Halves<T, kSize> in = load_halves<kLayout, T, kSize>(from, dim);
    const int64_t slot = slot_of_row[row];
    const acc_t<T> weight = weight_of<kCheck>(slot, weights, num_slots);
    store(out + i * kSize, slot < 0 ? Vec<T, kSize>{} : activate<kKind, T, kSize>(in, weight));
  }
}

// One warp for each row, so that the order of the sum for its weight does not depend on the grid. The gradient of a
// slot without a row is left as it is.
template <Kind kKind, Layout kLayout, typename T, int kSize, bool kCheck>
__global__ void __launch_bounds__(kNumThreads, kMinBlocks) gated_activation_weighted_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ x, const acc_t<T>* __restrict__ weights,
    const int64_t* __restrict__ slot_of_row, int64_t num_slots, int64_t num_rows, uint32_t vectors_per_row, int64_t dim,
    T* __restrict__ grad_x, acc_t<T>* __restrict__ grad_weights) {
  constexpr int kNumWarps = kNumThreads / kWarpSize;
  const int64_t stride = int64_t{gridDim.x} * kNumWarps;
  for (int64_t row = int64_t{blockIdx.x} * kNumWarps + warp_id(); row < num_rows; row += stride) {
    const int64_t slot = slot_of_row[row];
    const acc_t<T> weight = weight_of<kCheck>(slot, weights, num_slots);
    acc_t<T> grad_weight = 0;
    for (uint32_t i = static_cast<uint32_t>(lane_id()); i < vectors_per_row; i += kWarpSize) {
      const int64_t at = first_input_of_row<kLayout, kSize>(row, i, dim);
      Halves<T, kSize> result{};
      if (slot >= 0) {
        result = activate_backward<kKind, T, kSize>(
            load<kSize>(grad + row * dim + int64_t{i} * kSize), load_halves<kLayout, T, kSize>(x + at, dim), weight,
            grad_weight);
      }
      store_halves<kLayout, T, kSize>(grad_x + at, result, dim);
    }
    grad_weight = warp_sum(grad_weight);
    if (slot >= 0 && lane_id() == 0) {
      grad_weights[slot] = grad_weight;
    }
  }
}

inline Launch elementwise_launch(int64_t num_vectors, cudaStream_t stream) {
  const Dim3 grid = persistent_grid(ceil_div(num_vectors, kNumThreads), kNumThreads, device_properties());
  return {grid, Dim3(kNumThreads), 0, stream};
}

// Calls f.operator()<kind>(). Gates lack the kinds that only plain activations have.
template <bool kGated, typename F>
void with_kind(Kind kind, F&& f) {
  switch (kind) {
    case Kind::kSilu:
      return f.template operator()<Kind::kSilu>();
    case Kind::kGelu:
      return f.template operator()<Kind::kGelu>();
    case Kind::kGeluTanh:
      return f.template operator()<Kind::kGeluTanh>();
    case Kind::kRelu:
      return f.template operator()<Kind::kRelu>();
    case Kind::kReluSquared:
      if constexpr (!kGated) {
        return f.template operator()<Kind::kReluSquared>();
      }
  }
}

template <typename T>
constexpr int kVectorSize = kAccessBytes / static_cast<int>(sizeof(T));

// x, out [n]
template <typename T>
void launch_activation(Kind kind, const T* x, int64_t n, T* out, cudaStream_t stream) {
  const auto run = [&]<Kind kKind, int kSize>() {
    launch(elementwise_launch(n / kSize, stream), activation_kernel<kKind, T, kSize>, x, n / kSize, out);
  };
  if (n > 0) {
    with_kind<false>(kind, [&]<Kind kKind>() {
      if (rows_are_aligned(n * static_cast<int64_t>(sizeof(T)), x, out)) {
        run.template operator()<kKind, kVectorSize<T>>();
      } else {
        run.template operator()<kKind, 1>();
      }
    });
  }
}

// grad, x, grad_x [n]
template <typename T>
void launch_activation_backward(Kind kind, const T* grad, const T* x, int64_t n, T* grad_x, cudaStream_t stream) {
  const auto run = [&]<Kind kKind, int kSize>() {
    launch(
        elementwise_launch(n / kSize, stream), activation_backward_kernel<kKind, T, kSize>, grad, x, n / kSize, grad_x);
  };
  if (n > 0) {
    with_kind<false>(kind, [&]<Kind kKind>() {
      if (rows_are_aligned(n * static_cast<int64_t>(sizeof(T)), grad, x, grad_x)) {
        run.template operator()<kKind, kVectorSize<T>>();
      } else {
        run.template operator()<kKind, 1>();
      }
    });
  }
}

// Calls f.operator()<kind, layout, size>() with the widest possible access.
template <typename T, typename F>
void with_gate(Kind kind, Layout layout, bool aligned, F&& f) {
  with_kind<true>(kind, [&]<Kind kKind>() {
    const auto with_layout = [&]<Layout kLayout>() {
      if (aligned) {
        f.template operator()<kKind, kLayout, kVectorSize<T>>();
      } else {
        f.template operator()<kKind, kLayout, 1>();
      }
    };
    if (layout == Layout::kConcatenated) {
      with_layout.template operator()<Layout::kConcatenated>();
    } else {
      with_layout.template operator()<Layout::kInterleaved>();
    }
  });
}

// Calls f(first_row, rows) for pieces whose outputs can be counted in 31 bits.
template <typename F>
void each_piece(int64_t num_rows, int64_t dim, F&& f) {
  const int64_t rows_per_piece = std::max<int64_t>(1, INT32_MAX / std::max<int64_t>(1, dim));
  for (int64_t row = 0; row < num_rows && dim > 0; row += rows_per_piece) {
    f(row, std::min(rows_per_piece, num_rows - row));
  }
}

// x [rows, 2 dim], out [rows, dim]
template <typename T>
void launch_gated_activation(
    Kind kind, Layout layout, const T* x, int64_t num_rows, int64_t dim, T* out, cudaStream_t stream) {
  const bool aligned = rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), x, out);
  each_piece(num_rows, dim, [&](int64_t row, int64_t rows) {
    with_gate<T>(kind, layout, aligned, [&]<Kind kKind, Layout kLayout, int kSize>() {
      const auto n = static_cast<uint32_t>(rows * dim / kSize);
      launch(
          elementwise_launch(n, stream), gated_activation_kernel<kKind, kLayout, T, kSize>, x + row * 2 * dim, n,
          static_cast<uint32_t>(dim / kSize), dim, out + row * dim);
    });
  });
}

// grad [rows, dim], x and grad_x [rows, 2 dim]
template <typename T>
void launch_gated_activation_backward(
    Kind kind, Layout layout, const T* grad, const T* x, int64_t num_rows, int64_t dim, T* grad_x,
    cudaStream_t stream) {
  const bool aligned = rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), grad, x, grad_x);
  each_piece(num_rows, dim, [&](int64_t row, int64_t rows) {
    with_gate<T>(kind, layout, aligned, [&]<Kind kKind, Layout kLayout, int kSize>() {
      const auto n = static_cast<uint32_t>(rows * dim / kSize);
      launch(
          elementwise_launch(n, stream), gated_activation_backward_kernel<kKind, kLayout, T, kSize>, grad + row * dim,
          x + row * 2 * dim, n, static_cast<uint32_t>(dim / kSize), dim, grad_x + row * 2 * dim);
    });
  });
}

// As launch_gated_activation, with row r multiplied by weights[slot_of_row[r]], and zeros for slot -1.
template <bool kCheck, typename T>
void launch_gated_activation_weighted(
    Kind kind, Layout layout, const T* x, const acc_t<T>* weights, const int64_t* slot_of_row, int64_t num_slots,
    int64_t num_rows, int64_t dim, T* out, cudaStream_t stream) {
  const bool aligned = rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), x, out);
  each_piece(num_rows, dim, [&](int64_t row, int64_t rows) {
    with_gate<T>(kind, layout, aligned, [&]<Kind kKind, Layout kLayout, int kSize>() {
      const auto n = static_cast<uint32_t>(rows * dim / kSize);
      launch(
          elementwise_launch(n, stream), gated_activation_weighted_kernel<kKind, kLayout, T, kSize, kCheck>,
          x + row * 2 * dim, weights, slot_of_row + row, num_slots, n, static_cast<uint32_t>(dim / kSize), dim,
          out + row * dim);
    });
  });
}

// grad_weights [num_slots] must be zero.
template <bool kCheck, typename T>
void launch_gated_activation_weighted_backward(
    Kind kind, Layout layout, const T* grad, const T* x, const acc_t<T>* weights, const int64_t* slot_of_row,
    int64_t num_slots, int64_t num_rows, int64_t dim, T* grad_x, acc_t<T>* grad_weights, cudaStream_t stream) {
  if (num_rows * dim == 0) {
    return;
  }
  const bool aligned = rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), grad, x, grad_x);
  with_gate<T>(kind, layout, aligned, [&]<Kind kKind, Layout kLayout, int kSize>() {
    launch(
        elementwise_launch(num_rows * kWarpSize, stream),
        gated_activation_weighted_backward_kernel<kKind, kLayout, T, kSize, kCheck>, grad, x, weights, slot_of_row,
        num_slots, num_rows, static_cast<uint32_t>(dim / kSize), dim, grad_x, grad_weights);
  });
}

} // namespace moe_ext::activation
