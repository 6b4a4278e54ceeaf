// What a parallel scan of segments collected, in the order of the elements whatever the number of threads. Host.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "compression/topk_tables.h"

namespace moe_ext::compression::topk {

inline int64_t num_segments(int64_t numel) {
  return (numel + kSegment - 1) / kSegment;
}

inline int64_t segment_size(int64_t segment, int64_t numel) {
  return std::min(kSegment, numel - segment * kSegment);
}

constexpr uint32_t kSignBit = 0x80000000u;

// Candidates of segment s are [begin[s], begin[s + 1]).
template <typename Acc>
struct Candidates {
  using Key = key_t<Acc>;
  std::vector<Key> keys;
  std::vector<uint32_t> offsets; // from the segment's first element; the top bit is the sign
  std::vector<Acc> velocities;   // empty where there are none
  std::vector<int64_t> begin;

  int64_t count() const {
    return static_cast<int64_t>(keys.size());
  }
  int64_t offset(int64_t i) const {
    return offsets[i] & ~kSignBit;
  }
  Acc value(int64_t i) const {
    constexpr int kShift = 8 * (sizeof(Key) - sizeof(uint32_t));
    return bit_cast<Acc>(keys[i] | static_cast<Key>(offsets[i] & kSignBit) << kShift);
  }
  void append(const Candidates& part) {
    keys.insert(keys.end(), part.keys.begin(), part.keys.end());
    offsets.insert(offsets.end(), part.offsets.begin(), part.offsets.end());
    velocities.insert(velocities.end(), part.velocities.begin(), part.velocities.end());
  }
};

// A thread's share of the segments, and what it has collected of them.
template <typename Acc>
struct Share {
  int64_t first; // segment
  Candidates<Acc> found;
  std::vector<key_t<Acc>> keys = std::vector<key_t<Acc>>(kSegmentBuffer); // of one segment
  std::vector<uint32_t> offsets = std::vector<uint32_t>(kSegmentBuffer);
  std::vector<Acc> values; // of a log
};

// Calls scan(segment, share) -> count for each segment, which appends what it counts, and joins the results. `expected`
// is about how many there will be.
template <typename Acc, typename F>
Candidates<Acc> collect(int64_t numel, int64_t expected, F&& scan) {
  const int64_t segments = num_segments(numel);
  std::vector<Candidates<Acc>> parts(segments); // by the first segment of a thread's share
  std::vector<int64_t> counts(segments);
  torch::stable::parallel_for(0, segments, 1, [&](int64_t first, int64_t last) {
    Share<Acc> share;
    share.first = first;
    const int64_t room = expected / segments * (last - first) + kSegment;
    share.found.keys.reserve(room);
    share.found.offsets.reserve(room);
    for (int64_t segment = first; segment < last; ++segment) {
      counts[segment] = scan(segment, share);
    }
    parts[first] = std::move(share.found);
  });
  Candidates<Acc> all;
  for (Candidates<Acc>& part : parts) {
    if (all.keys.empty()) {
      all = std::move(part);
    } else {
      all.append(part);
    }
  }
  all.begin.assign(segments + 1, 0);
  for (int64_t segment = 0; segment < segments; ++segment) {
    all.begin[segment + 1] = all.begin[segment] + counts[segment];
  }
  return all;
}

} // namespace moe_ext::compression::topk
