// The loops that topk_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "common/feedback_math.h"

namespace moe_ext::topk {

// Most elements of one call of a loop. The candidates of one segment fit in the cache of a core.
constexpr int64_t kSegment = 16384;
// Elements of the buffers of a scan. The last store of a scan may be a whole vector that reaches beyond the segment.
constexpr int64_t kSegmentBuffer = kSegment + 16;

constexpr uint32_t kSignBit = 0x80000000u;

// Buffers for the elements that a scan collects, each with room for kSegmentBuffer: keys, and offsets from the first
// element of the call. If a scan takes elements out of the state, the top bit of an offset is the sign of the value,
// and `velocities` holds the velocities.
template <typename Acc>
struct Found {
  key_t<Acc>* keys;
  uint32_t* offsets;
  Acc* velocities; // or null
};

// Further results of a scan. A call updates the values of earlier calls: their maximum and sum.
template <typename Key>
struct Scanned {
  Key largest = 0;   // largest collected key
  int64_t equal = 0; // number of keys equal to the bound
};

// Distance from which on the log of a feed holds the old value itself. Below, the log holds a step: the number of
// representable floats from the inverted feed, (a - u) / residual_scale for the residual, to the old value.
constexpr int kFarStep = 127;

// Log of a feed in place, by which `undo` restores the old state bit for bit.
template <typename Acc>
struct UndoLog {
  int8_t* steps;     // kSegment for the residual, then kSegment for the velocity if there is one
  Acc* values;       // old values at a far step, in order; room for 2 kSegmentBuffer
  int64_t count = 0; // number of values
};

// Loops over the elements [begin, begin + n), n <= kSegment. The key of an element is the magnitude of a =
// residual_scale e + u as bits. A scan collects the keys larger than `low`, in order, and returns their number.
template <typename T>
struct FeedbackKernels {
  using Acc = acc_t<T>;
  using Key = key_t<Acc>;
  // Writes the key of every element.
  void (*keys)(const Feedback<T>& args, int64_t begin, int64_t n, Key* keys);
  // Returns the largest key.
  Key (*largest)(const Feedback<T>& args, int64_t begin, int64_t n);
  // Scans without changing the state.
  int64_t (*scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen);
  // Writes a to the residual and u to the velocity.
  void (*feed)(const Feedback<T>& args, int64_t begin, int64_t n);
  // Feeds and scans in one pass. Collected elements become zero in residual and velocity.
  int64_t (*feed_and_scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen);
  // Does the same in place, and logs the feed for `undo`.
  int64_t (*logged_feed_and_scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen,
      UndoLog<Acc>* log);
  // Restores the state before `logged_feed_and_scan`. The caller must first put the collected elements back.
  void (*undo)(const Feedback<T>& args, int64_t begin, int64_t n, const UndoLog<Acc>& log);
  // Scans a fed residual without changing it.
  int64_t (*scan_fed)(const Acc* residual, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen);
};

using Kernels = PerDtype<FeedbackKernels>;

} // namespace moe_ext::topk
