// Error feedback on a device: access to gradient, residual and velocity for all kernels of the gradient selection.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/feedback_math.h"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "common/warp.cuh"

namespace moe_ext::topk {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// Elements of the residual in one access of 16 bytes.
template <typename T>
constexpr int kVec = kAccessBytes / static_cast<int>(sizeof(acc_t<T>));

// The state of a call. `refused` is null if the call does not check; otherwise `*refused` becomes non-zero if an
// element is not finite. A call in place sets `*refused` by a kernel before the feed, because a refused call must
// change neither residual nor velocity. A call with `residual_in` sets it while feeding.
template <typename T>
struct State {
  Feedback<T> args;
  int* refused;
  bool aligned; // every vector of kVec elements can be loaded and stored whole
  bool traps;   // trap if an element that is being fed is not finite

  // True if the feed must not write. Valid before the feed.
  __device__ __forceinline__ bool is_refused() const {
    return args.in_place() && is_refused_when_fed();
  }
  // True if an element is not finite. Valid after the feed.
  __device__ __forceinline__ bool is_refused_when_fed() const {
    return refused != nullptr && *refused != 0;
  }
  __device__ __forceinline__ void note(bool not_finite) const {
    if (not_finite && refused != nullptr && !args.in_place()) {
      if (traps) {
        __trap();
      }
      atomicMax(refused, 1);
    }
  }
};

template <int kSize, typename Acc>
__device__ __forceinline__ bool any_not_finite(const Acc (&a)[kSize]) {
  bool found = false;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    found = found || key_of(a[j]) >= kInfinityKey<Acc>;
  }
  return found;
}

// Returns true if all arrays are aligned for whole vectors at the beginning of every scope.
template <typename T>
bool vectors_fit(const Feedback<T>& args, int64_t scope_size, int64_t num_scopes) {
  constexpr int64_t kGradBytes = sizeof(T) * kVec<T>;
  return (num_scopes == 1 || scope_size % kVec<T> == 0) && is_aligned(args.grad, kGradBytes) &&
         is_aligned(args.residual_in, kAccessBytes) && is_aligned(args.velocity_in, kAccessBytes) &&
         is_aligned(args.residual, kAccessBytes) && is_aligned(args.velocity, kAccessBytes);
}

// Computes a = residual_scale e + u for kVec elements from i on, with zeros from `end` on. If `write` is set, also
// writes a to the residual and u to the velocity.
template <bool kVelocity, typename T>
__device__ __forceinline__ void feed_vector(
    const State<T>& state, int64_t i, int64_t end, bool write, acc_t<T> (&a)[kVec<T>]) {
  using Acc = acc_t<T>;
  constexpr int kSize = kVec<T>;
  const Feedback<T>& args = state.args;
  if (state.aligned && i + kSize <= end) {
    const Vec<T, kSize> grad = load<kSize>(args.grad + i);
    Vec<Acc, kSize> residual = load<kSize>(args.residual_in + i), velocity = {};
    if constexpr (kVelocity) {
      velocity = load<kSize>(args.velocity_in + i);
    }
    const Feedback<T> here{grad.v, residual.v, velocity.v, nullptr, nullptr, args.residual_scale, args.momentum};
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      velocity.v[j] = momentum_of<kVelocity>(here, j);
      a[j] = residual.v[j] = owed(here, velocity.v[j], j);
    }
    if (write) {
      store(args.residual + i, residual);
      if constexpr (kVelocity) {
        store(args.velocity + i, velocity);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    a[j] = 0;
    if (i + j < end) {
      const Acc u = momentum_of<kVelocity>(args, i + j);
      a[j] = owed(args, u, i + j);
      if (write) {
        args.residual[i + j] = a[j];
        if constexpr (kVelocity) {
          args.velocity[i + j] = u;
        }
      }
    }
  }
}

// Returns a of element i: computed again if `refused`, otherwise read from the residual, which has been fed.
template <bool kVelocity, typename T>
__device__ __forceinline__ acc_t<T> owed_after(const State<T>& state, bool refused, int64_t i) {
  if (refused) {
    return owed(state.args, momentum_of<kVelocity>(state.args, i), i);
  }
  return state.args.residual[i];
}

template <bool kVelocity, typename T>
__device__ __forceinline__ void take_out(const State<T>& state, int64_t i) {
  state.args.residual[i] = 0;
  if constexpr (kVelocity) {
    state.args.velocity[i] = 0;
  }
}

// Sets *refused to 1 if an element is not finite; with kCheck, traps instead.
template <bool kVelocity, bool kCheck, typename T>
__global__ void __launch_bounds__(kThreads)
    check_finite_kernel(State<T> state, int64_t numel, int* __restrict__ refused) {
  using Acc = acc_t<T>;
  bool found = false;
  const int64_t stride = int64_t{gridDim.x} * kThreads * kVec<T>;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec<T>; i < numel; i += stride) {
    Acc a[kVec<T>];
    feed_vector<kVelocity>(state, i, numel, false, a);
    found = found || any_not_finite<kVec<T>>(a);
  }
  if (found) {
    if constexpr (kCheck) {
      __trap();
    }
    atomicMax(refused, 1);
  }
}

template <bool kVelocity, bool kCheck, typename T>
void launch_check_finite(const State<T>& state, int64_t numel, int* refused, cudaStream_t stream) {
  const Dim3 grid = persistent_grid(ceil_div(numel, int64_t{kThreads} * kVec<T>), kThreads, device_properties());
  launch({grid, Dim3(kThreads), 0, stream}, check_finite_kernel<kVelocity, kCheck, T>, state, numel, refused);
}

} // namespace moe_ext::topk
