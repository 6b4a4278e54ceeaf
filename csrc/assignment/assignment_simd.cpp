// Loops of the assignments, compiled once for each instruction set, one token after the other. Reductions use sixteen
// lanes in a fixed order, so that the width of the vectors does not change the bits.
#include "assignment/assignment_tables.h"
#include "gating/score_math.h"

namespace moe_ext::assignment::MOE_ISA {
namespace {

constexpr int64_t kLanes = 16;

template <typename Acc>
constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());
// The smallest normal number, which replaces a smaller denominator.
template <typename Acc>
constexpr Acc kTiny = sizeof(Acc) == 8 ? static_cast<Acc>(0x1p-1022) : static_cast<Acc>(0x1p-126);

// Maximum of a row. NaN is ignored.
template <typename Acc, typename T>
MOE_INLINE Acc row_max(const T* row, int64_t n) {
  Acc lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = -kInfinity<Acc>;
  }
  int64_t e = 0;
  for (; e + kLanes <= n; e += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Acc x = to_acc(row[e + lane]);
      lanes[lane] = x > lanes[lane] ? x : lanes[lane];
    }
  }
  for (int64_t lane = 0; e + lane < n; ++lane) {
    const Acc x = to_acc(row[e + lane]);
    lanes[lane] = x > lanes[lane] ? x : lanes[lane];
  }
  Acc top = lanes[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) {
    top = lanes[lane] > top ? lanes[lane] : top;
  }
  return top;
}

template <typename Acc>
MOE_INLINE Acc row_sum(const Acc* row, int64_t n) {
  Acc lanes[kLanes] = {};
  int64_t e = 0;
  for (; e + kLanes <= n; e += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += row[e + lane];
    }
  }
  for (int64_t lane = 0; e + lane < n; ++lane) {
    lanes[lane] += row[e + lane];
  }
  Acc sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum += lanes[lane];
  }
  return sum;
}

// out = exp(row - max) or f(row); out times `inverse` sums to one. Returns false for NaN, +inf or nothing above -inf.
template <typename T, typename Acc>
MOE_INLINE bool row_scores(const T* __restrict row, int64_t n, gating::ScoreFn fn, Acc* __restrict out, Acc& inverse) {
  const Acc top = row_max<Acc>(row, n);
  if (gating::is_pointwise(fn)) {
    for (int64_t e = 0; e < n; ++e) {
      out[e] = gating::pointwise_score(fn, Acc(to_acc(row[e])));
    }
  } else {
    for (int64_t e = 0; e < n; ++e) {
      out[e] = exp_acc(to_acc(row[e]) - top);
    }
  }
  const Acc sum = row_sum(out, n);
  inverse = Acc(1) / (sum > kTiny<Acc> ? sum : kTiny<Acc>);
  return top < kInfinity<Acc> && top > -kInfinity<Acc> && sum == sum;
}

MOE_INLINE bool is_real(const bool* token_mask, int64_t token) {
  return token_mask == nullptr || token_mask[token];
}

template <typename T, typename Acc>
int64_t scores(const ScoreArgs<T>& args, int64_t begin, int64_t end, Acc* rows, Acc* score_sum, Acc* scratch) {
  const int64_t n = args.num_experts;
  for (int64_t t = begin; t < end; ++t) {
    Acc* __restrict row = rows != nullptr ? rows + t * n : scratch;
    if (!is_real(args.token_mask, t)) {
      for (int64_t e = 0; rows != nullptr && e < n; ++e) {
        row[e] = 0;
      }
      continue;
    }
    Acc inverse;
    if (!row_scores(args.logits + t * n, n, args.score_fn, row, inverse)) {
      return t;
    }
    Acc* __restrict sum = score_sum;
    for (int64_t e = 0; e < n; ++e) {
      row[e] *= inverse;
      sum[e] += row[e];
    }
  }
  return -1;
}

// grad = p f'/f (g - <p, g>), with f'/f = 1 for the softmax. g is the gradient of an expert's score sum plus that of
// its weight.
template <typename T, typename Acc>
void scores_backward(const ScoreGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch) {
  const int64_t n = args.scores.num_experts;
  Acc* __restrict score = scratch;
  Acc* __restrict g = scratch + n;
  for (int64_t t = begin; t < end; ++t) {
    T* __restrict grad = args.grad + t * n;
    if (!is_real(args.scores.token_mask, t)) {
      for (int64_t e = 0; e < n; ++e) {
        grad[e] = T{};
      }
      continue;
    }
    Acc inverse;
    row_scores(args.scores.logits + t * n, n, args.scores.score_fn, score, inverse);
    for (int64_t e = 0; e < n; ++e) {
      g[e] = args.grad_score_sum != nullptr ? args.grad_score_sum[e] : Acc(0);
    }
    if (args.grad_weights != nullptr) {
      const int64_t* __restrict idx = args.idx + t * n;
      const Acc* __restrict of_weights = args.grad_weights + t * n;
      for (int64_t e = 0; e < n; ++e) {
        g[e] += idx[e] >= 0 ? of_weights[e] : Acc(0);
      }
    }
    const Acc mean = dot<Acc>(score, g, n) * inverse;
    for (int64_t e = 0; e < n; ++e) {
      const Acc slope = gating::score_slope(args.scores.score_fn, score[e]);
      grad[e] = from_acc<T>(score[e] * inverse * slope * (g[e] - mean));
    }
  }
}

template <typename T, typename Acc>
int64_t cost(const ScoreArgs<T>& args, int64_t begin, int64_t end, Acc* out) {
  const int64_t n = args.num_experts;
  for (int64_t t = begin; t < end; ++t) {
    Acc inverse;
    if (is_real(args.token_mask, t) &&
        !row_scores(args.logits + t * n, n, gating::ScoreFn::kSoftmax, out + t * n, inverse)) {
      return t;
    }
  }
  return -1;
}

template <typename Acc>
void sinkhorn(const SinkhornArgs<Acc>& args, int64_t begin, int64_t end, Acc* column) {
  const int64_t n = args.num_experts;
  for (int64_t t = begin; t < end; ++t) {
    if (!is_real(args.token_mask, t)) {
      continue;
    }
    const Acc* __restrict row = args.cost + t * n;
    const Acc factor = Acc(1) / (static_cast<Acc>(args.num_real) * dot<Acc>(args.scale, row, n));
    Acc* __restrict sum = column;
    for (int64_t e = 0; e < n; ++e) {
      sum[e] += factor * row[e];
    }
  }
}

// Ties go to the lower expert. Each lane keeps its best value, the place of it, and its second best; then the lanes are
// merged.
Choice choose(const float* value, const double* price, int64_t n) {
  constexpr int64_t kPlaces = 8;
  double best[kPlaces], second[kPlaces], place[kPlaces];
  for (int64_t lane = 0; lane < kPlaces; ++lane) {
    best[lane] = second[lane] = -kInfinity<double>;
    place[lane] = 0;
  }
  const auto offer = [&](int64_t e, int64_t lane) {
    const double v = static_cast<double>(value[e]) - price[e];
    const bool above = v > best[lane];
    const double lower = above ? best[lane] : v;
    second[lane] = lower > second[lane] ? lower : second[lane];
    place[lane] = above ? static_cast<double>(e) : place[lane];
    best[lane] = above ? v : best[lane];
  };
  int64_t e = 0;
  for (; e + kPlaces <= n; e += kPlaces) {
    for (int64_t lane = 0; lane < kPlaces; ++lane) {
      offer(e + lane, lane);
    }
  }
  for (int64_t lane = 0; e + lane < n; ++lane) {
    offer(e + lane, lane);
  }
  for (int64_t lane = 1; lane < kPlaces; ++lane) {
    const bool wins = best[lane] > best[0] || (best[lane] == best[0] && place[lane] < place[0]);
    const double lower = wins ? best[0] : best[lane];
    second[0] = second[0] > lower ? second[0] : lower;
    second[0] = second[lane] > second[0] ? second[lane] : second[0];
    place[0] = wins ? place[lane] : place[0];
    best[0] = wins ? best[lane] : best[0];
  }
  return {static_cast<int64_t>(place[0]), n == 1 ? 0.0 : best[0] - second[0]};
}

template <typename T>
constexpr ScoreKernels<T> kScoreKernels = {
    scores<T, acc_t<T>>, scores_backward<T, acc_t<T>>, cost<T, acc_t<T>>, sinkhorn<acc_t<T>>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    {kScoreKernels<float>, kScoreKernels<double>, kScoreKernels<BFloat16>, kScoreKernels<Half>}, choose};

} // namespace moe_ext::assignment::MOE_ISA
