// Gradient selection on CPU. Scopes that fit a segment are spread over threads, each handled by one thread. Larger
// scopes follow one another; large_scope.h runs each with all threads.
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cmath>
#include <sstream>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "selection/large_scope.h"
#include "selection/threshold_math.h"

namespace moe_ext::topk {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using OptionalTensor = std::optional<Tensor>;

// Bytes of a residual from which on stores bypass the caches.
constexpr int64_t kLeastStreamed = int64_t{8} << 20;

template <typename T>
Feedback<T> host_feedback(const FeedbackTensors& state, const Tensor& grad) {
  Feedback<T> args = feedback<T>(state, grad);
  args.streamed = !args.in_place() && grad.numel() * static_cast<int64_t>(sizeof(acc_t<T>)) >= kLeastStreamed;
  return args;
}

// Raises an error that names the first element that is not finite.
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
            " at element ", begin + i, " (grad ", to_acc(args.grad[begin + i]), ", residual ",
            args.residual_in[begin + i], ")");
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

// Selects in one scope of at most kSegment elements. Returns false if `check` is set and an element is not finite.
template <typename T>
bool topk_small_scope(
    const Feedback<T>& args, int64_t n, int64_t k, int64_t base, bool check, ScanBuffer<acc_t<T>>& buffer,
    const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  const auto& loops = kernels().of<T>();
  std::vector<Key> keys(n), scratch;
  loops.keys(args, 0, n, keys.data());
  const auto [low, most] = std::minmax_element(keys.begin(), keys.end());
  if (check && *most >= kInfinityKey<acc_t<T>>) {
    return false;
  }
  scratch = keys;
  const Cut<Key> cut = cut_largest(keys.data(), scratch.data(), n, k, *low, *most);
  if (k == 0 || cut.bound == 0) {
    loops.feed(args, 0, n);
    take_cut(args, n, base, cut, out);
    return true;
  }
  Scanned<Key> seen;
  const int64_t found = loops.feed_and_scan(args, 0, n, cut.bound - 1, buffer.found(), &seen);
  deliver_found(args, buffer.found(), found, cut, base, out);
  return true;
}

// Does the same in a scope of more than kSegment elements.
template <typename T>
bool topk_large_scope(const Feedback<T>& args, int64_t n, int64_t k, int64_t base, bool check, const Chosen<T>& out) {
  LargeScope<T> scope(kernels().of<T>(), args, n, check);
  if (!scope.pass_largest(k)) {
    return false;
  }
  scope.deliver(k, base, out);
  return true;
}

// Calls run(scope, check, buffer) -> finite for each scope; small scopes are spread over threads. `run` checks for NaN
// and infinity while feeding if the inputs stay intact, or if a single large scope can undo. Otherwise a pass over all
// elements checks first, because scopes that are already fed could not be undone.
template <typename T, typename F>
void for_scopes(const char* op, const Feedback<T>& args, const Scopes& scopes, bool check, F&& run) {
  const bool large = std::min(scopes.size, scopes.numel) > kSegment;
  const bool within = !args.in_place() || (large && scopes.count() == 1);
  if (check && !within) {
    check_finite(op, args, scopes.numel);
  }
  std::atomic<bool> finite = true;
  const auto run_from = [&](int64_t first, int64_t last) {
    ScanBuffer<acc_t<T>> buffer(args.velocity != nullptr, std::min(kSegment, scopes.size));
    for (int64_t scope = first; scope < last; ++scope) {
      if (!run(scope, check && within, buffer)) {
        finite = false;
        return;
      }
    }
  };
  if (large) {
    run_from(0, scopes.count());
  } else {
    parallel_for(0, scopes.count(), std::max<int64_t>(1, kSegment / scopes.size), run_from);
  }
  if (!finite) {
    refuse(op, args, scopes.numel);
  }
}

template <typename T>
void topk_scopes(const char* op, const Feedback<T>& args, const Scopes& scopes, bool check, const Chosen<T>& out) {
  for_scopes(op, args, scopes, check, [&](int64_t scope, bool check_scope, ScanBuffer<acc_t<T>>& buffer) {
    const int64_t begin = scope * scopes.size, size = scopes.length(scope), k = scopes.kept(scope);
    const Chosen<T> to{out.values + scope * scopes.k, out.indices + scope * scopes.k};
    const Feedback<T> part = shifted(args, begin);
    return size <= kSegment ? topk_small_scope(part, size, k, begin, check_scope, buffer, to)
                            : topk_large_scope(part, size, k, begin, check_scope, to);
  });
}

std::tuple<Tensor, Tensor> topk_compress_cpu(
    Tensor grad, Tensor residual, int64_t k, int64_t scope_size, OptionalTensor velocity, double momentum,
    double residual_scale, bool check, OptionalTensor residual_in, OptionalTensor velocity_in) {
  const FeedbackTensors state{grad, residual, velocity, residual_in, velocity_in, momentum, residual_scale};
  const Scopes scopes = check_topk_compress(state, k, scope_size);
  const Tensor g = contiguous(grad);
  Tensor values = new_empty(residual, {scopes.total()});
  Tensor indices = new_empty(residual, {scopes.total()}, ScalarType::Long);
  if (scopes.numel > 0) {
    dispatch_floating(g.scalar_type(), [&]<typename T>() {
      topk_scopes<T>(
          "topk_compress_", host_feedback<T>(state, g), scopes, check,
          {data<acc_t<T>>(values), data<int64_t>(indices)});
    });
  }
  return {values, indices};
}

// Number of elements of a scope that passed its threshold, and number of elements written to the result.
struct Passed {
  int64_t found, written;
  bool finite = true;
};

template <typename T>
Passed threshold_small_scope(
    const Feedback<T>& args, int64_t n, key_t<acc_t<T>> low, int64_t capacity, int64_t base,
    ScanBuffer<acc_t<T>>& buffer, const Chosen<T>& out) {
  using Key = key_t<acc_t<T>>;
  Scanned<Key> seen;
  const Found<acc_t<T>> passed = buffer.found();
  const int64_t found = kernels().of<T>().feed_and_scan(args, 0, n, low, passed, &seen);
  Cut<Key> cut{0, 0};
  if (found > capacity) {
    std::vector<Key> scratch(passed.keys, passed.keys + found);
    cut = cut_largest(passed.keys, scratch.data(), found, capacity, low, seen.largest);
  }
  const int64_t written = deliver_found(args, passed, found, cut, base, out);
  return {found, written, seen.largest < kInfinityKey<acc_t<T>>};
}

template <typename T>
Passed threshold_large_scope(
    const Feedback<T>& args, int64_t n, key_t<acc_t<T>> low, int64_t capacity, int64_t base, bool check,
    const Chosen<T>& out) {
  LargeScope<T> scope(kernels().of<T>(), args, n, check);
  if (!scope.pass(low, std::min(capacity, n / 8), 2 * capacity + kSegment)) {
    return {0, 0, false};
  }
  const int64_t found = scope.found(), written = std::min(found, capacity);
  if (scope.overflow()) {
    scope.put_back();
    scope.pass_largest(capacity);
  }
  scope.deliver(written, base, out);
  return {found, written};
}

// Writes to `found` [num_scopes] how many elements passed each threshold, and to `counts` how many were selected.
template <typename T>
void threshold_scopes(
    const char* op, const Feedback<T>& args, const Scopes& scopes, const acc_t<T>* thresholds, bool check,
    const Chosen<T>& out, int64_t* counts, int64_t* found) {
  using Key = key_t<acc_t<T>>;
  for_scopes(op, args, scopes, check, [&](int64_t scope, bool check_scope, ScanBuffer<acc_t<T>>& buffer) {
    const int64_t begin = scope * scopes.size, size = scopes.length(scope), capacity = scopes.k;
    const Chosen<T> to{out.values + scope * capacity, out.indices + scope * capacity};
    const Feedback<T> part = shifted(args, begin);
    const Key low = std::max<Key>(1, key_of(thresholds[scope])) - 1;
    const Passed passed = size <= kSegment ? threshold_small_scope(part, size, low, capacity, begin, buffer, to)
                                           : threshold_large_scope(part, size, low, capacity, begin, check_scope, to);
    found[scope] = passed.found;
    counts[scope] = passed.written;
    std::fill(to.indices + passed.written, to.indices + capacity, begin + size - 1);
    return passed.finite || !check_scope;
  });
}

std::tuple<Tensor, Tensor, Tensor> threshold_compress_cpu(
    Tensor grad, Tensor residual, Tensor threshold, int64_t capacity, int64_t target, OptionalTensor velocity,
    double momentum, double residual_scale, bool check, int64_t scope_size, OptionalTensor residual_in,
    OptionalTensor velocity_in) {
  const char* op = "threshold_compress_";
  const FeedbackTensors state{grad, residual, velocity, residual_in, velocity_in, momentum, residual_scale};
  const Scopes scopes = check_threshold_compress(state, threshold, capacity, target, scope_size);
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
    std::vector<int64_t> found(threshold.numel());
    if (scopes.numel > 0) {
      threshold_scopes<T>(
          op, host_feedback<T>(state, g), scopes, bounds, check, {data<acc_t<T>>(values), data<int64_t>(indices)},
          data<int64_t>(count), found.data());
    }
    for (int64_t i = 0; target > 0 && i < threshold.numel(); ++i) {
      bounds[i] = adapted(bounds[i], found[i], target);
    }
  });
  return {values, indices, count};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("topk_compress_", TORCH_BOX(&topk_compress_cpu));
  m.impl("threshold_compress_", TORCH_BOX(&threshold_compress_cpu));
}

} // namespace moe_ext::topk
