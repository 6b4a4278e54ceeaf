// CPU side of the gradient selection. Scopes that fit a segment are cut one by one, in parallel; of a larger one, a
// sample gives a bound that a little more than k elements are above, and large_scope.h chooses among those.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <sstream>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "compression/large_scope.h"
#include "compression/threshold_math.h"

namespace moe_ext::compression::topk {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
Feedback<T> feedback(
    const Tensor& grad, const Tensor& residual, const OptionalTensor& velocity, double momentum,
    double residual_scale) {
  return {
      data<const T>(grad), data<acc_t<T>>(residual), velocity ? data<acc_t<T>>(*velocity) : nullptr,
      static_cast<acc_t<T>>(residual_scale), static_cast<acc_t<T>>(momentum)};
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
    for (int64_t s = first; s < last; ++s) {
      largest[s] = kernels().of<T>().largest(args, s * kSegment, segment_size(s, numel));
    }
  });
  if (*std::max_element(largest.begin(), largest.end()) >= kInfinityKey<acc_t<T>>) {
    refuse(op, args, numel);
  }
}

template <typename T>
void topk_small_scope(const Feedback<T>& args, int64_t n, int64_t k, int64_t base, const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  std::vector<Key> keys(n), scratch;
  kernels().of<T>().keys(args, 0, n, keys.data());
  scratch = keys;
  const Cut<Key> cut = cut_largest(keys.data(), scratch.data(), n, k);
  kernels().of<T>().feed(args, 0, n);
  take_cut(args, n, base, cut, out);
}

template <typename T>
void topk_large_scope(
    const char* op, const Feedback<T>& args, int64_t n, int64_t k, int64_t base, bool check, const Chosen<T>& out) {
  LargeScope<T> scope(kernels().of<T>(), args, n, check);
  if (!scope.pass_largest(k)) {
    refuse(op, args, n);
  }
  scope.deliver(k, base, out);
}

// Calls run(scope, check) for each scope; small ones go to different threads. `check` is left to the scope where it is
// alone and large, and reads what it selects from.
template <typename T, typename F>
void for_scopes(const char* op, const Feedback<T>& args, const Scopes& scopes, bool check, F&& run) {
  const bool large = scopes.size > kSegment, alone = large && scopes.count() == 1;
  if (check && !alone) {
    check_finite(op, args, scopes.numel);
  }
  if (large) {
    for (int64_t scope = 0; scope < scopes.count(); ++scope) {
      run(scope, check && alone);
    }
    return;
  }
  parallel_for(0, scopes.count(), std::max<int64_t>(1, kSegment / scopes.size), [&](int64_t first, int64_t last) {
    for (int64_t scope = first; scope < last; ++scope) {
      run(scope, false);
    }
  });
}

template <typename T>
void topk_scopes(const char* op, const Feedback<T>& args, const Scopes& scopes, bool check, const Chosen<T>& out) {
  for_scopes(op, args, scopes, check, [&](int64_t scope, bool check_scope) {
    const int64_t begin = scope * scopes.size, size = scopes.length(scope);
    const Chosen<T> to{out.values + scope * scopes.k, out.indices + scope * scopes.k};
    const Feedback<T> part = shifted(args, begin);
    if (size <= kSegment) {
      topk_small_scope(part, size, scopes.kept(scope), begin, to);
    } else {
      topk_large_scope(op, part, size, scopes.kept(scope), begin, check_scope, to);
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

// How many elements of a scope passed its threshold, and how many of them were written.
struct Passed {
  int64_t found, written;
};

template <typename T>
Passed threshold_small_scope(
    const Feedback<T>& args, int64_t n, key_t<acc_t<T>> low, int64_t capacity, int64_t base, const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  std::vector<Key> keys(n + kSegmentBuffer - kSegment), scratch;
  std::vector<uint32_t> offsets(keys.size());
  Scanned<Key> seen;
  const int64_t found = kernels().of<T>().feed_and_scan(args, 0, n, low, keys.data(), offsets.data(), &seen);
  Cut<Key> cut{0, 0};
  if (found > capacity) {
    scratch.assign(keys.data(), keys.data() + found);
    cut = cut_largest(keys.data(), scratch.data(), found, capacity, low, seen.largest);
  }
  int64_t place = 0;
  for (int64_t i = 0; i < found; ++i) {
    const bool tie = keys[i] == cut.bound && cut.ties > 0;
    cut.ties -= tie;
    if (keys[i] > cut.bound || tie) {
      take(args, offsets[i], base, out, place++);
    }
  }
  return {found, place};
}

template <typename T>
Passed threshold_large_scope(
    const char* op, const Feedback<T>& args, int64_t n, key_t<acc_t<T>> low, int64_t capacity, int64_t base, bool check,
    const Chosen<T>& out) {
  LargeScope<T> scope(kernels().of<T>(), args, n, check);
  if (!scope.pass(low, std::min(capacity, n / 8), 2 * capacity + kSegment)) {
    refuse(op, args, n);
  }
  const int64_t found = scope.found(), written = std::min(found, capacity);
  if (scope.overflow()) {
    scope.put_back();
    scope.pass_largest(capacity);
  }
  scope.deliver(written, base, out);
  return {found, written};
}

template <typename T>
void threshold_scopes(
    const char* op, const Feedback<T>& args, const Scopes& scopes, acc_t<T>* thresholds, int64_t target, bool check,
    const Chosen<T>& out, int64_t* counts) {
  using Key = key_t<acc_t<T>>;
  for_scopes(op, args, scopes, check, [&](int64_t scope, bool check_scope) {
    const int64_t begin = scope * scopes.size, size = scopes.length(scope), capacity = scopes.k;
    const Chosen<T> to{out.values + scope * capacity, out.indices + scope * capacity};
    const Feedback<T> part = shifted(args, begin);
    const Key low = std::max<Key>(1, key_of(thresholds[scope])) - 1;
    const auto [found, written] = size <= kSegment
                                      ? threshold_small_scope(part, size, low, capacity, begin, to)
                                      : threshold_large_scope(op, part, size, low, capacity, begin, check_scope, to);
    counts[scope] = written;
    std::fill(to.indices + written, to.indices + capacity, begin + size - 1);
    if (target > 0) {
      thresholds[scope] = adapted(thresholds[scope], found, target);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> threshold_compress_cpu(
    Tensor grad, Tensor residual, Tensor threshold, int64_t capacity, int64_t target, OptionalTensor velocity,
    double momentum, double residual_scale, bool check, int64_t scope_size) {
  const char* op = "threshold_compress_";
  const Scopes scopes = check_threshold_compress(
      grad, residual, threshold, capacity, target, velocity, momentum, residual_scale, scope_size);
  const Tensor g = contiguous(grad);
  const int64_t slots = scope_size == 0 ? capacity : scopes.count() * capacity;
  Tensor values = torch::stable::new_zeros(residual, {slots});
  Tensor indices = new_empty(residual, {slots}, ScalarType::Long);
  Tensor count = torch::stable::new_zeros(threshold, threshold.sizes(), ScalarType::Long);
  dispatch_floating(g.scalar_type(), [&]<typename T>() {
    acc_t<T>* bounds = data<acc_t<T>>(threshold);
    for (int64_t i = 0; i < threshold.numel(); ++i) {
      MOE_CHECK(
          bounds[i] >= 0 && std::isfinite(bounds[i]), op, ": expected threshold to be finite and at least 0, got ",
          bounds[i]);
    }
    if (scopes.numel > 0) {
      threshold_scopes<T>(
          op, feedback<T>(g, residual, velocity, momentum, residual_scale), scopes, bounds, target, check,
          {data<acc_t<T>>(values), data<int64_t>(indices)}, data<int64_t>(count));
    } else if (target > 0 && scope_size == 0) {
      bounds[0] = adapted(bounds[0], 0, target);
    }
  });
  return {values, indices, count};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("topk_compress_", TORCH_BOX(&topk_compress_cpu));
  m.impl("threshold_compress_", TORCH_BOX(&threshold_compress_cpu));
}

} // namespace moe_ext::compression::topk
