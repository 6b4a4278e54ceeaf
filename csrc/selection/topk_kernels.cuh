// Gradient selection in large scopes. A warp works on segments of 2048 elements.
// (1) A sample gives a bound that slightly more than k keys exceed; a given threshold takes its place. (2) One pass
// feeds the elements and sets aside those that reach the bound. Later kernels read a segment again if it found more
// than there is room for, and all segments if fewer than k were found. (3) A histogram per digit finds the smallest
// selected key. (4) Each segment counts its selected elements, the counts are summed, and the elements are written in
// order and taken out of the state. Only integers are added by atomics, so results are deterministic. No block waits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/block.cuh"
#include "common/scan.cuh"
#include "selection/topk_plan.cuh"

namespace moe_ext::topk {

// Resident blocks per multiprocessor. Left to itself, nvcc would spill registers to fit eight blocks.
constexpr int kWalkBlocks = 4;

__device__ __forceinline__ int64_t global_warp() {
  return int64_t{blockIdx.x} * kWarps + warp_id();
}

// Adds 1 to `bins[bin]` for each lane of a warp; -1 counts nothing. Neighbours are often equal (zeros), so a warp whose
// bins are all equal issues one atomic.
__device__ __forceinline__ void count_bin(int* bins, int bin) {
  const int first = __shfl_sync(kFullMask, bin, 0);
  if (__all_sync(kFullMask, bin == first)) {
    if (lane_id() == 0 && first >= 0) {
      atomicAdd(&bins[first], kWarpSize);
    }
  } else if (bin >= 0) {
    atomicAdd(&bins[bin], 1);
  }
}

// Has fill(bins) count in shared memory, and adds the counts to `histogram`. Every thread of the block must call it.
template <typename F>
__device__ __forceinline__ void block_histogram(unsigned long long* histogram, F&& fill) {
  MOE_SHARED(int, bins, kBins);
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    bins[bin] = 0;
  }
  __syncthreads();
  fill(bins);
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    if (bins[bin] != 0) {
      atomicAdd(&histogram[bin], static_cast<unsigned long long>(bins[bin]));
    }
  }
}

struct Digit {
  int bin;
  int64_t above; // keys in higher bins
};

// Finds the bin of the `wanted`-th largest key, and clears the histogram. Every thread of the block must call it.
__device__ __forceinline__ Digit find_digit(unsigned long long* histogram, int64_t wanted) {
  constexpr int kPerThread = kBins / kThreads;
  MOE_SHARED(int64_t, found, 2);
  int64_t here[kPerThread], sum = 0;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPerThread;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    here[j] = static_cast<int64_t>(histogram[top - j]);
    histogram[top - j] = 0;
    sum += here[j];
  }
  int64_t total = 0, above = block_exclusive_scan<kThreads>(sum, total);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (above < wanted && wanted <= above + here[j]) {
      found[0] = top - j;
      found[1] = above;
    }
    above += here[j];
  }
  __syncthreads();
  return {static_cast<int>(found[0]), found[1]};
}

template <bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(State<T> state, Plan plan, Scratch<T> scratch) {
  const int64_t scope = blockIdx.x / plan.blocks, begin = scope * plan.size;
  const int64_t sampled = plan.length(scope) / kSampledRun * kSampledLine;
  block_histogram(scratch.histogram + scope * kBins, [&](int* bins) {
    const int64_t stride = int64_t{plan.blocks} * kThreads;
    for (int64_t base = blockIdx.x % plan.blocks * int64_t{kThreads} + warp_id() * kWarpSize; base < sampled;
         base += stride) {
      const int64_t i = base + lane_id(), run = i / kSampledLine;
      int bin = -1;
      if (i < sampled) {
        const uint64_t hash = (static_cast<uint64_t>(run) + 1) * 0x9E3779B97F4A7C15u;
        const int64_t line = static_cast<int64_t>(hash >> 40) % (kSampledRun / kSampledLine);
        const int64_t at = begin + run * kSampledRun + line * kSampledLine + i % kSampledLine;
        bin = static_cast<int>(key_of(owed_after<kVelocity>(state, true, at)) >> kTopShift<key_t<acc_t<T>>>);
      }
      count_bin(bins, bin);
    }
  });
}

// Launched with one block per scope.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    begin_search_kernel(Plan plan, Thresholds<T> thresholds, Scratch<T> scratch) {
  using Key = key_t<acc_t<T>>;
  const int64_t scope = blockIdx.x, wanted = plan.wanted(scope);
  Key low = 1;
  if (wanted == 0 && !plan.by_threshold) {
    low = static_cast<Key>(-1);
  } else if (plan.by_threshold) {
    low = max(low, key_of(thresholds.bound[scope]));
  } else {
    const int64_t sampled = plan.length(scope) / kSampledRun * kSampledLine;
    const double expected =
        static_cast<double>(wanted) * static_cast<double>(sampled) / static_cast<double>(plan.length(scope));
    // Adds four standard deviations, as if all elements of a line were alike.
    const double rank = expected + 4 * root(expected * kSampledLine) + kSampledLine;
    if (rank < static_cast<double>(sampled)) {
      const Digit digit = find_digit(scratch.histogram + scope * kBins, static_cast<int64_t>(rank));
      low = max(low, static_cast<Key>(digit.bin) << kTopShift<Key>);
    }
  }
  // find_digit clears the histogram, but does not run if the rank is beyond the sample.
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    scratch.histogram[scope * kBins + bin] = 0;
  }
  if (threadIdx.x == 0) {
    scratch.search[scope] = {low, 0, wanted, 0};
  }
}

// Appends the elements that `mine` marks to `values` and `offsets`, in order, as long as there is room. Returns the
// number of marked elements in the warp.
template <int kSize, typename Acc>
__device__ __forceinline__ int set_aside(
    const Acc (&a)[kSize], unsigned mine, int offset, int count, Acc* values, uint16_t* offsets) {
  int below = 0, total = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const unsigned lanes = __ballot_sync(kFullMask, (mine >> j & 1u) != 0);
    below += __popc(lanes & lanes_below());
    total += __popc(lanes);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const int place = count + below;
    if ((mine >> j & 1u) != 0) {
      if (place < kSegmentFound) {
        values[place] = a[j];
        offsets[place] = static_cast<uint16_t>(offset + j);
      }
      ++below;
    }
  }
  return total;
}

template <bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads, kWalkBlocks) feed_kernel(State<T> state, Plan plan, Scratch<T> scratch) {
  using Acc = acc_t<T>;
  constexpr int kSize = kVec<T>;
  const bool write = !state.is_refused();
  for (int64_t s = global_warp(); s < plan.num_scopes * plan.segments; s += int64_t{gridDim.x} * kWarps) {
    const int64_t scope = s / plan.segments, begin = scope * plan.size + s % plan.segments * kWarpSegment;
    const int64_t end = min(begin + kWarpSegment, scope * plan.size + plan.length(scope));
    const auto low = scratch.search[scope].low;
    Acc* const values = scratch.values + s * kSegmentFound;
    uint16_t* const offsets = scratch.offsets + s * kSegmentFound;
    int count = 0;
    bool not_finite = false;
    for (int64_t base = begin; base < end; base += kWarpSize * kSize) {
      const int64_t i = base + lane_id() * kSize;
      Acc a[kSize];
      feed_vector<kVelocity>(state, i, end, write, a);
      not_finite = not_finite || any_not_finite<kSize>(a);
      unsigned mine = 0;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        // Elements beyond the end are 0 and never marked, because low is at least 1.
        mine |= static_cast<unsigned>(key_of(a[j]) >= low) << j;
      }
      if (__any_sync(kFullMask, mine != 0)) {
        count += set_aside<kSize>(a, mine, static_cast<int>(i - begin), count, values, offsets);
      }
    }
    state.note(not_finite);
    if (lane_id() == 0) {
      scratch.counts[s] = count;
      if (count > 0) {
        atomicAdd(&scratch.search[scope].found, static_cast<unsigned long long>(count));
      }
    }
  }
}

// Calls f(is_one, index, value) for the candidates of segment s, in order of lanes. All lanes call f equally often, so
// that f may use warp functions; `is_one` is false for a lane without a candidate.
template <bool kVelocity, typename T, typename F>
__device__ __forceinline__ void for_each_found(
    const State<T>& state, const Plan& plan, const Scratch<T>& scratch, bool refused, int64_t s, F&& f) {
  const int64_t scope = s / plan.segments, begin = scope * plan.size + s % plan.segments * kWarpSegment;
  const auto search = scratch.search[scope];
  const bool missed = static_cast<int64_t>(search.found) < plan.wanted(scope) && !plan.by_threshold;
  const auto least = missed ? 0 : search.low;
  const bool again = missed || scratch.counts[s] > kSegmentFound;
  const int64_t left = plan.length(scope) - s % plan.segments * kWarpSegment;
  const int size = again ? static_cast<int>(max(int64_t{0}, min(kWarpSegment, left))) : scratch.counts[s];
  for (int base = 0; base < size; base += kWarpSize) {
    const int i = base + lane_id();
    acc_t<T> value = 0;
    int64_t index = begin + i;
    bool is_one = i < size;
    if (is_one) {
      if (again) {
        value = owed_after<kVelocity>(state, refused, index);
      } else {
        value = scratch.values[s * kSegmentFound + i];
        index = begin + scratch.offsets[s * kSegmentFound + i];
      }
      is_one = key_of(value) >= least;
    }
    f(is_one, index, value);
  }
}

// Adds a histogram of the digit of `width` bits at `shift`, over the keys whose higher digits equal the found prefix.
template <bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads, kWalkBlocks)
    count_digits_kernel(State<T> state, Plan plan, Scratch<T> scratch, int shift, int width) {
  using Key = key_t<acc_t<T>>;
  const int64_t scope = blockIdx.x / plan.blocks;
  const Search<Key> search = scratch.search[scope];
  if (!needs_search(plan, search)) {
    return;
  }
  const bool refused = state.is_refused();
  const Key above = search.prefix >> shift >> width;
  block_histogram(scratch.histogram + scope * kBins, [&](int* bins) {
    for (int64_t s = blockIdx.x % plan.blocks * int64_t{kWarps} + warp_id(); s < plan.segments;
         s += int64_t{plan.blocks} * kWarps) {
      for_each_found<kVelocity>(
          state, plan, scratch, refused, scope * plan.segments + s, [&](bool is_one, int64_t, acc_t<T> value) {
            const Key digits = key_of(value) >> shift;
            int bin = is_one ? static_cast<int>(digits & ((Key{1} << width) - 1)) : -1;
            bin = digits >> width == above ? bin : -1;
            count_bin(bins, bin);
          });
    }
  });
}

// Launched with one block per scope.
template <typename T>
__global__ void __launch_bounds__(kThreads) find_digit_kernel(Plan plan, Scratch<T> scratch, int shift) {
  using Key = key_t<acc_t<T>>;
  const Search<Key> search = scratch.search[blockIdx.x];
  if (!needs_search(plan, search)) {
    return;
  }
  const Digit digit = find_digit(scratch.histogram + int64_t{blockIdx.x} * kBins, search.wanted);
  if (threadIdx.x == 0) {
    scratch.search[blockIdx.x].prefix = search.prefix | static_cast<Key>(digit.bin) << shift;
    scratch.search[blockIdx.x].wanted = search.wanted - digit.above;
  }
}

// Writes to places [num_scopes, 2, segments] how many keys of each segment are above the bound, and how many equal it.
template <bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads, kWalkBlocks)
    count_selected_kernel(State<T> state, Plan plan, Scratch<T> scratch) {
  const bool refused = state.is_refused();
  for (int64_t s = global_warp(); s < plan.num_scopes * plan.segments; s += int64_t{gridDim.x} * kWarps) {
    const int64_t scope = s / plan.segments;
    const auto bound = bound_of(plan, scratch.search[scope]);
    int64_t above = 0, equal = 0;
    for_each_found<kVelocity>(state, plan, scratch, refused, s, [&](bool is_one, int64_t, acc_t<T> value) {
      above += __popc(__ballot_sync(kFullMask, is_one && key_of(value) > bound.key));
      equal += __popc(__ballot_sync(kFullMask, is_one && key_of(value) == bound.key));
    });
    if (lane_id() == 0) {
      int64_t* const places = scratch.places + 2 * scope * plan.segments + s % plan.segments;
      places[0] = above;
      places[plan.segments] = equal;
    }
  }
}

// Writes a selected element to its place in the result, and takes it out of the state if `write` is set. Every lane of
// the warp must call it; lanes are in order of index.
template <bool kVelocity, typename T>
__device__ __forceinline__ void select_lane(
    const State<T>& state, Bound<key_t<acc_t<T>>> bound, bool write, bool is_one, int64_t index, acc_t<T> value,
    const Selected<T>& out, int64_t& above_before, int64_t& equal_before) {
  const auto key = key_of(value);
  const unsigned above = __ballot_sync(kFullMask, is_one && key > bound.key);
  const unsigned equal = __ballot_sync(kFullMask, is_one && key == bound.key);
  const int64_t ties = equal_before + __popc(equal & lanes_below());
  if (is_one && (key > bound.key || (key == bound.key && ties < bound.ties))) {
    const int64_t place = above_before + __popc(above & lanes_below()) + min(ties, bound.ties);
    out.values[place] = value;
    out.indices[place] = index;
    if (write) {
      take_out<kVelocity>(state, index);
    }
  }
  above_before += __popc(above);
  equal_before += __popc(equal);
}

template <bool kVelocity, typename T>
__global__ void __launch_bounds__(kThreads, kWalkBlocks)
    select_kernel(State<T> state, Plan plan, Scratch<T> scratch, Selected<T> out) {
  const bool refused = state.is_refused();
  for (int64_t s = global_warp(); s < plan.num_scopes * plan.segments; s += int64_t{gridDim.x} * kWarps) {
    const int64_t scope = s / plan.segments;
    const auto bound = bound_of(plan, scratch.search[scope]);
    const int64_t* const places = scratch.places + 2 * scope * plan.segments + s % plan.segments;
    int64_t above = places[0], equal = places[plan.segments];
    const Selected<T> to{out.values + scope * plan.k, out.indices + scope * plan.k};
    for_each_found<kVelocity>(state, plan, scratch, refused, s, [&](bool is_one, int64_t index, acc_t<T> value) {
      select_lane<kVelocity>(state, bound, !refused, is_one, index, value, to, above, equal);
    });
  }
}

// Fills unused slots with (0, index of the last element) and computes the next thresholds.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_threshold_kernel(State<T> state, Plan plan, Thresholds<T> thresholds, Scratch<T> scratch, Selected<T> out) {
  const int64_t scope = blockIdx.x / plan.blocks, thread = blockIdx.x % plan.blocks * int64_t{kThreads} + threadIdx.x;
  const int64_t found = static_cast<int64_t>(scratch.search[scope].found), count = min(found, plan.k);
  const int64_t last = scope * plan.size + plan.length(scope) - 1;
  for (int64_t i = count + thread; i < plan.k; i += int64_t{plan.blocks} * kThreads) {
    out.values[scope * plan.k + i] = 0;
    out.indices[scope * plan.k + i] = last;
  }
  if (thread == 0) {
    thresholds.count[scope] = count;
    if (thresholds.target > 0 && !state.is_refused_when_fed()) {
      thresholds.bound[scope] = adapted(thresholds.bound[scope], found, thresholds.target);
    }
  }
}

template <bool kVelocity, typename T>
void launch_select_large(
    const State<T>& state, const Plan& plan, const Thresholds<T>& thresholds, const Scratch<T>& scratch,
    const Selected<T>& out, cudaStream_t stream) {
  using Key = key_t<acc_t<T>>;
  const Launch per_scope{Dim3(plan.num_scopes), Dim3(kThreads), 0, stream};
  const Launch blocks{Dim3(plan.num_scopes * plan.blocks), Dim3(kThreads), 0, stream};
  const Dim3 grid =
      persistent_grid(ceil_div(plan.num_scopes * plan.segments, int64_t{kWarps}), kThreads, device_properties());
  const Launch per_segment{grid, Dim3(kThreads), 0, stream};
  if (!plan.by_threshold) {
    launch(blocks, sample_kernel<kVelocity, T>, state, plan, scratch);
  }
  launch(per_scope, begin_search_kernel<T>, plan, thresholds, scratch);
  launch(per_segment, feed_kernel<kVelocity, T>, state, plan, scratch);
  if (plan.k > 0) {
    for (int above = kKeyBits<Key>; above > 0;) {
      const int shift = std::max(0, above - kDigitBits);
      launch(blocks, count_digits_kernel<kVelocity, T>, state, plan, scratch, shift, above - shift);
      launch(per_scope, find_digit_kernel<T>, plan, scratch, shift);
      above = shift;
    }
    launch(per_segment, count_selected_kernel<kVelocity, T>, state, plan, scratch);
    launch_scan_counts(scratch.places, 2 * plan.num_scopes, plan.segments, nullptr, stream);
    launch(per_segment, select_kernel<kVelocity, T>, state, plan, scratch, out);
  }
  if (plan.by_threshold) {
    launch(blocks, finish_threshold_kernel<T>, state, plan, thresholds, scratch, out);
  }
}

} // namespace moe_ext::topk
