// CPU side of the gradient selection.
// Exact top-k of a large scope: (1) a sample of the keys gives a bound that about a tenth more than k are above; (2)
// one pass reads everything, looks for NaN and collects what is above the bound; (3) the k-th largest of those is
// found; (4) a second pass adds the gradient to the residual and takes the chosen elements out. Nothing is written
// before (4).
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <sstream>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "compression/candidates.h"
#include "compression/select.h"
#include "compression/topk.h"

namespace moe_ext::compression::topk {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;
using OptionalTensor = std::optional<Tensor>;

// One line of the cache of each run of this many elements is sampled.
constexpr int64_t kSampleRun = 2048;
constexpr int64_t kSampleLine = 16;

template <typename T>
Feedback<T> feedback(
    const Tensor& grad, const Tensor& residual, const OptionalTensor& velocity, double momentum,
    double residual_scale) {
  return {
      data<const T>(grad), data<acc_t<T>>(residual), velocity ? data<acc_t<T>>(*velocity) : nullptr,
      static_cast<acc_t<T>>(residual_scale), static_cast<acc_t<T>>(momentum)};
}

template <typename T>
Feedback<T> shifted(const Feedback<T>& args, int64_t begin) {
  return {
      args.grad + begin, args.residual + begin, args.velocity == nullptr ? nullptr : args.velocity + begin,
      args.residual_scale, args.momentum};
}

// Names the first element that is not finite; there is one.
template <typename T>
[[noreturn]] void refuse(const char* op, const Feedback<T>& args, int64_t numel) {
  using Key = key_t<acc_t<T>>;
  std::vector<Key> keys(kSegment);
  for (int64_t begin = 0; begin < numel; begin += kSegment) {
    const int64_t n = std::min(kSegment, numel - begin);
    kernels().of<T>().keys(args, begin, n, keys.data());
    for (int64_t i = 0; i < n; ++i) {
      if (keys[i] >= kInfinityKey<acc_t<T>>) {
        fail(
            op, ": expected grad plus residual to be finite, got ", keys[i] == kInfinityKey<acc_t<T>> ? "inf" : "nan",
            " at element ", begin + i, " (grad ", to_acc(args.grad[begin + i]), ", residual ", args.residual[begin + i],
            ")");
      }
    }
  }
  fail(op, ": expected the arguments to stay as they are during the call, got others");
}

template <typename T>
void check_finite(const char* op, const Feedback<T>& args, int64_t numel) {
  using Key = key_t<acc_t<T>>;
  std::vector<Key> largest(num_segments(numel));
  parallel_for(0, num_segments(numel), 1, [&](int64_t first, int64_t last) {
    std::vector<Key> keys(kSegmentBuffer);
    std::vector<uint32_t> offsets(kSegmentBuffer);
    for (int64_t s = first; s < last; ++s) {
      kernels().of<T>().scan(
          args, s * kSegment, segment_size(s, numel), static_cast<Key>(-1), keys.data(), offsets.data(), &largest[s]);
    }
  });
  for (const Key key : largest) {
    if (key >= kInfinityKey<acc_t<T>>) {
      refuse(op, args, numel);
    }
  }
}

// Keys of sampled lines. Where a line lies in its run must not follow the rows of a matrix: it is hashed.
template <typename T>
std::vector<key_t<acc_t<T>>> sample(const Feedback<T>& args, int64_t numel) {
  const int64_t runs = numel / kSampleRun;
  std::vector<key_t<acc_t<T>>> keys(runs * kSampleLine);
  parallel_for(0, runs, 256, [&](int64_t first, int64_t last) {
    for (int64_t run = first; run < last; ++run) {
      const uint64_t hash = (static_cast<uint64_t>(run) + 1) * 0x9E3779B97F4A7C15u;
      const int64_t line = static_cast<int64_t>(hash >> 40) % (kSampleRun / kSampleLine);
      kernels().of<T>().keys(args, run * kSampleRun + line * kSampleLine, kSampleLine, keys.data() + run * kSampleLine);
    }
  });
  return keys;
}

// As `scan`, of a residual that has been fed.
template <typename T>
int64_t scan_fed(const acc_t<T>* residual, int64_t n, key_t<acc_t<T>> low, key_t<acc_t<T>>* keys, uint32_t* offsets) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    keys[count] = key_of(residual[i]);
    offsets[count] = static_cast<uint32_t>(i);
    count += keys[count] >= low;
  }
  return count;
}

// The candidates for the k largest of `numel` elements: at least k of them, or all that are not zero. With `feed` the
// first pass writes the residual, else nothing is written and a number that is not finite ends the search.
template <typename T>
Candidates<key_t<acc_t<T>>> candidates(const Feedback<T>& args, int64_t numel, int64_t k, bool feed) {
  using Key = key_t<acc_t<T>>;
  const FeedbackKernels<T>& loops = kernels().of<T>();
  const std::vector<Key> sampled = sample(args, numel);
  const int64_t size = static_cast<int64_t>(sampled.size());
  const double expected = static_cast<double>(k) * static_cast<double>(size) / static_cast<double>(numel);
  // Four deviations if the elements of a line are all alike.
  double rank = expected + 4 * std::sqrt(expected * kSampleLine) + kSampleLine;
  for (bool fed = false;; fed = feed, rank *= 4) {
    Key low = 1;
    if (rank < static_cast<double>(size)) {
      std::vector<Key> scratch = sampled;
      low = std::max<Key>(1, kth_largest(scratch.data(), size, static_cast<int64_t>(rank)));
    }
    const auto scan = feed ? loops.feed_and_scan : loops.scan;
    Candidates<Key> found = collect<Key>(numel, k + k / 4, [&](int64_t s, Key* keys, uint32_t* offsets, Key* largest) {
      const int64_t begin = s * kSegment, n = segment_size(s, numel);
      return fed ? scan_fed<T>(args.residual + begin, n, low, keys, offsets)
                 : scan(args, begin, n, low, keys, offsets, largest);
    });
    if (found.count() >= k || low == 1 || (!feed && found.largest >= kInfinityKey<acc_t<T>>)) {
      return found;
    }
  }
}

template <typename T>
struct Chosen {
  acc_t<T>* values;
  int64_t* indices;
};

template <typename T>
void take(const Feedback<T>& args, int64_t i, int64_t base, const Chosen<T>& out, int64_t place) {
  out.values[place] = args.residual[i];
  out.indices[place] = base + i;
  args.residual[i] = 0;
  if (args.velocity != nullptr) {
    args.velocity[i] = 0;
  }
}

// Takes those of n elements that the cut takes, looking at each. For scopes that fit a segment.
template <typename T>
void take_cut(const Feedback<T>& args, int64_t n, int64_t base, Cut<key_t<acc_t<T>>> cut, const Chosen<T>& out) {
  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto key = key_of(args.residual[i]);
    const bool tie = key == cut.bound && cut.ties > 0;
    cut.ties -= tie;
    if (key > cut.bound || tie) {
      take(args, i, base, out, place++);
    }
  }
}

template <typename T>
void small_scope(const Feedback<T>& args, int64_t n, int64_t k, int64_t base, const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  std::vector<Key> keys(n), scratch;
  kernels().of<T>().keys(args, 0, n, keys.data());
  scratch = keys;
  const Cut<Key> cut = cut_largest(keys.data(), scratch.data(), n, k);
  kernels().of<T>().feed(args, 0, n);
  take_cut(args, n, base, cut, out);
}

// Zeros that fill up what is left of k, by segment: the lowest indices first.
inline std::vector<int64_t> zeros_taken(const std::vector<int64_t>& begin, int64_t numel, int64_t missing) {
  std::vector<int64_t> taken(num_segments(numel));
  for (size_t s = 0; s < taken.size() && missing > 0; ++s) {
    const int64_t zeros = segment_size(static_cast<int64_t>(s), numel) - (begin[s + 1] - begin[s]);
    taken[s] = std::min(zeros, missing);
    missing -= taken[s];
  }
  return taken;
}

// With `check` in two passes over everything, without it in one.
template <typename T>
void large_scope(
    const char* op, const Feedback<T>& args, int64_t n, int64_t k, int64_t base, bool check, const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  Candidates<Key> all = candidates(args, n, k, !check);
  if (check && all.largest >= kInfinityKey<acc_t<T>>) {
    refuse(op, args, n);
  }
  const std::vector<int64_t> zeros = zeros_taken(all.begin, n, k - all.count());
  if (all.count() > k) {
    std::vector<Key> scratch = all.keys;
    const Cut<Key> cut = cut_largest(all.keys.data(), scratch.data(), all.count(), k);
    keep(all, cut.bound, cut.ties);
  }
  std::vector<int64_t> place(zeros.size());
  for (size_t s = 1; s < zeros.size(); ++s) {
    place[s] = place[s - 1] + zeros[s - 1] + all.begin[s] - all.begin[s - 1];
  }
  parallel_for(0, num_segments(n), 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = s * kSegment, size = segment_size(s, n);
      const Feedback<T> segment = shifted(args, begin);
      const Chosen<T> to{out.values + place[s], out.indices + place[s]};
      if (check) {
        kernels().of<T>().feed(segment, 0, size);
      }
      if (zeros[s] > 0) {
        take_cut(segment, size, base + begin, Cut<Key>{0, zeros[s]}, to);
        continue;
      }
      const int64_t count = all.begin[s + 1] - all.begin[s];
      const uint32_t* offsets = all.offsets.data() + all.begin[s];
      for (int64_t i = 0; i < count; ++i) {
        take(segment, offsets[i], base + begin, to, i);
      }
    }
  });
}

template <typename T>
void topk_scopes(const char* op, const Feedback<T>& args, const Scopes& scopes, bool check, const Chosen<T>& out) {
  // A single large scope is checked as it is scanned.
  const bool alone = scopes.count() == 1 && scopes.size > kSegment;
  if (check && !alone) {
    check_finite(op, args, scopes.numel);
  }
  const auto run = [&](int64_t scope) {
    const int64_t begin = scope * scopes.size, size = scopes.length(scope);
    const Chosen<T> to{out.values + scope * scopes.k, out.indices + scope * scopes.k};
    const Feedback<T> part = shifted(args, begin);
    if (size <= kSegment) {
      small_scope(part, size, scopes.kept(scope), begin, to);
    } else {
      large_scope(op, part, size, scopes.kept(scope), begin, check && alone, to);
    }
  };
  if (scopes.size > kSegment) {
    for (int64_t scope = 0; scope < scopes.count(); ++scope) {
      run(scope);
    }
    return;
  }
  parallel_for(0, scopes.count(), std::max<int64_t>(1, kSegment / scopes.size), [&](int64_t first, int64_t last) {
    for (int64_t scope = first; scope < last; ++scope) {
      run(scope);
    }
  });
}

std::tuple<Tensor, Tensor> topk_compress_cpu(
    Tensor grad, Tensor residual, int64_t k, int64_t scope_size, OptionalTensor velocity, double momentum,
    double residual_scale, bool check) {
  const Scopes scopes = check_topk_compress(grad, residual, k, scope_size, velocity, momentum, residual_scale);
  const Tensor g = contiguous(grad);
  Tensor values = new_empty(residual, {scopes.total()});
  Tensor indices = new_empty(residual, {scopes.total()}, ScalarType::Long);
  if (scopes.numel > 0) {
    dispatch_floating(g.scalar_type(), [&]<typename T>() {
      topk_scopes<T>(
          "topk_compress_", feedback<T>(g, residual, velocity, momentum, residual_scale), scopes, check,
          {data<acc_t<T>>(values), data<int64_t>(indices)});
    });
  }
  return {values, indices};
}

// Elements above the threshold, taken out of residual and velocity as they were found.
template <typename T>
struct Taken {
  std::vector<acc_t<T>> values, velocities;
};

// Moves the candidates of a segment out of the state; returns how many there are.
template <typename T>
int64_t take_segment(
    const Feedback<T>& segment, int64_t n, key_t<acc_t<T>> low, key_t<acc_t<T>>* keys, uint32_t* offsets,
    key_t<acc_t<T>>* largest, Taken<T>& taken) {
  const int64_t count = kernels().of<T>().feed_and_scan(segment, 0, n, low, keys, offsets, largest);
  for (int64_t i = 0; i < count; ++i) {
    taken.values.push_back(segment.residual[offsets[i]]);
    segment.residual[offsets[i]] = 0;
    if (segment.velocity != nullptr) {
      taken.velocities.push_back(segment.velocity[offsets[i]]);
      segment.velocity[offsets[i]] = 0;
    }
  }
  return count;
}

// Writes the largest `capacity` of what was taken, puts the rest back, and returns how many were written.
template <typename T>
int64_t deliver(
    const Feedback<T>& args, const Candidates<key_t<acc_t<T>>>& all, const std::vector<Taken<T>>& parts,
    int64_t capacity, const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  Cut<Key> cut{0, 0};
  if (all.count() > capacity) {
    std::vector<Key> scratch = all.keys;
    cut = cut_largest(all.keys.data(), scratch.data(), all.count(), capacity);
  }
  int64_t place = 0, i = 0, segment = 0;
  for (const Taken<T>& part : parts) {
    for (size_t j = 0; j < part.values.size(); ++j, ++i) {
      while (i >= all.begin[segment + 1]) {
        ++segment;
      }
      const int64_t index = segment * kSegment + all.offsets[i];
      const bool tie = all.keys[i] == cut.bound && cut.ties > 0;
      cut.ties -= tie;
      if (all.keys[i] > cut.bound || tie) {
        out.values[place] = part.values[j];
        out.indices[place++] = index;
        continue;
      }
      args.residual[index] = part.values[j];
      if (args.velocity != nullptr) {
        args.velocity[index] = part.velocities[j];
      }
    }
  }
  return place;
}

// The next threshold, from how many passed this one. The eighth root keeps the loop stable where the count falls with
// up to the sixteenth power of the threshold, as in the tail of a normal distribution.
template <typename Acc>
Acc adapted(Acc threshold, int64_t found, int64_t target) {
  const double ratio = static_cast<double>(found) / static_cast<double>(target);
  const double factor = std::sqrt(std::sqrt(std::sqrt(ratio)));
  return static_cast<Acc>(static_cast<double>(threshold) * std::min(2.0, std::max(0.5, factor)));
}

template <typename T>
int64_t threshold_pass(
    const Feedback<T>& args, int64_t numel, acc_t<T>& threshold, int64_t capacity, int64_t target,
    const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  const Key low = std::max<Key>(1, key_of(threshold));
  std::vector<Taken<T>> parts(num_segments(numel));
  const Candidates<Key> all =
      collect<Key>(numel, std::min(capacity, numel / 8), [&](int64_t s, Key* keys, uint32_t* offsets, Key* largest) {
        return take_segment(shifted(args, s * kSegment), segment_size(s, numel), low, keys, offsets, largest, parts[s]);
      });
  const int64_t count = deliver(args, all, parts, capacity, out);
  if (target > 0) {
    threshold = adapted(threshold, all.count(), target);
  }
  return count;
}

std::tuple<Tensor, Tensor, Tensor> threshold_compress_cpu(
    Tensor grad, Tensor residual, Tensor threshold, int64_t capacity, int64_t target, OptionalTensor velocity,
    double momentum, double residual_scale, bool check) {
  const char* op = "threshold_compress_";
  check_threshold_compress(grad, residual, threshold, capacity, target, velocity, momentum, residual_scale);
  const Tensor g = contiguous(grad);
  const int64_t numel = g.numel();
  Tensor values = torch::stable::new_zeros(residual, {capacity});
  Tensor indices = new_empty(residual, {capacity}, ScalarType::Long);
  Tensor count = new_empty(residual, {}, ScalarType::Long);
  data<int64_t>(count)[0] = 0;
  dispatch_floating(g.scalar_type(), [&]<typename T>() {
    acc_t<T>& bound = data<acc_t<T>>(threshold)[0];
    MOE_CHECK(bound >= 0 && std::isfinite(bound), op, ": expected threshold to be finite and at least 0, got ", bound);
    const Feedback<T> args = feedback<T>(g, residual, velocity, momentum, residual_scale);
    if (check) {
      check_finite(op, args, numel);
    }
    data<int64_t>(count)[0] =
        threshold_pass<T>(args, numel, bound, capacity, target, {data<acc_t<T>>(values), data<int64_t>(indices)});
  });
  std::fill(data<int64_t>(indices) + data<int64_t>(count)[0], data<int64_t>(indices) + capacity, numel - 1);
  return {values, indices, count};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("topk_compress_", TORCH_BOX(&topk_compress_cpu));
  m.impl("threshold_compress_", TORCH_BOX(&threshold_compress_cpu));
}

} // namespace moe_ext::compression::topk
