// Selection in a scope of many segments. Host code. One pass feeds the residual and takes the candidates out of the
// state; candidates that are not chosen are put back. A checked pass in place logs one byte per element
// (topk_tables.h), so that the feed can be undone if an element is not finite. The log grows if the residual is small
// beside the gradient. In that case segments are only read, and fed after all elements were found to be finite.
#pragma once

#include <cmath>
#include <iterator>
#include <numeric>
#include <optional>

#include "common/new_on_cpu.h"
#include "selection/candidates.h"
#include "selection/select.h"
#include "selection/topk.h"

namespace moe_ext::topk {

using torch::stable::parallel_for;

// The sample holds kSampleLine elements, one cache line of float32, of every kSampleRun elements.
constexpr int64_t kSampleRun = 2048;
constexpr int64_t kSampleLine = 16;
// Distance of the prefetch, in sampled lines. The hardware does not prefetch lines that are so far apart.
constexpr int64_t kSampleAhead = 16;

template <typename T>
struct Chosen {
  acc_t<T>* values;
  int64_t* indices;
};

template <typename T>
Feedback<T> shifted(const Feedback<T>& args, int64_t begin) {
  Feedback<T> part = args;
  part.grad += begin;
  part.residual_in += begin;
  part.residual += begin;
  if (args.velocity != nullptr) {
    part.velocity_in += begin;
    part.velocity += begin;
  }
  return part;
}

template <typename T>
void take(const Feedback<T>& args, int64_t i, int64_t base, const Chosen<T>& out, int64_t place) {
  out.values[place] = args.residual[i];
  out.indices[place] = base + i;
  args.residual[i] = 0;
  if (args.velocity != nullptr) {
    args.velocity[i] = 0;
  }
}

// Takes the elements of `cut` out of n fed elements, by a scan of all of them. Returns their number.
template <typename T>
int64_t take_cut(const Feedback<T>& args, int64_t n, int64_t base, Cut<key_t<acc_t<T>>> cut, const Chosen<T>& out) {
  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto key = key_of(args.residual[i]);
    const bool tie = key == cut.bound && cut.ties > 0;
    cut.ties -= tie;
    if (key > cut.bound || tie) {
      take(args, i, base, out, place++);
    }
  }
  return place;
}

// Writes those of `count` collected elements that are in `cut` to `out`, puts the others back into the state, and
// returns the number written.
template <typename T>
int64_t deliver_found(
    const Feedback<T>& args, const Found<acc_t<T>>& found, int64_t count, Cut<key_t<acc_t<T>>> cut, int64_t base,
    const Chosen<T>& out) {
  int64_t place = 0;
  // Elements to put back are no longer in the caches. Without the prefetch, each store would wait for its cache line.
  for (int64_t i = 0; cut.bound > 0 && i < count; ++i) {
    __builtin_prefetch(args.residual + (found.keys[i] > cut.bound ? 0 : found.offsets[i] & ~kSignBit), 1);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = found.offsets[i] & ~kSignBit;
    const bool tie = found.keys[i] == cut.bound && cut.ties > 0;
    cut.ties -= tie;
    if (found.keys[i] > cut.bound || tie) {
      out.values[place] = signed_value<acc_t<T>>(found.keys[i], found.offsets[i]);
      out.indices[place++] = base + offset;
      continue;
    }
    args.residual[offset] = signed_value<acc_t<T>>(found.keys[i], found.offsets[i]);
    if (found.velocities != nullptr) {
      args.velocity[offset] = found.velocities[i];
    }
  }
  return place;
}

template <typename T>
class LargeScope {
 public:
  using Acc = acc_t<T>;
  using Key = key_t<Acc>;

  LargeScope(const FeedbackKernels<T>& loops, const Feedback<T>& args, int64_t numel, bool check);

  // Collects all keys above `low`. A thread that has collected `room` keys puts further ones back, which `overflow`
  // tells. Returns false, with the state that was read unchanged, if `check` is set and an element is not finite.
  bool pass(Key low, int64_t expected, int64_t room);

  // Runs `pass` with a bound, found by a sample, that at least k keys reach. Returns false as `pass` does.
  bool pass_largest(int64_t k);

  // Number of keys above the bound of the last pass, including those for which there was no room.
  int64_t found() const {
    return found_;
  }
  bool overflow() const {
    return found_ > all_.count();
  }

  // Puts all elements that the last pass collected back into the state.
  void put_back();

  // Writes the k largest elements that the last pass collected. If the pass collected fewer, elements equal to its
  // bound fill the rest, the lowest indices first. `base` is the index of the scope's first element.
  void deliver(int64_t k, int64_t base, const Chosen<T>& out);

 private:
  int64_t scan_segment(int64_t s, Key low, Share<Acc>& share, Scanned<Key>& seen);
  int64_t scan_and_log(int64_t s, Key low, Share<Acc>& share, Scanned<Key>& seen);
  void take_out(int64_t s, int64_t count, const Found<Acc>& found);
  bool log_has_room(int64_t s, const Share<Acc>& share) const;
  void put_back(int64_t s);
  void undo();
  std::vector<Key> sample() const;
  static Key raised(Key low, const std::vector<Key>& sampled, double expected);
  std::vector<int64_t> filled(int64_t missing) const;
  void deliver_segment(int64_t s, Cut<Key> cut, int64_t fill, int64_t base, const Chosen<T>& out);

  Feedback<T> segment(int64_t s) const {
    return shifted(args_, s * kSegment);
  }
  int8_t* steps(int64_t s) const {
    return data<int8_t>(*steps_) + s * kSegment * (args_.velocity == nullptr ? 1 : 2);
  }

  const FeedbackKernels<T>& loops_;
  Feedback<T> args_;
  int64_t numel_, segments_;
  bool check_;     // the next pass must check; false after the first one
  bool logs_each_; // the next pass logs what it feeds, for `undo`
  Key low_ = 0;
  Key largest_ = 0;
  int64_t found_ = 0;
  Candidates<Acc> all_;
  std::vector<int64_t> equal_;         // number of keys equal to the bound, by segment
  std::vector<uint8_t> fed_;           // by segment: 1 if it is fed and its candidates are out of the state
  std::vector<std::vector<Acc>> logs_; // `UndoLog::values`, by segment
  std::optional<Tensor> steps_;        // `UndoLog::steps` of all segments
};

template <typename T>
LargeScope<T>::LargeScope(const FeedbackKernels<T>& loops, const Feedback<T>& args, int64_t numel, bool check)
    : loops_(loops),
      args_(args),
      numel_(numel),
      segments_(num_segments(numel)),
      check_(check),
      logs_each_(check && args.in_place()),
      equal_(segments_),
      fed_(segments_),
      logs_(logs_each_ ? segments_ : 0) {
  if (logs_each_) {
    steps_ = new_on_cpu({segments_ * kSegment * (args.velocity == nullptr ? 1 : 2)}, ScalarType::Char);
  }
}

// Returns true if the thread's last four segments logged a value for at most every second element. With more values, a
// second read is as fast as the log.
template <typename T>
bool LargeScope<T>::log_has_room(int64_t s, const Share<Acc>& share) const {
  int64_t logged = 0;
  for (int64_t before = std::max(share.first, s - 4); before < s; ++before) {
    logged += static_cast<int64_t>(logs_[before].size());
  }
  return logged <= 4 * kSegment / 2;
}

template <typename T>
int64_t LargeScope<T>::scan_and_log(int64_t s, Key low, Share<Acc>& share, Scanned<Key>& seen) {
  const int64_t n = segment_size(s, numel_);
  share.values.resize(2 * kSegmentBuffer);
  UndoLog<Acc> log{steps(s), share.values.data()};
  const int64_t count = loops_.logged_feed_and_scan(segment(s), 0, n, low, share.buffer.found(), &seen, &log);
  logs_[s].assign(log.values, log.values + log.count);
  return count;
}

// Takes elements that `scan_fed` has collected out of the state, with sign and velocity.
template <typename T>
void LargeScope<T>::take_out(int64_t s, int64_t count, const Found<Acc>& found) {
  const Feedback<T> part = segment(s);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t offset = found.offsets[i];
    found.offsets[i] = offset | (std::signbit(part.residual[offset]) ? kSignBit : 0);
    part.residual[offset] = 0;
    if (part.velocity != nullptr) {
      found.velocities[i] = part.velocity[offset];
      part.velocity[offset] = 0;
    }
  }
}

template <typename T>
int64_t LargeScope<T>::scan_segment(int64_t s, Key low, Share<Acc>& share, Scanned<Key>& seen) {
  const int64_t n = segment_size(s, numel_);
  const Found<Acc> found = share.buffer.found();
  if (fed_[s]) {
    const int64_t count = loops_.scan_fed(args_.residual + s * kSegment, n, low, found, &seen);
    take_out(s, count, found);
    return count;
  }
  if (logs_each_ && !log_has_room(s, share)) {
    return loops_.scan(segment(s), 0, n, low, found, &seen);
  }
  fed_[s] = 1;
  return logs_each_ ? scan_and_log(s, low, share, seen) : loops_.feed_and_scan(segment(s), 0, n, low, found, &seen);
}

template <typename T>
bool LargeScope<T>::pass(Key low, int64_t expected, int64_t room) {
  std::vector<int64_t> counts(segments_);
  std::vector<Key> largest(segments_);
  low_ = low;
  const bool with_velocity = args_.velocity != nullptr;
  all_ = collect<Acc>(numel_, expected, with_velocity, [&](int64_t s, Share<Acc>& share) -> int64_t {
    Scanned<Key> seen;
    const int64_t count = counts[s] = scan_segment(s, low, share, seen);
    equal_[s] = seen.equal;
    largest[s] = seen.largest;
    if (share.found.count() < room) {
      share.found.append(share.buffer.found(), count);
      return count;
    }
    if (fed_[s]) {
      deliver_found(segment(s), share.buffer.found(), count, Cut<Key>{static_cast<Key>(-1), 0}, 0, Chosen<T>{});
    }
    return 0;
  });
  found_ = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  largest_ = *std::max_element(largest.begin(), largest.end());
  if (check_ && largest_ >= kInfinityKey<Acc>) {
    if (logs_each_) {
      undo();
    }
    return false;
  }
  check_ = logs_each_ = false;
  logs_.clear();
  steps_.reset();
  return true;
}

template <typename T>
void LargeScope<T>::put_back(int64_t s) {
  const Feedback<T> part = segment(s);
  for (int64_t i = all_.begin[s]; i < all_.begin[s + 1]; ++i) {
    part.residual[all_.offset(i)] = all_.value(i);
    if (part.velocity != nullptr) {
      part.velocity[all_.offset(i)] = all_.velocities[i];
    }
  }
}

template <typename T>
void LargeScope<T>::put_back() {
  parallel_for(0, segments_, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      if (fed_[s]) {
        put_back(s);
      }
    }
  });
}

template <typename T>
void LargeScope<T>::undo() {
  put_back();
  parallel_for(0, segments_, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      if (fed_[s]) {
        const UndoLog<Acc> log{steps(s), logs_[s].data(), static_cast<int64_t>(logs_[s].size())};
        loops_.undo(segment(s), 0, segment_size(s, numel_), log);
      }
    }
  });
}

// Keys of the sampled lines. The place of a line in its run is hashed: a regular place could fall on the same columns
// of every row of a matrix.
template <typename T>
std::vector<key_t<acc_t<T>>> LargeScope<T>::sample() const {
  const int64_t runs = numel_ / kSampleRun;
  std::vector<Key> keys(runs * kSampleLine);
  const auto begin_of = [](int64_t run) {
    const uint64_t hash = (static_cast<uint64_t>(run) + 1) * 0x9E3779B97F4A7C15u;
    const int64_t line = static_cast<int64_t>(hash >> 40) % (kSampleRun / kSampleLine);
    return run * kSampleRun + line * kSampleLine;
  };
  parallel_for(0, runs, 256, [&](int64_t first, int64_t last) {
    for (int64_t run = first; run < last; ++run) {
      const int64_t begin = begin_of(run), later = begin_of(std::min(run + kSampleAhead, last - 1));
      __builtin_prefetch(args_.grad + later);
      __builtin_prefetch(args_.residual_in + later);
      Key* out = keys.data() + run * kSampleLine;
      if (fed_[begin / kSegment]) {
        std::transform(
            args_.residual + begin, args_.residual + begin + kSampleLine, out, [](Acc a) { return key_of(a); });
      } else {
        loops_.keys(args_, begin, kSampleLine, out);
      }
    }
  });
  return keys;
}

// Raises a bound whose margin assumes that all elements of a line are alike. The new margin is four standard deviations
// by the number of elements above `low` in each sampled line.
template <typename T>
key_t<acc_t<T>> LargeScope<T>::raised(Key low, const std::vector<Key>& sampled, double expected) {
  std::vector<Key> above;
  double squares = 0;
  for (size_t line = 0; line < sampled.size(); line += kSampleLine) {
    const size_t before = above.size();
    std::copy_if(sampled.begin() + line, sampled.begin() + line + kSampleLine, std::back_inserter(above), [&](Key key) {
      return key > low;
    });
    const double count = static_cast<double>(above.size() - before);
    squares += count * count;
  }
  const int64_t size = static_cast<int64_t>(above.size());
  const int64_t rank = static_cast<int64_t>(expected + 4 * std::sqrt(squares)) + kSampleLine;
  return rank < size ? kth_largest(above.data(), size, rank) : low;
}

template <typename T>
bool LargeScope<T>::pass_largest(int64_t k) {
  const std::vector<Key> sampled = sample();
  const int64_t size = static_cast<int64_t>(sampled.size());
  const double expected = static_cast<double>(k) * static_cast<double>(size) / static_cast<double>(numel_);
  // Adds four standard deviations, as if all elements of a line were alike.
  const double least = expected + 4 * std::sqrt(expected * kSampleLine) + kSampleLine;
  for (double rank = least;; rank *= 4) {
    Key low = 0;
    if (rank < static_cast<double>(size)) {
      std::vector<Key> scratch = sampled;
      low = kth_largest(scratch.data(), size, static_cast<int64_t>(rank));
      low = rank == least ? raised(low, sampled, expected) : low;
    }
    // A bound below infinity makes sure that elements that are not finite are collected.
    if (!pass(std::min(low, kInfinityKey<Acc> - 1), k + k / 2, numel_)) {
      return false;
    }
    if (std::accumulate(equal_.begin(), equal_.end(), found_) >= k) {
      return true;
    }
    put_back();
  }
}

// Number of elements equal to the bound that are taken from each segment, `missing` in all, the lowest indices first.
template <typename T>
std::vector<int64_t> LargeScope<T>::filled(int64_t missing) const {
  std::vector<int64_t> taken(segments_);
  for (int64_t s = 0; s < segments_ && missing > 0; ++s) {
    taken[s] = std::min(equal_[s], missing);
    missing -= taken[s];
  }
  return taken;
}

template <typename T>
void LargeScope<T>::deliver(int64_t k, int64_t base, const Chosen<T>& out) {
  Cut<Key> cut{0, 0};
  if (all_.count() > k) {
    std::vector<Key> scratch = all_.keys;
    cut = cut_largest(all_.keys.data(), scratch.data(), all_.count(), k, low_, largest_);
  }
  const std::vector<int64_t> fills = filled(k - all_.count());
  std::vector<int64_t> place(segments_ + 1), ties(segments_);
  for (int64_t s = 0; s < segments_; ++s) {
    int64_t above = 0, equal = 0;
    for (int64_t i = all_.begin[s]; i < all_.begin[s + 1]; ++i) {
      above += all_.keys[i] > cut.bound;
      equal += all_.keys[i] == cut.bound;
    }
    ties[s] = std::min(equal, cut.ties);
    cut.ties -= ties[s];
    place[s + 1] = place[s] + above + ties[s] + fills[s];
  }
  parallel_for(0, segments_, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      deliver_segment(
          s, Cut<Key>{cut.bound, ties[s]}, fills[s], base + s * kSegment,
          Chosen<T>{out.values + place[s], out.indices + place[s]});
    }
  });
}

template <typename T>
void LargeScope<T>::deliver_segment(int64_t s, Cut<Key> cut, int64_t fill, int64_t base, const Chosen<T>& out) {
  const Feedback<T> part = segment(s);
  const int64_t n = segment_size(s, numel_);
  if (!fed_[s]) {
    loops_.feed(part, 0, n);
  }
  if (fill > 0) {
    if (fed_[s]) {
      put_back(s);
    }
    take_cut(part, n, base, Cut<Key>{low_, fill}, out);
    return;
  }
  if (fed_[s]) {
    deliver_found(part, all_.from(all_.begin[s]), all_.begin[s + 1] - all_.begin[s], cut, base, out);
    return;
  }
  int64_t place = 0;
  for (int64_t i = all_.begin[s]; i < all_.begin[s + 1]; ++i) {
    const bool tie = all_.keys[i] == cut.bound && cut.ties > 0;
    cut.ties -= tie;
    if (all_.keys[i] > cut.bound || tie) {
      take(part, all_.offset(i), base, out, place++);
    }
  }
}

} // namespace moe_ext::topk
