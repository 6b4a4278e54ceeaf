// What a parallel scan of segments collected, in the order of the elements whatever the number of threads.
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

// Keys and offsets within their segment; those of segment s are [begin[s], begin[s + 1]).
template <typename Key>
struct Candidates {
  std::vector<Key> keys;
  std::vector<uint32_t> offsets;
  std::vector<int64_t> begin;
  Key largest = 0; // of all elements, not of the candidates alone

  int64_t count() const {
    return static_cast<int64_t>(keys.size());
  }
};

// Calls scan(segment, keys, offsets, &largest) -> count for each segment and joins the results. The buffers have room
// for a whole segment; `expected` is about how many there will be.
template <typename Key, typename F>
Candidates<Key> collect(int64_t numel, int64_t expected, F&& scan) {
  const int64_t segments = num_segments(numel);
  std::vector<Candidates<Key>> parts(segments); // by the first segment of a thread's share
  std::vector<int64_t> counts(segments);
  torch::stable::parallel_for(0, segments, 1, [&](int64_t first, int64_t last) {
    Candidates<Key>& part = parts[first];
    std::vector<Key> keys(kSegmentBuffer);
    std::vector<uint32_t> offsets(kSegmentBuffer);
    const int64_t share = expected / segments * (last - first) + kSegment;
    part.keys.reserve(share);
    part.offsets.reserve(share);
    for (int64_t segment = first; segment < last; ++segment) {
      counts[segment] = scan(segment, keys.data(), offsets.data(), &part.largest);
      part.keys.insert(part.keys.end(), keys.data(), keys.data() + counts[segment]);
      part.offsets.insert(part.offsets.end(), offsets.data(), offsets.data() + counts[segment]);
    }
  });
  Candidates<Key> all;
  for (Candidates<Key>& part : parts) {
    all.largest = std::max(all.largest, part.largest);
    if (all.keys.empty()) {
      all.keys = std::move(part.keys);
      all.offsets = std::move(part.offsets);
    } else {
      all.keys.insert(all.keys.end(), part.keys.begin(), part.keys.end());
      all.offsets.insert(all.offsets.end(), part.offsets.begin(), part.offsets.end());
    }
  }
  all.begin.assign(segments + 1, 0);
  for (int64_t segment = 0; segment < segments; ++segment) {
    all.begin[segment + 1] = all.begin[segment] + counts[segment];
  }
  return all;
}

// Keeps what the cut takes.
template <typename Key>
void keep(Candidates<Key>& all, Key bound, int64_t ties) {
  int64_t kept = 0;
  for (size_t segment = 0; segment + 1 < all.begin.size(); ++segment) {
    const int64_t first = all.begin[segment], last = all.begin[segment + 1];
    all.begin[segment] = kept;
    for (int64_t i = first; i < last; ++i) {
      const Key key = all.keys[i];
      const bool tie = key == bound && ties > 0;
      ties -= tie;
      all.offsets[kept] = all.offsets[i];
      all.keys[kept] = key;
      kept += key > bound || tie;
    }
  }
  all.begin.back() = kept;
  all.keys.resize(kept);
  all.offsets.resize(kept);
}

} // namespace moe_ext::compression::topk
