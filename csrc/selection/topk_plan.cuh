// Division of a selection on CUDA into segments, and the scratch memory of a call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "selection/feedback_kernels.cuh"
#include "selection/threshold_math.h"

namespace moe_ext::topk {

// Elements of the segment of a warp, and room for the elements that it sets aside.
constexpr int64_t kWarpSegment = 2048;
constexpr int kSegmentFound = 256;
// The sample holds kSampledLine elements of every kSampledRun. The place of a line in its run is hashed: a regular
// place could fall on the same columns of every row of a matrix.
constexpr int64_t kSampledRun = 2048;
constexpr int64_t kSampledLine = 16;
// Bits of a key that one histogram counts.
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;

template <typename Key>
constexpr int kKeyBits = 8 * static_cast<int>(sizeof(Key)) - 1;
template <typename Key>
constexpr int kTopShift = kKeyBits<Key> - kDigitBits;

// Division into scopes of `size` neighbouring elements (the last may be smaller), with at most k selected in each.
struct Plan {
  int64_t numel;
  int64_t size;
  int64_t num_scopes;
  int64_t k;
  bool by_threshold; // select elements above a threshold instead of the k largest
  int64_t segments;  // per scope
  int blocks;        // per scope, in the kernels that make histograms or fill slots

  __device__ __forceinline__ int64_t length(int64_t scope) const {
    return min(size, numel - scope * size);
  }
  __device__ __forceinline__ int64_t wanted(int64_t scope) const {
    return by_threshold ? k : min(k, length(scope));
  }
};

inline Plan make_plan(
    int64_t numel, int64_t size, int64_t num_scopes, int64_t k, bool by_threshold, const DeviceProperties& device) {
  const int64_t segments = ceil_div(size, kWarpSegment);
  const int64_t resident = int64_t{device.num_sms} * (device.max_threads_per_sm / kThreads);
  const int64_t blocks = std::clamp<int64_t>(
      resident / std::max<int64_t>(1, num_scopes), 1, std::max<int64_t>(1, ceil_div(segments, int64_t{kWarps})));
  return {numel, size, num_scopes, k, by_threshold, segments, static_cast<int>(blocks)};
}

template <typename T>
struct Selected {
  acc_t<T>* values; // [num_scopes, k]; for the k largest, a last scope of fewer than k elements has fewer slots
  int64_t* indices;
};

// Thresholds of a selection by threshold; null pointers otherwise.
template <typename T>
struct Thresholds {
  acc_t<T>* bound; // [num_scopes]
  int64_t* count;  // [num_scopes]
  int64_t target;
};

// Progress of the search for the smallest selected key of a scope.
template <typename Key>
struct Search {
  Key low;                  // bound of the feed: only keys from `low` on are set aside
  Key prefix;               // digits found so far
  int64_t wanted;           // rank of the key among the keys with that prefix
  unsigned long long found; // number of keys from `low` on
};

template <typename Key>
struct Bound {
  Key key;      // all keys above are selected
  int64_t ties; // number of selected keys equal to `key`
};

template <typename Key>
__device__ __forceinline__ bool needs_search(const Plan& plan, const Search<Key>& search) {
  return plan.k > 0 && !(plan.by_threshold && static_cast<int64_t>(search.found) <= plan.k);
}

template <typename Key>
__device__ __forceinline__ Bound<Key> bound_of(const Plan& plan, const Search<Key>& search) {
  if (needs_search(plan, search)) {
    return {search.prefix, search.wanted};
  }
  return {plan.k == 0 ? static_cast<Key>(-1) : search.low - 1, 0};
}

template <typename T>
struct Scratch {
  using Key = key_t<acc_t<T>>;
  Search<Key>* search;           // [num_scopes]
  unsigned long long* histogram; // [num_scopes, kBins]; `search` and `histogram` must begin as zeros
  int64_t* places;               // [num_scopes, 2, segments]
  acc_t<T>* values;              // [num_scopes, segments, kSegmentFound]
  int* counts;                   // [num_scopes, segments]
  uint16_t* offsets;             // [num_scopes, segments, kSegmentFound]
};

// Bytes of scratch memory that must begin as zeros, and bytes of other scratch memory.
struct ScratchBytes {
  int64_t zeroed;
  int64_t other;
};

template <typename T>
ScratchBytes scratch_bytes(const Plan& plan) {
  const int64_t segments = plan.num_scopes * plan.segments;
  const int64_t found = static_cast<int64_t>(sizeof(acc_t<T>) + sizeof(uint16_t)) * kSegmentFound;
  return {
      plan.num_scopes * static_cast<int64_t>(sizeof(Search<key_t<acc_t<T>>>) + sizeof(int64_t) * kBins),
      segments * (2 * static_cast<int64_t>(sizeof(int64_t)) + found + static_cast<int64_t>(sizeof(int)))};
}

template <typename T>
Scratch<T> scratch_of(const Plan& plan, void* zeroed, void* other) {
  const int64_t segments = plan.num_scopes * plan.segments;
  Scratch<T> scratch{};
  scratch.histogram = static_cast<unsigned long long*>(zeroed);
  scratch.search = reinterpret_cast<Search<key_t<acc_t<T>>>*>(scratch.histogram + plan.num_scopes * kBins);
  scratch.places = static_cast<int64_t*>(other);
  scratch.values = reinterpret_cast<acc_t<T>*>(scratch.places + 2 * segments);
  scratch.counts = reinterpret_cast<int*>(scratch.values + segments * kSegmentFound);
  scratch.offsets = reinterpret_cast<uint16_t*>(scratch.counts + segments);
  return scratch;
}

} // namespace moe_ext::topk
