// The loops that topk_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "common/feedback_math.h"

namespace moe_ext::topk {

// Elements that a loop is called with at most; a thread keeps the candidates of one segment in its cache.
constexpr int64_t kSegment = 16384;
// Capacity of the buffers of the scans: whole vectors are stored at their end.
constexpr int64_t kSegmentBuffer = kSegment + 16;

constexpr uint32_t kSignBit = 0x80000000u;

// Buffers for what a scan collects, each with room for kSegmentBuffer: the keys, and their offsets from the first
// element. Where they leave the state, the top bit of an offset is the sign, and the velocities are kept too.
template <typename Acc>
struct Found {
  key_t<Acc>* keys;
  uint32_t* offsets;
  Acc* velocities; // or null
};

// Findings of a scan besides the keys that it collects; raised by each call.
template <typename Key>
struct Scanned {
  Key largest = 0;   // of those collected
  int64_t equal = 0; // keys that equal the bound
};

// Log for taking a feed back bit for bit: how many floats the old value is above what the feed taken backwards gives.
// A step of kFarStep or more either way keeps the value itself.
constexpr int kFarStep = 127;

template <typename Acc>
struct UndoLog {
  int8_t* steps;     // kSegment of the residual, and where there is one of the velocity
  Acc* values;       // room for 2 kSegmentBuffer
  int64_t count = 0; // of values
};

// Each works on the elements [begin, begin + n), n <= kSegment. Keys are those of a = residual_scale e + u. A scan
// collects the keys that are larger than `low`, in order, and returns how many.
template <typename T>
struct FeedbackKernels {
  using Acc = acc_t<T>;
  using Key = key_t<Acc>;
  // Writes the key of every element.
  void (*keys)(const Feedback<T>& args, int64_t begin, int64_t n, Key* keys);
  Key (*largest)(const Feedback<T>& args, int64_t begin, int64_t n);
  int64_t (*scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen);
  // e = a, and the velocity's new value.
  void (*feed)(const Feedback<T>& args, int64_t begin, int64_t n);
  // Both at once: what is collected leaves the state. And with a log, in place.
  int64_t (*feed_and_scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen);
  int64_t (*logged_feed_and_scan)(
      const Feedback<T>& args, int64_t begin, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen,
      UndoLog<Acc>* log);
  // Residual and velocity as they were before `logged_feed_and_scan`, of which what was collected has been put back.
  void (*undo)(const Feedback<T>& args, int64_t begin, int64_t n, const UndoLog<Acc>& log);
  // A scan of what has been fed, and stays there.
  int64_t (*scan_fed)(const Acc* residual, int64_t n, Key low, const Found<Acc>& out, Scanned<Key>* seen);
};

using Kernels = PerDtype<FeedbackKernels>;

} // namespace moe_ext::topk
