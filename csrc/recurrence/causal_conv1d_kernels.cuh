// Kernels of the causal convolution. The result, the gradient before the activation, and the gradients of x and halo
// have a thread for each element. Gradients of weight and bias have a block for each channel and tap, and are summed in
// a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/simd.h"
#include "common/threads.cuh"
#include "common/warp.cuh"

namespace moe_ext::recurrence {

// Strides, in elements, of rows of the batch, channels and positions.
struct ConvStrides {
  int64_t batch, channel, position;

  __device__ __forceinline__ int64_t at(int64_t b, int64_t d, int64_t t) const {
    return b * batch + d * channel + t * position;
  }
};

template <typename Acc>
struct ConvInput {
  const Acc *x, *halo;
  ConvStrides of_x, of_halo;
  const Acc *weight, *bias; // [D, W]; [D] or null
  const int64_t* documents; // [1 or B, W - 1 + L], or null
  int64_t documents_stride; // 0 if one row serves the whole batch
  int64_t batch, channels, length;
  int width;
  bool silu;

  int64_t numel() const {
    return batch * channels * length;
  }

  // Value at position t, which is in the halo if t is negative.
  __device__ __forceinline__ Acc value(int64_t b, int64_t d, int64_t t) const {
    return t < 0 ? halo[of_halo.at(b, d, t + width - 1)] : x[of_x.at(b, d, t)];
  }

  // Return true if position t belongs to the document of position t - 1.
  __device__ __forceinline__ bool goes_on(int64_t b, int64_t t) const {
    const int64_t* const numbers = documents + b * documents_stride + width - 1;
    return documents == nullptr || numbers[t] == numbers[t - 1];
  }

  // The convolution at a position, before the activation.
  __device__ __forceinline__ Acc sum(int64_t b, int64_t d, int64_t t) const {
    const Acc* const taps = weight + d * width;
    Acc total = bias == nullptr ? Acc(0) : bias[d];
    for (int back = 0; back < width; ++back) {
      if (back > 0 && !goes_on(b, t - back + 1)) {
        break;
      }
      total += taps[width - 1 - back] * value(b, d, t - back);
    }
    return total;
  }
};

// The indices of element i of [B, D, L].
struct ConvPlace {
  int64_t b, d, t;

  __device__ __forceinline__ ConvPlace(int64_t i, int64_t channels, int64_t length)
      : b(i / length / channels), d(i / length % channels), t(i % length) {
  }
};

template <typename Acc>
__global__ void __launch_bounds__(kThreads)
    causal_conv_kernel(ConvInput<Acc> in, Acc* __restrict__ out, ConvStrides of_out, int64_t numel) {
  for (int64_t i = global_thread(); i < numel; i += num_threads()) {
    const ConvPlace at(i, in.channels, in.length);
    const Acc sum = in.sum(at.b, at.d, at.t);
    out[of_out.at(at.b, at.d, at.t)] = in.silu ? sum * sigmoid_acc(sum) : sum;
  }
}

// sums [B, D, L]: gradients of the activation's inputs.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) causal_conv_sums_kernel(
    ConvInput<Acc> in, const Acc* __restrict__ grad, ConvStrides of_grad, Acc* __restrict__ sums, int64_t numel) {
  for (int64_t i = global_thread(); i < numel; i += num_threads()) {
    const ConvPlace at(i, in.channels, in.length);
    Acc of_sum = grad[of_grad.at(at.b, at.d, at.t)];
    if (in.silu) {
      const Acc sum = in.sum(at.b, at.d, at.t), gate = sigmoid_acc(sum);
      of_sum *= gate * (Acc(1) + sum * (Acc(1) - gate));
    }
    sums[i] = of_sum;
  }
}

// Gradients of positions [-(width - 1), L), which begin with the halo.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) causal_conv_inputs_kernel(
    ConvInput<Acc> in, const Acc* __restrict__ sums, Acc* __restrict__ grad_x, ConvStrides of_x,
    Acc* __restrict__ grad_halo, int64_t numel) {
  const int64_t whole = in.width - 1 + in.length;
  for (int64_t i = global_thread(); i < numel; i += num_threads()) {
    const ConvPlace at(i, in.channels, whole);
    const int64_t from = at.t - (in.width - 1), row = at.b * in.channels + at.d;
    const Acc* const taps = in.weight + at.d * in.width;
    Acc total = 0;
    for (int ahead = 0; ahead < in.width && from + ahead < in.length; ++ahead) {
      if (ahead > 0 && !in.goes_on(at.b, from + ahead)) {
        break;
      }
      if (from + ahead >= 0) {
        total += taps[in.width - 1 - ahead] * sums[row * in.length + from + ahead];
      }
    }
    if (from < 0) {
      grad_halo[row * (in.width - 1) + at.t] = total;
    } else {
      grad_x[of_x.at(at.b, at.d, from)] = total;
    }
  }
}

// One block for each channel and tap. Tap `width` is the bias.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) causal_conv_weights_kernel(
    ConvInput<Acc> in, const Acc* __restrict__ sums, Acc* __restrict__ grad_weight, Acc* __restrict__ grad_bias) {
  MOE_SHARED(Acc, of_warps, kThreads / kWarpSize);
  const int64_t d = blockIdx.x;
  const int tap = static_cast<int>(blockIdx.y), back = in.width - 1 - tap;
  Acc total = 0;
  for (int64_t i = threadIdx.x; i < in.batch * in.length; i += kThreads) {
    const int64_t b = i / in.length, t = i % in.length;
    bool seen = true;
    for (int step = 1; step <= back; ++step) {
      seen = seen && in.goes_on(b, t - step + 1);
    }
    if (seen) {
      const Acc of_sum = sums[(b * in.channels + d) * in.length + t];
      total += tap == in.width ? of_sum : of_sum * in.value(b, d, t - back);
    }
  }
  total = warp_sum(total);
  if (lane_id() == 0) {
    of_warps[warp_id()] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Acc all = 0;
    for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
      all += of_warps[warp];
    }
    if (tap < in.width) {
      grad_weight[d * in.width + tap] = all;
    } else {
      grad_bias[d] = all;
    }
  }
}

template <typename Acc>
void launch_causal_conv(const ConvInput<Acc>& in, Acc* out, const ConvStrides& of_out, cudaStream_t stream) {
  if (in.numel() > 0) {
    launch(over_threads(in.numel(), stream), causal_conv_kernel<Acc>, in, out, of_out, in.numel());
  }
}

template <typename Acc>
struct ConvGradients {
  const Acc* out;
  ConvStrides of_out;
  Acc* sums; // [B, D, L], scratch memory
  Acc* x;
  ConvStrides of_x;
  Acc *halo, *weight, *bias; // bias may be null
};

template <typename Acc>
void launch_causal_conv_backward(const ConvInput<Acc>& in, const ConvGradients<Acc>& grads, cudaStream_t stream) {
  const int64_t inputs = in.batch * in.channels * (in.width - 1 + in.length);
  if (in.numel() > 0) {
    launch(
        over_threads(in.numel(), stream), causal_conv_sums_kernel<Acc>, in, grads.out, grads.of_out, grads.sums,
        in.numel());
  }
  if (inputs > 0) {
    launch(
        over_threads(inputs, stream), causal_conv_inputs_kernel<Acc>, in, static_cast<const Acc*>(grads.sums), grads.x,
        grads.of_x, grads.halo, inputs);
  }
  if (in.channels > 0) {
    const int64_t rows = in.width + (grads.bias != nullptr);
    const Launch launch_on = {Dim3(in.channels, rows), Dim3(kThreads), 0, stream};
    launch(
        launch_on, causal_conv_weights_kernel<Acc>, in, static_cast<const Acc*>(grads.sums), grads.weight, grads.bias);
  }
}

} // namespace moe_ext::recurrence
