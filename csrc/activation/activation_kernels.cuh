// Activations, bound by memory. A thread makes 16 bytes of output at a time, one element where the width of a row or an
// address does not allow it, and walks over the rest with the stride of the grid. Everything is recomputed from x.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "activation/activation_math.h"
#include "common/launch.cuh"
#include "common/vec.cuh"

namespace moe_ext::activation {

constexpr int kNumThreads = 256;

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

// The gates and ups of kSize neighbouring outputs.
template <typename T, int kSize>
struct Halves {
  Vec<T, kSize> gate;
  Vec<T, kSize> up;
};

// Offsets of the inputs of output vector i: concatenated rows have `dim` gates and then `dim` ups, and interleaved ones
// follow each other without a seam. The division is of 32 bits: one of 64 is a call.
template <Layout kLayout, int kSize>
__device__ __forceinline__ int64_t first_input(uint32_t i, uint32_t vectors_per_row, int64_t dim) {
  if constexpr (kLayout == Layout::kInterleaved) {
    return int64_t{i} * 2 * kSize;
  } else {
    const uint32_t row = i / vectors_per_row;
    return int64_t{row} * 2 * dim + int64_t{i - row * vectors_per_row} * kSize;
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
template <Kind kKind, Layout kLayout, typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads) gated_activation_kernel(
    const T* __restrict__ x, uint32_t num_vectors, uint32_t vectors_per_row, int64_t dim, T* __restrict__ out) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const T* const from = x + first_input<kLayout, kSize>(static_cast<uint32_t>(i), vectors_per_row, dim);
    const Halves<T, kSize> in = load_halves<kLayout, T, kSize>(from, dim);
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const acc_t<T> value = Function<kKind>::value(static_cast<acc_t<T>>(in.gate.v[j]));
      result.v[j] = static_cast<T>(value * static_cast<acc_t<T>>(in.up.v[j]));
    }
    store(out + i * kSize, result);
  }
}

// grad_gate[i] = grad[i] up[i] f'(gate[i]), grad_up[i] = grad[i] f(gate[i]), laid out as x
template <Kind kKind, Layout kLayout, typename T, int kSize>
__global__ void __launch_bounds__(kNumThreads) gated_activation_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ x, uint32_t num_vectors, uint32_t vectors_per_row, int64_t dim,
    T* __restrict__ grad_x) {
  for (int64_t i = grid_thread(); i < num_vectors; i += grid_stride()) {
    const int64_t at = first_input<kLayout, kSize>(static_cast<uint32_t>(i), vectors_per_row, dim);
    const Vec<T, kSize> g = load<kSize>(grad + i * kSize);
    const Halves<T, kSize> in = load_halves<kLayout, T, kSize>(x + at, dim);
    Halves<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const acc_t<T> slope_in = static_cast<acc_t<T>>(g.v[j]) * static_cast<acc_t<T>>(in.up.v[j]);
      acc_t<T> slope;
      const acc_t<T> value = Function<kKind>::value_and_grad(static_cast<acc_t<T>>(in.gate.v[j]), slope_in, slope);
      result.gate.v[j] = static_cast<T>(slope);
      result.up.v[j] = static_cast<T>(static_cast<acc_t<T>>(g.v[j]) * value);
    }
    store_halves<kLayout, T, kSize>(grad_x + at, result, dim);
  }
}

inline Launch elementwise_launch(int64_t num_vectors, cudaStream_t stream) {
  const dim3 grid = persistent_grid(ceil_div(num_vectors, kNumThreads), kNumThreads, device_properties());
  return {grid, dim3(kNumThreads), 0, stream};
}

// f.operator()<kind>(), for a gate without the kinds that only a plain activation has.
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

// Calls f.operator()<kind, layout, size>() for the widest access.
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

// Calls f(first_row, rows) so that the outputs of a call can be counted in 31 bits.
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

} // namespace moe_ext::activation
