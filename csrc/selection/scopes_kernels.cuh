// Gradient selection in many small scopes. For up to 512 elements, a warp keeps the scope in its registers and finds
// the smallest selected key bit by bit. For up to 8192, a block finds that key digit by digit and rereads the scope
// from cache.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/select.cuh"
#include "selection/topk_kernels.cuh"

namespace moe_ext::topk {

constexpr int64_t kWarpScope = 512;
constexpr int64_t kBlockScope = 8192;
static_assert(kThreads == kSelectThreads);
// Resident blocks per multiprocessor. Without these bounds nvcc spills registers to fit more blocks.
constexpr int kAdaptBlocks = 4;
constexpr int kBlockScopeBlocks = 3;
constexpr int kWarpScopeBlocks = 2;

// Bound of a scope in which `found` keys reach `low`. A selection by threshold calls `search` only if more than
// `wanted` keys passed.
template <typename Key, typename F>
__device__ __forceinline__ Bound<Key> scope_bound(
    const Plan& plan, int64_t wanted, Key low, int64_t found, F&& search) {
  if (wanted == 0) {
    return {static_cast<Key>(-1), 0};
  }
  return plan.by_threshold && found <= wanted ? Bound<Key>{low - 1, 0} : search();
}

template <typename T>
__device__ __forceinline__ key_t<acc_t<T>> lowest_key(
    const Plan& plan, const Thresholds<T>& thresholds, int64_t scope) {
  return plan.by_threshold ? max(key_t<acc_t<T>>{1}, key_of(thresholds.bound[scope])) : 0;
}

// Fills the unused slots of a scope and stores the number of elements that passed the threshold, for adapt_kernel.
// Called by `size` threads, of which the caller is number `thread`.
template <typename T>
__device__ __forceinline__ void finish_scope(
    const Plan& plan, const Thresholds<T>& thresholds, int64_t scope, int64_t found, int thread, int size,
    const Selected<T>& out) {
  if (!plan.by_threshold) {
    return;
  }
  const int64_t count = min(found, plan.k), last = scope * plan.size + plan.length(scope) - 1;
  for (int64_t i = count + thread; i < plan.k; i += size) {
    out.values[scope * plan.k + i] = 0;
    out.indices[scope * plan.k + i] = last;
  }
  if (thread == 0) {
    thresholds.count[scope] = found;
  }
}

// Turns `count` from the number that passed into the number taken, and computes the next thresholds. A kernel of its
// own, because no threshold may change if any scope holds an element that is not finite.
template <typename T>
__global__ void __launch_bounds__(kThreads, kAdaptBlocks)
    adapt_kernel(State<T> state, Plan plan, Thresholds<T> thresholds) {
  const bool adapts = thresholds.target > 0 && !state.is_refused_when_fed();
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t scope = int64_t{blockIdx.x} * kThreads + threadIdx.x; scope < plan.num_scopes; scope += stride) {
    const int64_t found = thresholds.count[scope];
    thresholds.count[scope] = min(found, plan.k);
    if (adapts) {
      thresholds.bound[scope] = adapted(thresholds.bound[scope], found, thresholds.target);
    }
  }
}

// Number of elements of a warp's scope whose keys are at least `low`. Lanes beyond the scope do not count.
template <int kItems, typename Acc>
__device__ __forceinline__ int count_from(const Acc (&a)[kItems], key_t<Acc> low, int size) {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    count += __popc(__ballot_sync(kFullMask, j * kWarpSize + lane_id() < size && key_of(a[j]) >= low));
  }
  return count;
}

// Selects in scopes of up to 32 kItems elements, one warp per scope.
template <int kItems, bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads, kWarpScopeBlocks)
    warp_scopes_kernel(State<T> state, Plan plan, Thresholds<T> thresholds, Selected<T> out) {
  using Acc = acc_t<T>;
  using Key = key_t<Acc>;
  const bool write = !state.is_refused();
  for (int64_t scope = global_warp(); scope < plan.num_scopes; scope += int64_t{gridDim.x} * kWarps) {
    const int64_t begin = scope * plan.size, wanted = plan.wanted(scope);
    const int size = static_cast<int>(plan.length(scope));
    Acc a[kItems];
    bool not_finite = false;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int64_t i = begin + j * kWarpSize + lane_id();
      a[j] = 0;
      if (j * kWarpSize + lane_id() < size) {
        const Acc u = momentum_of<kVelocity>(state.args, i);
        a[j] = owed(state.args, u, i);
        not_finite = not_finite || key_of(a[j]) >= kInfinityKey<Acc>;
        if (write) {
          state.args.residual[i] = a[j];
          if constexpr (kVelocity) {
            state.args.velocity[i] = u;
          }
        }
      }
    }
    state.note(not_finite);
    const Key low = lowest_key(plan, thresholds, scope);
    const int found = count_from(a, low, size);
    const Bound<Key> bound = scope_bound(plan, wanted, low, found, [&] {
      Key prefix = 0;
      for (int bit = kKeyBits<Key> - 1; bit >= 0; --bit) {
        const Key with = prefix | Key{1} << bit;
        prefix = count_from(a, with, size) >= wanted ? with : prefix;
      }
      return Bound<Key>{prefix, wanted - count_from(a, static_cast<Key>(prefix + 1), size)};
    });
    const Selected<T> to{out.values + scope * plan.k, out.indices + scope * plan.k};
    int64_t above = 0, equal = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = j * kWarpSize + lane_id();
      select_lane<kVelocity>(state, bound, write, i < size, begin + i, a[j], to, above, equal);
    }
    finish_scope(plan, thresholds, scope, found, lane_id(), kWarpSize, out);
  }
}

// Launched with one block per scope.
template <bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads, kBlockScopeBlocks)
    block_scopes_kernel(State<T> state, Plan plan, Thresholds<T> thresholds, Selected<T> out) {
  using Acc = acc_t<T>;
  using Key = key_t<Acc>;
  constexpr int kSize = kVec<T>;
  const bool write = !state.is_refused();
  const int64_t scope = blockIdx.x, begin = scope * plan.size, size = plan.length(scope), wanted = plan.wanted(scope);
  const Key low = lowest_key(plan, thresholds, scope);
  int reached = 0, found = 0;
  bool not_finite = false;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kSize; i < size; i += kThreads * kSize) {
    Acc a[kSize];
    feed_vector<kVelocity>(state, begin + i, begin + size, write, a);
    not_finite = not_finite || any_not_finite<kSize>(a);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      // Zeros beyond the end count if low is 0, which happens only without a threshold; `found` is not used then.
      reached += key_of(a[j]) >= low;
    }
  }
  state.note(not_finite);
  block_exclusive_scan<kThreads>(reached, found);
  const auto value_at = [&](int64_t i) { return owed_after<kVelocity>(state, !write, begin + i); };
  const Bound<Key> bound = scope_bound(plan, wanted, low, found, [&] {
    Bound<Key> searched{};
    searched.key = block_select<Key>([&](int64_t i) { return key_of(value_at(i)); }, size, wanted, searched.ties);
    return searched;
  });
  const Selected<T> to{out.values + scope * plan.k, out.indices + scope * plan.k};
  int64_t above_before = 0, equal_before = 0;
  for (int64_t base = 0; base < size; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const Acc value = i < size ? value_at(i) : Acc(0);
    // One scan sums both counts: `above` in the low 16 bits, `equal` in the high 16 bits.
    constexpr int kAbove = 1, kEqual = 1 << 16;
    const int mine = i >= size ? 0 : key_of(value) > bound.key ? kAbove : key_of(value) == bound.key ? kEqual : 0;
    int total = 0;
    const int below = block_exclusive_scan<kThreads>(mine, total);
    const int64_t ties = equal_before + (below >> 16);
    if (mine == kAbove || (mine == kEqual && ties < bound.ties)) {
      const int64_t place = above_before + (below & 0xFFFF) + min(ties, bound.ties);
      to.values[place] = value;
      to.indices[place] = begin + i;
      if (write) {
        take_out<kVelocity>(state, begin + i);
      }
    }
    above_before += total & 0xFFFF;
    equal_before += total >> 16;
  }
  finish_scope(plan, thresholds, scope, found, static_cast<int>(threadIdx.x), kThreads, out);
}

template <bool kVelocity, typename T>
void launch_select_small(
    const State<T>& state, const Plan& plan, const Thresholds<T>& thresholds, const Selected<T>& out,
    cudaStream_t stream) {
  if (plan.size > kWarpScope) {
    launch(
        {Dim3(plan.num_scopes), Dim3(kThreads), 0, stream}, block_scopes_kernel<kVelocity, T>, state, plan, thresholds,
        out);
  } else {
    const auto kernel =
        plan.size <= 4 * kWarpSize ? warp_scopes_kernel<4, kVelocity, T> : warp_scopes_kernel<16, kVelocity, T>;
    const Dim3 grid = persistent_grid(ceil_div(plan.num_scopes, int64_t{kWarps}), kThreads, device_properties());
    launch({grid, Dim3(kThreads), 0, stream}, kernel, state, plan, thresholds, out);
  }
  if (plan.by_threshold) {
    const Dim3 grid = persistent_grid(ceil_div(plan.num_scopes, int64_t{kThreads}), kThreads, device_properties());
    launch({grid, Dim3(kThreads), 0, stream}, adapt_kernel<T>, state, plan, thresholds);
  }
}

template <bool kVelocity, typename T>
void launch_select(
    const State<T>& state, const Plan& plan, const Thresholds<T>& thresholds, const Scratch<T>& scratch,
    const Selected<T>& out, cudaStream_t stream) {
  if (plan.size <= kBlockScope) {
    launch_select_small<kVelocity>(state, plan, thresholds, out, stream);
  } else {
    launch_select_large<kVelocity>(state, plan, thresholds, scratch, out, stream);
  }
}

} // namespace moe_ext::topk
