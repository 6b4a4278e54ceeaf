// The loops that topk_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "compression/feedback_math.h"

namespace moe_ext::compression::topk {

// Elements that a loop is called with at most; a thread keeps the candidates of one segment in its cache.
constexpr int64_t kSegment = 16384;
// What the buffers of `scan` and `feed_and_scan` hold: whole vectors are stored at their end.
constexpr int64_t kSegmentBuffer = kSegment + 16;

// Each works on the elements [begin, begin + n), n <= kSegment. Keys are those of a = residual_scale e + u.
template <typename T>
struct FeedbackKernels {
  using Key = key_t<acc_t<T>>;
  // Writes the key of every element.
  void (*keys)(const Feedback<T>& args, int64_t begin, int64_t n, Key* keys);
  // Collects the keys that are at least `low`, with their offsets from `begin`, in order; returns how many. `largest`
  // is raised to the largest key of all.
  int64_t (*scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, Key* keys, uint32_t* offsets, Key* largest);
  // e = a, and the velocity's new value.
  void (*feed)(const Feedback<T>& args, int64_t begin, int64_t n);
  // Both at once.
  int64_t (*feed_and_scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, Key* keys, uint32_t* offsets, Key* largest);
};

using Kernels = PerDtype<FeedbackKernels>;

} // namespace moe_ext::compression::topk
