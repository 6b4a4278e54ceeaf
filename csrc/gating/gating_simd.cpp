// Loops of the gate, compiled once per instruction set.
// Forward: a tile holds one token a lane, [E, lanes] with as many lanes as a vector has. Every step then goes down the
// experts with whole vectors, no step reduces across lanes, and no number of experts leaves a tail:
// transpose in, maximum, exp, sum, score_sum, group limit, top-k by insertion into a sorted list, weights, write out.
// Backward: one row at a time, sums in 16 lanes and a fixed tree.
#include "common/simd.h"
#include "gating/gating_tables.h"

namespace moe_ext::gating::MOE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

template <typename Acc>
struct Lanes {
  static constexpr int64_t kCount = kVectorBytes / sizeof(Acc);
  using Int = std::conditional_t<sizeof(Acc) == 8, int64_t, int32_t>;
  typedef Acc Vec __attribute__((vector_size(kVectorBytes)));
  typedef Int IntVec __attribute__((vector_size(kVectorBytes)));
};

template <typename Acc>
using Vec = typename Lanes<Acc>::Vec;
template <typename Acc>
using IntVec = typename Lanes<Acc>::IntVec;
template <typename Acc>
using Int = typename Lanes<Acc>::Int;

template <typename Acc>
constexpr Acc kInf = static_cast<Acc>(__builtin_inf());
// A smaller denominator is replaced by this one.
template <typename Acc>
constexpr Acc kTiny = sizeof(Acc) == 8 ? Acc(0x1p-1022) : Acc(0x1p-126);

template <typename Acc>
MOE_INLINE Vec<Acc> load(const Acc* from) {
  Vec<Acc> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <typename Acc>
MOE_INLINE void store(Acc* to, Vec<Acc> v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

template <typename Acc>
MOE_INLINE Vec<Acc> broadcast(Acc x) {
  return x - Vec<Acc>{};
}

template <typename Acc>
MOE_INLINE Vec<Acc> max(Vec<Acc> a, Vec<Acc> b) {
  return a > b ? a : b;
}

// Parts of the scratch; each is [rows, lanes].
template <typename Acc>
struct Tile {
  Acc* x;              // [E] logits
  Acc* score;          // [E] exp(x - max), or sigmoid(x)
  Acc* key;            // [E] what selection compares where there is a bias
  Acc* score_sum;      // [E, 16] sums of the block
  Acc* chosen;         // [K] logits or scores of the chosen experts, then their weights
  Acc* list;           // [K] keys of the chosen experts, descending
  Int<Acc>* idx;       // [K] the chosen experts
  Acc* group;          // [G] group scores
  Acc* keep;           // [G] nonzero for a kept group
  Acc* group_list;     // [top_groups]
  Int<Acc>* group_idx; // [top_groups]

  Tile(Acc* scratch, const GateOptions& o) {
    const auto address = reinterpret_cast<uintptr_t>(scratch);
    Acc* next = scratch + ((64 - address % 64) % 64) / sizeof(Acc);
    const auto take = [&next](int64_t rows, int64_t lanes = Lanes<Acc>::kCount) {
      Acc* part = next;
      next += rows * lanes;
      return part;
    };
    x = take(o.num_experts);
    score = take(o.num_experts);
    key = take(o.num_experts);
    score_sum = take(o.num_experts, kMaxLanes);
    chosen = take(o.top_k);
    list = take(o.top_k);
    idx = reinterpret_cast<Int<Acc>*>(take(o.top_k));
    group = take(o.num_groups);
    keep = take(o.num_groups);
    group_list = take(o.top_groups);
    group_idx = reinterpret_cast<Int<Acc>*>(take(o.top_groups));
  }
};

// x[e][lane] = logits of token first + lane; zeros for a lane without a real token, whose logits are not looked at.
template <typename T, typename Acc>
MOE_INLINE void load_tile(Acc* x, Acc* active, const GateArgs<T>& args, int64_t first, int64_t end) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t num_experts = args.options.num_experts;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t token = first + lane;
    active[lane] = token < end && (args.token_mask == nullptr || args.token_mask[token]);
    if (active[lane] != 0) {
      const T* row = args.logits + token * num_experts;
      for (int64_t e = 0; e < num_experts; ++e) {
        x[e * kLanes + lane] = to_acc(row[e]);
      }
    } else {
      for (int64_t e = 0; e < num_experts; ++e) {
        x[e * kLanes + lane] = 0;
      }
    }
  }
}

// Fills score, and returns the factor that makes each lane's scores sum to one, zero in a lane that is not active.
template <typename Acc>
MOE_INLINE Vec<Acc> compute_scores(
    Acc* __restrict score, const Acc* __restrict x, ScoreFn fn, int64_t num_experts, const Acc* active,
    IntVec<Acc>& finite) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Vec<Acc> top = load(x);
  finite = top < kInf<Acc>;
  for (int64_t e = 1; e < num_experts; ++e) {
    const Vec<Acc> v = load(x + e * kLanes);
    finite &= v < kInf<Acc>;
    top = max<Acc>(v, top);
  }
  Acc shift[kLanes];
  store(shift, top);
  for (int64_t e = 0; e < num_experts; ++e) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t i = e * kLanes + lane;
      score[i] = fn == ScoreFn::kSigmoid ? sigmoid_acc(x[i]) : exp_acc(x[i] - shift[lane]);
    }
  }
  Vec<Acc> sum{};
  for (int64_t e = 0; e < num_experts; ++e) {
    sum += load(score + e * kLanes);
  }
  return load(active) / max<Acc>(sum, broadcast(kTiny<Acc>));
}

// key = score + bias; a logit of -inf stays out of reach of any bias.
template <typename Acc>
MOE_INLINE void bias_scores(Acc* key, const Acc* x, const Acc* score, Vec<Acc> factor, const Acc* bias, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  for (int64_t e = 0; e < n; ++e) {
    const Vec<Acc> biased = load(score + e * kLanes) * factor + bias[e];
    store(key + e * kLanes, load(x + e * kLanes) > -kInf<Acc> ? biased : broadcast(-kInf<Acc>));
  }
}

// The K largest keys of each lane, descending, the earlier expert first in a tie; -1 where there are fewer than K above
// -inf. An expert enters the sorted list before the first smaller key, and what is behind moves on by one.
template <typename Acc, int64_t kTopK>
void select_fixed(Acc* list, Int<Acc>* idx, const Acc* keys, int64_t num_experts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Vec<Acc> key[kTopK];
  IntVec<Acc> expert[kTopK];
  for (int64_t k = 0; k < kTopK; ++k) {
    key[k] = broadcast(-kInf<Acc>);
    expert[k] = IntVec<Acc>{} - 1;
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    const Vec<Acc> v = load(keys + e * kLanes);
    const IntVec<Acc> self = IntVec<Acc>{} + static_cast<Int<Acc>>(e);
    IntVec<Acc> here = v > key[kTopK - 1];
#pragma GCC unroll 8
    for (int64_t k = kTopK - 1; k > 0; --k) {
      const IntVec<Acc> above = v > key[k - 1];
      expert[k] = here ? (above ? expert[k - 1] : self) : expert[k];
      key[k] = here ? (above ? key[k - 1] : v) : key[k];
      here = above;
    }
    expert[0] = here ? self : expert[0];
    key[0] = here ? v : key[0];
  }
  for (int64_t k = 0; k < kTopK; ++k) {
    store(list + k * kLanes, key[k]);
    __builtin_memcpy(idx + k * kLanes, &expert[k], sizeof(expert[k]));
  }
}

// The same for any K, the list in memory.
template <typename Acc>
void select_any(Acc* list, Int<Acc>* idx, const Acc* keys, int64_t num_experts, int64_t top_k) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const auto load_idx = [idx](int64_t k) {
    IntVec<Acc> v;
    __builtin_memcpy(&v, idx + k * kLanes, sizeof(v));
    return v;
  };
  const auto store_idx = [idx](int64_t k, IntVec<Acc> v) { __builtin_memcpy(idx + k * kLanes, &v, sizeof(v)); };
  for (int64_t k = 0; k < top_k; ++k) {
    store(list + k * kLanes, broadcast(-kInf<Acc>));
    store_idx(k, IntVec<Acc>{} - 1);
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    const Vec<Acc> v = load(keys + e * kLanes);
    const IntVec<Acc> self = IntVec<Acc>{} + static_cast<Int<Acc>>(e);
    // No more than e + 1 places are filled.
    for (int64_t k = e < top_k ? e : top_k - 1; k >= 0; --k) {
      const Vec<Acc> old = load(list + k * kLanes);
      const IntVec<Acc> here = v > old;
      Vec<Acc> moved = v;
      IntVec<Acc> moved_idx = self;
      if (k > 0) {
        const Vec<Acc> before = load(list + (k - 1) * kLanes);
        const IntVec<Acc> above = v > before;
        moved = above ? before : v;
        moved_idx = above ? load_idx(k - 1) : self;
      }
      store(list + k * kLanes, here ? moved : old);
      store_idx(k, here ? moved_idx : load_idx(k));
    }
  }
}

template <typename Acc>
MOE_INLINE void select(Acc* list, Int<Acc>* idx, const Acc* keys, int64_t num_experts, int64_t top_k) {
  switch (top_k) {
    case 1:
      return select_fixed<Acc, 1>(list, idx, keys, num_experts);
    case 2:
      return select_fixed<Acc, 2>(list, idx, keys, num_experts);
    case 3:
      return select_fixed<Acc, 3>(list, idx, keys, num_experts);
    case 4:
      return select_fixed<Acc, 4>(list, idx, keys, num_experts);
    case 6:
      return select_fixed<Acc, 6>(list, idx, keys, num_experts);
    case 8:
      return select_fixed<Acc, 8>(list, idx, keys, num_experts);
    default:
      return select_any<Acc>(list, idx, keys, num_experts, top_k);
  }
}

// Keys outside the top_groups best groups become -inf. A group's score is its largest key, or, with a bias, the sum of
// its two largest; keys of -inf are left out of the sum.
template <typename Acc>
MOE_INLINE void limit_groups(const Tile<Acc>& tile, Acc* keys, bool biased, const GateOptions& options) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t group_size = options.num_experts / options.num_groups;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    Vec<Acc> first = broadcast(-kInf<Acc>);
    Vec<Acc> second = first;
    for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) {
      const Vec<Acc> v = load(keys + e * kLanes);
      second = max<Acc>(second, v > first ? first : v);
      first = max<Acc>(v, first);
    }
    const Vec<Acc> both = second > -kInf<Acc> ? first + second : first;
    store(tile.group + g * kLanes, biased ? both : first);
    store(tile.keep + g * kLanes, Vec<Acc>{});
  }
  select<Acc>(tile.group_list, tile.group_idx, tile.group, options.num_groups, options.top_groups);
  for (int64_t i = 0; i < options.top_groups * kLanes; ++i) {
    if (tile.group_idx[i] >= 0) {
      tile.keep[tile.group_idx[i] * kLanes + i % kLanes] = 1;
    }
  }
  for (int64_t e = 0; e < options.num_experts; ++e) {
    const Vec<Acc> keep = load(tile.keep + e / group_size * kLanes);
    store(keys + e * kLanes, keep != Acc(0) ? load(keys + e * kLanes) : broadcast(-kInf<Acc>));
  }
}

// tile.chosen: from the chosen experts' logits or scores to their weights.
template <typename Acc>
MOE_INLINE void compute_weights(const Tile<Acc>& tile, Vec<Acc> factor, const GateOptions& options) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = options.top_k;
  const Acc* from = options.softmax_of_chosen() ? tile.x : tile.score;
  for (int64_t i = 0; i < top_k * kLanes; ++i) {
    tile.chosen[i] = tile.idx[i] < 0 ? Acc(0) : from[tile.idx[i] * kLanes + i % kLanes];
  }
  if (options.softmax_of_chosen()) {
    Vec<Acc> top = load(tile.chosen);
    for (int64_t k = 1; k < top_k; ++k) {
      top = max<Acc>(load(tile.chosen + k * kLanes), top);
    }
    Acc shift[kLanes];
    store(shift, top);
    for (int64_t k = 0; k < top_k; ++k) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        tile.chosen[k * kLanes + lane] = exp_acc(tile.chosen[k * kLanes + lane] - shift[lane]);
      }
    }
  }
  Vec<Acc> denominator = broadcast(Acc(1));
  if (options.softmax_of_chosen() || (options.score_fn == ScoreFn::kSigmoid && options.renormalize)) {
    denominator = Vec<Acc>{};
    for (int64_t k = 0; k < top_k; ++k) {
      denominator += load(tile.chosen + k * kLanes);
    }
    denominator = max<Acc>(denominator, broadcast(kTiny<Acc>));
  }
  const Vec<Acc> scale = (options.score_fn == ScoreFn::kSoftmax && !options.renormalize)
                             ? factor * static_cast<Acc>(options.scale)
                             : broadcast(static_cast<Acc>(options.scale));
  for (int64_t k = 0; k < top_k; ++k) {
    store(tile.chosen + k * kLanes, load(tile.chosen + k * kLanes) / denominator * scale);
  }
}

template <typename T, typename Acc>
MOE_INLINE void write_tile(
    const Tile<Acc>& tile, const Acc* active, const GateArgs<T>& args, int64_t first, int64_t end, int64_t* counts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = args.options.top_k;
  for (int64_t lane = 0; lane < kLanes && first + lane < end; ++lane) {
    Acc* weights = args.weights + (first + lane) * top_k;
    int64_t* idx = args.idx + (first + lane) * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t expert = tile.idx[k * kLanes + lane];
      weights[k] = active[lane] != 0 ? tile.chosen[k * kLanes + lane] : Acc(0);
      idx[k] = active[lane] != 0 ? expert : -1;
      counts[expert] += active[lane] != 0;
    }
  }
}

// The first real token of the tile with a logit that is NaN or +inf, or with fewer than K experts to choose, or -1.
template <typename Acc>
MOE_INLINE int64_t refused(const Acc* active, IntVec<Acc> finite, const Int<Acc>* last_idx, int64_t first) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
    if (active[lane] != 0 && (finite[lane] == 0 || last_idx[lane] < 0)) {
      return first + lane;
    }
  }
  return -1;
}

template <typename Acc>
MOE_INLINE Acc reduce_lanes(Acc* lanes) {
  for (int64_t half = kMaxLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  return lanes[0];
}

template <typename T, typename Acc>
int64_t gate(const GateArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const GateOptions& options = args.options;
  const int64_t num_experts = options.num_experts;
  const Tile<Acc> tile(scratch, options);
  for (int64_t i = 0; i < num_experts * kMaxLanes; ++i) {
    tile.score_sum[i] = 0;
  }
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes];
    IntVec<Acc> finite;
    load_tile(tile.x, active, args, first, end);
    const Vec<Acc> factor = compute_scores<Acc>(tile.score, tile.x, options.score_fn, num_experts, active, finite);
    // Sixteen sums whatever the width of a vector: the same bits for each instruction set's lanes.
    Acc* sums = tile.score_sum + (first - begin) % kMaxLanes;
    for (int64_t e = 0; e < num_experts; ++e) {
      Acc* sum = sums + e * kMaxLanes;
      store(sum, load(sum) + load(tile.score + e * kLanes) * factor);
    }
    Acc* keys = tile.x;
    if (args.bias != nullptr) {
      keys = tile.key;
      const bool probabilities = options.score_fn != ScoreFn::kSigmoid;
      bias_scores<Acc>(keys, tile.x, tile.score, probabilities ? factor : broadcast(Acc(1)), args.bias, num_experts);
    }
    if (options.top_groups < options.num_groups) {
      limit_groups<Acc>(tile, keys, args.bias != nullptr, options);
    }
    select<Acc>(tile.list, tile.idx, keys, num_experts, options.top_k);
    const int64_t token = refused<Acc>(active, finite, tile.idx + (options.top_k - 1) * kLanes, first);
    if (token >= 0) {
      return token;
    }
    compute_weights<Acc>(tile, factor, options);
    write_tile(tile, active, args, first, end, counts);
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    score_sum[e] = reduce_lanes(tile.score_sum + e * kMaxLanes);
  }
  return -1;
}

template <typename T, typename Acc>
MOE_INLINE Acc row_max(const T* x, int64_t n) {
  Acc lanes[kMaxLanes];
  for (int64_t lane = 0; lane < kMaxLanes; ++lane) {
    lanes[lane] = -kInf<Acc>;
  }
  int64_t i = 0;
  for (; i + kMaxLanes <= n; i += kMaxLanes) {
    for (int64_t lane = 0; lane < kMaxLanes; ++lane) {
      const Acc v = to_acc(x[i + lane]);
      lanes[lane] = v > lanes[lane] ? v : lanes[lane];
    }
  }
  for (; i < n; ++i) {
    const Acc v = to_acc(x[i]);
    lanes[0] = v > lanes[0] ? v : lanes[0];
  }
  for (int64_t half = kMaxLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
    }
  }
  return lanes[0];
}

// Sum of a row in 16 lanes.
template <typename Acc>
MOE_INLINE Acc row_sum(const Acc* p, int64_t n) {
  Acc lanes[kMaxLanes] = {};
  int64_t i = 0;
  for (; i + kMaxLanes <= n; i += kMaxLanes) {
    for (int64_t lane = 0; lane < kMaxLanes; ++lane) {
      lanes[lane] += p[i + lane];
    }
  }
  for (int64_t lane = 0; i + lane < n; ++lane) {
    lanes[lane] += p[i + lane];
  }
  return reduce_lanes(lanes);
}

// p = exp(x - max x); returns their sum.
template <typename T, typename Acc>
MOE_INLINE Acc row_exp(Acc* __restrict p, const T* __restrict x, int64_t n) {
  const Acc top = row_max<T, Acc>(x, n);
  for (int64_t i = 0; i < n; ++i) {
    p[i] = exp_acc(to_acc(x[i]) - top);
  }
  return row_sum(p, n);
}

template <typename T, typename Acc>
MOE_INLINE Acc row_sigmoid(Acc* __restrict p, const T* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] = sigmoid_acc(to_acc(x[i]));
  }
  return row_sum(p, n);
}

// q = scores of the chosen experts, as their weights use them; returns what divides them.
template <typename T, typename Acc>
MOE_INLINE Acc chosen_scores(Acc* q, const T* x, const int64_t* idx, const GateOptions& options) {
  const int64_t top_k = options.top_k;
  for (int64_t k = 0; k < top_k; ++k) {
    q[k] = to_acc(x[idx[k]]);
  }
  if (options.softmax_of_chosen()) {
    const Acc top = row_max<Acc, Acc>(q, top_k);
    for (int64_t k = 0; k < top_k; ++k) {
      q[k] = exp_acc(q[k] - top);
    }
    return row_sum(q, top_k);
  }
  for (int64_t k = 0; k < top_k; ++k) {
    q[k] = sigmoid_acc(q[k]);
  }
  return options.renormalize ? row_sum(q, top_k) : Acc(1);
}

// Adds the gradient through weights that are q / sum q (or a plain sigmoid), which touches the chosen experts only.
template <typename T, typename Acc>
MOE_INLINE void add_chosen_grad(
    Acc* d, Acc* q, const T* x, const int64_t* idx, const Acc* grad_weights, const GateOptions& options) {
  const bool sigmoid = options.score_fn == ScoreFn::kSigmoid;
  const Acc denominator = chosen_scores<T, Acc>(q, x, idx, options);
  if (denominator < kTiny<Acc>) {
    return;
  }
  const bool normalized = !sigmoid || options.renormalize;
  const Acc mean = normalized ? dot<Acc>(q, grad_weights, options.top_k) / denominator : Acc(0);
  for (int64_t k = 0; k < options.top_k; ++k) {
    const Acc slope = sigmoid ? Acc(1) - q[k] : Acc(1);
    d[idx[k]] += static_cast<Acc>(options.scale) * (q[k] / denominator) * slope * (grad_weights[k] - mean);
  }
}

template <typename T, typename Acc>
void gate_backward(
    T* grad, const T* x, const int64_t* idx, const Acc* grad_weights, const Acc* grad_score_sum,
    const GateOptions& options, Acc* scratch) {
  const int64_t n = options.num_experts;
  const bool sigmoid = options.score_fn == ScoreFn::kSigmoid;
  const Acc scale = static_cast<Acc>(options.scale);
  Acc* d = scratch;
  Acc* p = scratch + n;
  Acc* q = scratch + 2 * n;
  const bool through_probabilities = !sigmoid && !options.softmax_of_chosen() && grad_weights != nullptr;
  const bool full = grad_score_sum != nullptr || through_probabilities;
  const Acc sum = !full ? Acc(0) : sigmoid ? row_sigmoid<T, Acc>(p, x, n) : row_exp<T, Acc>(p, x, n);
  if (sum >= kTiny<Acc>) {
    const Acc factor = Acc(1) / sum;
    Acc mean = grad_score_sum != nullptr ? dot<Acc>(p, grad_score_sum, n) * factor : Acc(0);
    for (int64_t k = 0; through_probabilities && k < options.top_k; ++k) {
      mean += p[idx[k]] * factor * scale * grad_weights[k];
    }
    for (int64_t e = 0; e < n; ++e) {
      const Acc slope = sigmoid ? Acc(1) - p[e] : Acc(1);
      d[e] = p[e] * factor * slope * ((grad_score_sum != nullptr ? grad_score_sum[e] : Acc(0)) - mean);
    }
    for (int64_t k = 0; through_probabilities && k < options.top_k; ++k) {
      d[idx[k]] += p[idx[k]] * factor * scale * grad_weights[k];
    }
  } else {
    for (int64_t e = 0; e < n; ++e) {
      d[e] = 0;
    }
  }
  if (grad_weights != nullptr && !through_probabilities) {
    add_chosen_grad<T, Acc>(d, q, x, idx, grad_weights, options);
  }
  for (int64_t e = 0; e < n; ++e) {
    grad[e] = from_acc<T>(d[e]);
  }
}

MOE_INLINE float log_acc(float x) {
  return __builtin_logf(x);
}

MOE_INLINE double log_acc(double x) {
  return __builtin_log(x);
}

template <typename T, typename Acc>
Acc logsumexp(const T* x, int64_t n) {
  const Acc top = row_max<T, Acc>(x, n);
  // A row of -inf, or one with +inf, where the difference of two infinities would be NaN; a NaN itself stays one.
  if (top == kInf<Acc> || top == -kInf<Acc>) {
    Acc result = top;
    for (int64_t e = 0; e < n; ++e) {
      result = to_acc(x[e]) != to_acc(x[e]) ? to_acc(x[e]) : result;
    }
    return result;
  }
  Acc lanes[kMaxLanes] = {};
  int64_t i = 0;
  for (; i + kMaxLanes <= n; i += kMaxLanes) {
    for (int64_t lane = 0; lane < kMaxLanes; ++lane) {
      lanes[lane] += exp_acc(to_acc(x[i + lane]) - top);
    }
  }
  for (int64_t lane = 0; i + lane < n; ++lane) {
    lanes[lane] += exp_acc(to_acc(x[i + lane]) - top);
  }
  return top + log_acc(reduce_lanes(lanes));
}

template <typename T, typename Acc>
void z_loss_backward(T* grad, const T* x, Acc factor, int64_t n, Acc* scratch) {
  const Acc sum = row_exp<T, Acc>(scratch, x, n);
  const Acc lse = row_max<T, Acc>(x, n) + log_acc(sum);
  for (int64_t e = 0; e < n; ++e) {
    grad[e] = from_acc<T>(factor * lse * (scratch[e] / sum));
  }
}

template <typename T>
constexpr GateKernels<T> kGateKernels = {
    gate<T, acc_t<T>>, gate_backward<T, acc_t<T>>, logsumexp<T, acc_t<T>>, z_loss_backward<T, acc_t<T>>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kGateKernels<float>, kGateKernels<double>, kGateKernels<BFloat16>, kGateKernels<Half>};

} // namespace moe_ext::gating::MOE_ISA
