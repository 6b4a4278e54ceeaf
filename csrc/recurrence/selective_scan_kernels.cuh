// Kernels of the selective scan. Lanes of a warp hold the elements of a head's state, and process positions one after
// the other. The backward pass processes kKeptEvery positions at a time from the state kept before them. Gradients of B
// and C stay in shared memory until all heads of a block have added theirs, and are then summed once, without atomics.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/warp.cuh"
#include "recurrence/decay_math.h"

namespace moe_ext::recurrence {

// Positions between two states that the forward pass keeps.
constexpr int kKeptEvery = 64;
constexpr int kScanThreads = 128;
constexpr int kMostPerLane = 4;

// Strides, in elements, of rows of the batch, heads and positions.
struct ScanStrides {
  int64_t batch, head, position;
};

template <typename Acc>
struct ScanInput {
  const Acc *x, *dt;
  ScanStrides of_x, of_dt;
  const Acc* a;             // [H, K]
  const Acc *b, *c;         // [B, G, L, K]
  const int64_t* documents; // [1 or B, L], or null
  int64_t documents_stride; // 0 if one row serves the whole batch
  int64_t batch, groups, heads, length, dim;

  __device__ __forceinline__ bool is_fresh(int64_t row, int64_t t) const {
    const int64_t* const numbers = documents + row * documents_stride;
    return documents != nullptr && t > 0 && numbers[t] != numbers[t - 1];
  }
};

// Number of lanes of a head, a power of two, and number of elements of each lane.
struct ScanPlan {
  int width, per_lane;
};

inline ScanPlan plan_scan(int64_t dim) {
  ScanPlan plan = {1, 1};
  while (plan.width < kWarpSize && plan.width < dim) {
    plan.width *= 2;
  }
  while (plan.width * plan.per_lane < dim) {
    plan.per_lane *= 2;
  }
  return plan;
}

// Sum over the lanes of a head. Every lane of the warp must call it.
template <typename Acc>
__device__ __forceinline__ Acc head_sum(Acc value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// out [B, H, L] with the strides of x; last [B, H, K]; states [B, H, N, K].
template <int kPer, typename Acc>
__global__ void __launch_bounds__(kScanThreads) selective_scan_kernel(
    ScanInput<Acc> in, int width, const Acc* __restrict__ state, Acc* __restrict__ out, ScanStrides of_out,
    Acc* __restrict__ last, Acc* __restrict__ states) {
  const int64_t all = in.batch * in.heads;
  const int64_t place = int64_t{blockIdx.x} * (kScanThreads / width) + static_cast<int>(threadIdx.x) / width;
  const bool real = place < all;
  const int64_t at = real ? place : all - 1;
  const int64_t row = at / in.heads, head = at % in.heads;
  const int64_t group = row * in.groups + head / (in.heads / in.groups);
  const int lane = static_cast<int>(threadIdx.x) % width;
  const int64_t chunks = (in.length + kKeptEvery - 1) / kKeptEvery;
  Acc s[kPer], rate[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t k = lane + i * width;
    s[i] = k < in.dim ? state[at * in.dim + k] : Acc(0);
    rate[i] = k < in.dim ? in.a[head * in.dim + k] : Acc(0);
  }
  for (int64_t t = 0; t < in.length; ++t) {
    if (t % kKeptEvery == 0) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int64_t k = lane + i * width;
        if (real && k < in.dim) {
          states[(at * chunks + t / kKeptEvery) * in.dim + k] = s[i];
        }
      }
    }
    const bool fresh = in.is_fresh(row, t);
    const Acc dt = in.dt[row * in.of_dt.batch + head * in.of_dt.head + t * in.of_dt.position];
    const Acc taken = dt * in.x[row * in.of_x.batch + head * in.of_x.head + t * in.of_x.position];
    Acc y = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int64_t k = lane + i * width;
      if (k < in.dim) {
        const int64_t shared = (group * in.length + t) * in.dim + k;
        s[i] = (fresh ? Acc(0) : decay_of(dt * rate[i]) * s[i]) + taken * in.b[shared];
        y += in.c[shared] * s[i];
      }
    }
    y = head_sum(y, width);
    if (real && lane == 0) {
      out[row * of_out.batch + head * of_out.head + t * of_out.position] = y;
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t k = lane + i * width;
    if (real && k < in.dim) {
      last[at * in.dim + k] = s[i];
    }
  }
}

template <typename Acc>
struct ScanGradients {
  const Acc* out; // gradient of y
  ScanStrides of_out;
  const Acc* states; // [B, H, N, K]
  Acc *x, *dt;
  ScanStrides of_x, of_dt;
  Acc* state; // [B, H, K]: gradient of the last state, then of the first
  Acc* a;     // [B, H, K], zeros at first
  Acc *b, *c; // [parts, B, G, L, K]
};

// A block processes part blockIdx.y of the heads of a group. blockIdx.x counts the groups of all rows of the batch.
template <int kPer, typename Acc>
__global__ void __launch_bounds__(kScanThreads)
    selective_scan_backward_kernel(ScanInput<Acc> in, int width, int stretch, ScanGradients<Acc> grads) {
  MOE_DYNAMIC_SHARED(Acc, memory);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int columns = threads * kPer, sets = threads / width, lane = thread % width;
  // `before`, `of_b` and `of_c` are [stretch][columns]: states before positions, and gradients of B and C. A thread
  // owns its columns.
  Acc* const before = memory;
  Acc* const of_b = memory + stretch * columns;
  Acc* const of_c = of_b + stretch * columns;
  const int64_t place = blockIdx.x, row = place / in.groups, group = place % in.groups;
  const int64_t per_group = in.heads / in.groups, part = blockIdx.y, parts = gridDim.y;
  const int64_t first = group * per_group + per_group * part / parts;
  const int64_t end = group * per_group + per_group * (part + 1) / parts;
  const int64_t chunks = (in.length + kKeptEvery - 1) / kKeptEvery;
  for (int64_t begin = (in.length - 1) / stretch * stretch; in.length > 0 && begin >= 0; begin -= stretch) {
    const int64_t chunk = begin / kKeptEvery;
    const int n = static_cast<int>(std::min<int64_t>(stretch, in.length - begin));
    const int skipped = static_cast<int>(begin - chunk * kKeptEvery);
    for (int t = 0; t < n; ++t) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        of_b[t * columns + thread + i * threads] = 0;
        of_c[t * columns + thread + i * threads] = 0;
      }
    }
    for (int64_t set = first; set < end; set += sets) {
      // Lanes without a head use the last head and write nothing, because all lanes of a warp must take part in
      // shuffles.
      const int64_t mine = set + thread / width;
      const bool real = mine < end;
      const int64_t head = real ? mine : end - 1, at = row * in.heads + head;
      Acc s[kPer], rate[kPer], of_state[kPer], of_rate[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int64_t k = lane + i * width;
        const bool has = k < in.dim;
        rate[i] = has ? in.a[head * in.dim + k] : Acc(0);
        s[i] = has ? grads.states[(at * chunks + chunk) * in.dim + k] : Acc(0);
        of_state[i] = has && real ? grads.state[at * in.dim + k] : Acc(0);
        of_rate[i] = has && real ? grads.a[at * in.dim + k] : Acc(0);
      }
      const Acc* const x = in.x + row * in.of_x.batch + head * in.of_x.head + begin * in.of_x.position;
      const Acc* const dt = in.dt + row * in.of_dt.batch + head * in.of_dt.head + begin * in.of_dt.position;
      const int64_t shared = (place * in.length + begin) * in.dim;
      // Starts from the kept state. Positions between it and the stretch (`skipped`) are recomputed.
      for (int t = -skipped; t < n; ++t) {
        const bool fresh = in.is_fresh(row, begin + t);
        const Acc step = dt[t * in.of_dt.position], taken = step * x[t * in.of_x.position];
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const int64_t k = lane + i * width;
          s[i] = fresh ? Acc(0) : s[i];
          if (t >= 0) {
            before[t * columns + thread + i * threads] = s[i];
          }
          if (k < in.dim) {
            s[i] = decay_of(step * rate[i]) * s[i] + taken * in.b[shared + t * in.dim + k];
          }
        }
      }
      const Acc* const dy =
          grads.out + row * grads.of_out.batch + head * grads.of_out.head + begin * grads.of_out.position;
      for (int t = n - 1; t >= 0; --t) {
        const bool fresh = in.is_fresh(row, begin + t);
        const Acc value = x[t * in.of_x.position], step = dt[t * in.of_dt.position], taken = step * value;
        const Acc of_y = real ? dy[t * grads.of_out.position] : Acc(0);
        Acc of_taken = 0, of_step = 0;
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          const int64_t k = lane + i * width;
          if (k < in.dim) {
            const int column = t * columns + thread + i * threads;
            const Acc b = in.b[shared + t * in.dim + k], c = in.c[shared + t * in.dim + k];
            const Acc decay = decay_of(step * rate[i]), kept = decay * before[column];
            const Acc grad = of_state[i] + c * of_y;
            of_c[column] += of_y * (kept + taken * b);
            of_b[column] += grad * taken;
            of_taken += grad * b;
            const Acc of_log = grad * kept;
            of_rate[i] += of_log * step;
            of_step += of_log * rate[i];
            of_state[i] = fresh ? Acc(0) : grad * decay;
          }
        }
        of_taken = head_sum(of_taken, width);
        of_step = head_sum(of_step, width);
        if (real && lane == 0) {
          const int64_t t_all = begin + t;
          grads.x[row * grads.of_x.batch + head * grads.of_x.head + t_all * grads.of_x.position] = step * of_taken;
          grads.dt[row * grads.of_dt.batch + head * grads.of_dt.head + t_all * grads.of_dt.position] =
              value * of_taken + of_step;
        }
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int64_t k = lane + i * width;
        if (real && k < in.dim) {
          grads.state[at * in.dim + k] = of_state[i];
          grads.a[at * in.dim + k] = of_rate[i];
        }
      }
    }
    __syncthreads();
    for (int64_t element = thread; element < n * in.dim; element += threads) {
      const int t = static_cast<int>(element / in.dim), k = static_cast<int>(element % in.dim);
      Acc sum_b = 0, sum_c = 0;
      for (int set = 0; set < sets; ++set) {
        const int column = t * columns + set * width + k % width + k / width * threads;
        sum_b += of_b[column];
        sum_c += of_c[column];
      }
      const int64_t to = ((part * in.batch * in.groups + place) * in.length + begin) * in.dim + element;
      grads.b[to] = sum_b;
      grads.c[to] = sum_c;
    }
    // The next iteration overwrites `of_b` and `of_c`, which all threads read above.
    __syncthreads();
  }
}

template <typename Acc, typename F>
void with_elements_per_lane(const ScanPlan& plan, const F& f) {
  switch (plan.per_lane) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    default:
      return f.template operator()<kMostPerLane>();
  }
}

template <typename Acc>
void launch_selective_scan(
    const ScanInput<Acc>& in, const Acc* state, Acc* out, const ScanStrides& of_out, Acc* last, Acc* states,
    cudaStream_t stream) {
  const int64_t all = in.batch * in.heads;
  if (all == 0) {
    return;
  }
  const ScanPlan plan = plan_scan(in.dim);
  const int64_t blocks = ceil_div(all, int64_t{kScanThreads / plan.width});
  const Launch launch_on = {Dim3(blocks), Dim3(kScanThreads), 0, stream};
  with_elements_per_lane<Acc>(plan, [&]<int kPer>() {
    launch(launch_on, selective_scan_kernel<kPer, Acc>, in, plan.width, state, out, of_out, last, states);
  });
}

// Number of parts into which the heads of a group are split, so that few groups still occupy the device.
inline int64_t scan_parts(int64_t groups_of_all_rows, int64_t per_group, int64_t dim) {
  const int64_t sets = ceil_div(per_group, int64_t{kScanThreads / plan_scan(dim).width});
  return std::clamp<int64_t>(
      ceil_div(int64_t{256}, std::max<int64_t>(1, groups_of_all_rows)), 1, std::max<int64_t>(1, sets));
}

template <typename Acc>
void launch_selective_scan_backward(
    const ScanInput<Acc>& in, const ScanGradients<Acc>& grads, int64_t parts, cudaStream_t stream) {
  if (in.batch * in.heads == 0) {
    return;
  }
  const ScanPlan plan = plan_scan(in.dim);
  const int threads = std::max<int>(kWarpSize, kScanThreads * 4 / static_cast<int>(sizeof(Acc)) / plan.per_lane);
  // A stretch is halved if it would need more than 96 KiB of shared memory.
  const size_t row_bytes = size_t{3} * threads * plan.per_lane * sizeof(Acc);
  const int stretch = row_bytes * kKeptEvery > (size_t{96} << 10) ? kKeptEvery / 2 : kKeptEvery;
  const Dim3 grid(in.batch * in.groups, parts);
  const Launch launch_on = {grid, Dim3(threads), row_bytes * stretch, stream};
  with_elements_per_lane<Acc>(plan, [&]<int kPer>() {
    launch(launch_on, selective_scan_backward_kernel<kPer, Acc>, in, plan.width, stretch, grads);
  });
}

} // namespace moe_ext::recurrence
