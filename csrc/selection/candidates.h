// Candidates that a parallel scan of segments collects, in order of index for any number of threads. Host code.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "selection/topk_tables.h"

namespace moe_ext::topk {

inline int64_t num_segments(int64_t numel) {
  return (numel + kSegment - 1) / kSegment;
}

inline int64_t segment_size(int64_t segment, int64_t numel) {
  return std::min(kSegment, numel - segment * kSegment);
}

// Value of a candidate that was taken out of the state. The key holds the magnitude, the top bit of `offset` the sign.
template <typename Acc>
Acc signed_value(key_t<Acc> key, uint32_t offset) {
  constexpr int kShift = 8 * (sizeof(Acc) - sizeof(uint32_t));
  return bit_cast<Acc>(key | static_cast<key_t<Acc>>(offset & kSignBit) << kShift);
}

// Candidates of all segments; those of segment s have the numbers [begin[s], begin[s + 1]).
template <typename Acc>
struct Candidates {
  using Key = key_t<Acc>;
  std::vector<Key> keys;
  std::vector<uint32_t> offsets; // from the segment's first element; the top bit is the sign of the value
  std::vector<Acc> velocities;   // empty without velocity
  std::vector<int64_t> begin;

  int64_t count() const {
    return static_cast<int64_t>(keys.size());
  }
  int64_t offset(int64_t i) const {
    return offsets[i] & ~kSignBit;
  }
  Acc value(int64_t i) const {
    return signed_value<Acc>(keys[i], offsets[i]);
  }
  // Pointers to the candidates from the i-th on.
  Found<Acc> from(int64_t i) {
    return {keys.data() + i, offsets.data() + i, velocities.empty() ? nullptr : velocities.data() + i};
  }
  void append(const Found<Acc>& part, int64_t count) {
    keys.insert(keys.end(), part.keys, part.keys + count);
    offsets.insert(offsets.end(), part.offsets, part.offsets + count);
    if (part.velocities != nullptr) {
      velocities.insert(velocities.end(), part.velocities, part.velocities + count);
    }
  }
  void append(const Candidates& part) {
    keys.insert(keys.end(), part.keys.begin(), part.keys.end());
    offsets.insert(offsets.end(), part.offsets.begin(), part.offsets.end());
    velocities.insert(velocities.end(), part.velocities.begin(), part.velocities.end());
  }
};

// Buffers with room for all candidates of a scan of n elements.
template <typename Acc>
struct ScanBuffer {
  std::vector<key_t<Acc>> keys;
  std::vector<uint32_t> offsets;
  std::vector<Acc> velocities;

  explicit ScanBuffer(bool with_velocity, int64_t n = kSegment)
      : keys(n + kSegmentBuffer - kSegment), offsets(keys.size()), velocities(with_velocity ? keys.size() : 0) {
  }

  Found<Acc> found() {
    return {keys.data(), offsets.data(), velocities.empty() ? nullptr : velocities.data()};
  }
};

// Consecutive segments that one thread scans, and the candidates that it has collected.
template <typename Acc>
struct Share {
  int64_t first; // index of the first segment
  Candidates<Acc> found;
  ScanBuffer<Acc> buffer;  // candidates of the current segment
  std::vector<Acc> values; // `UndoLog::values` of the current segment
};

// Calls scan(segment, share) for each segment and joins the candidates of all threads. `scan` appends candidates to
// `share.found` and returns their number. `expected` is a guess of the total, by which memory is reserved.
template <typename Acc, typename F>
Candidates<Acc> collect(int64_t numel, int64_t expected, bool with_velocity, F&& scan) {
  const int64_t segments = num_segments(numel);
  std::vector<Candidates<Acc>> parts(segments); // indexed by the first segment of a share; other entries stay empty
  std::vector<int64_t> counts(segments);
  torch::stable::parallel_for(0, segments, 1, [&](int64_t first, int64_t last) {
    Share<Acc> share{first, {}, ScanBuffer<Acc>(with_velocity), {}};
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

} // namespace moe_ext::topk
