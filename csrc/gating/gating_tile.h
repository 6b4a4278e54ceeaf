// A tile of tokens for the loops of gates, compiled once per instruction set (*_simd.cpp): one token a lane,
// [rows, lanes] with as many lanes as a vector has. A step then goes down the experts with whole vectors: none reduces
// across lanes, and no number of experts leaves a tail.
#pragma once

#include "common/simd.h"
#include "gating/score_math.h"

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
constexpr Acc kInfinity = static_cast<Acc>(__builtin_inf());
// The smallest normal number: a smaller denominator is replaced by it.
template <typename Acc>
constexpr Acc kTiny = sizeof(Acc) == 8 ? static_cast<Acc>(0x1p-1022) : static_cast<Acc>(0x1p-126);

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
MOE_INLINE IntVec<Acc> load_idx(const Int<Acc>* from) {
  IntVec<Acc> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <typename Acc>
MOE_INLINE void store_idx(Int<Acc>* to, IntVec<Acc> v) {
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

// The parts of a scratch of scratch_size(options) elements.
template <typename Acc>
struct Tile {
  Acc* x;              // [E] logits
  Acc* score;          // [E] exp(x - max), or sigmoid(x)
  Acc* key;            // [E] what selection compares where there is a bias; gradients
  Acc* score_sum;      // [E, 16] sums of the block
  Acc* rows;           // [lanes, E] logits or gradients in Acc, before or after the transposition
  Acc* idle_row;       // [E] stands in for the row of a lane without a real token
  Acc* chosen;         // [K] logits or scores of the chosen experts, then their weights
  Acc* list;           // [K] keys of the chosen experts, descending; gradients of the weights
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
    rows = take(o.num_experts);
    idle_row = take(o.num_experts);
    chosen = take(o.top_k);
    list = take(o.list_size());
    idx = reinterpret_cast<Int<Acc>*>(take(o.list_size()));
    group = take(o.num_groups);
    keep = take(o.num_groups);
    group_list = take(o.top_groups);
    group_idx = reinterpret_cast<Int<Acc>*>(take(o.top_groups));
  }
};

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourIdx __attribute__((vector_size(16)));

// Elements of a (0 to 3) and b (4 to 7). GCC before 12 has no __builtin_shufflevector, and Clang has no other.
template <int kFirst, int kSecond, int kThird, int kFourth>
MOE_INLINE Four shuffle(Four a, Four b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFirst, kSecond, kThird, kFourth);
#else
  return __builtin_shuffle(a, b, FourIdx{kFirst, kSecond, kThird, kFourth});
#endif
}

// to[j][i] = from[i][j] for 4 x 4 numbers in rows of any stride.
MOE_INLINE void transpose_4x4(float* const* to, const float* const* from) {
  Four r[4];
  for (int i = 0; i < 4; ++i) {
    __builtin_memcpy(&r[i], from[i], sizeof(Four));
  }
  const Four a = shuffle<0, 4, 1, 5>(r[0], r[1]);
  const Four b = shuffle<0, 4, 1, 5>(r[2], r[3]);
  const Four c = shuffle<2, 6, 3, 7>(r[0], r[1]);
  const Four d = shuffle<2, 6, 3, 7>(r[2], r[3]);
  const Four out[4] = {
      shuffle<0, 1, 4, 5>(a, b), shuffle<2, 3, 6, 7>(a, b), shuffle<0, 1, 4, 5>(c, d), shuffle<2, 3, 6, 7>(c, d)};
  for (int i = 0; i < 4; ++i) {
    __builtin_memcpy(to[i], &out[i], sizeof(Four));
  }
}

// tile[e][lane] = rows[lane][e], or the other way round.
template <bool kIntoTile, typename Acc, typename Row>
MOE_INLINE void transpose(Acc* tile, Row* const* rows, int64_t num_experts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  int64_t e = 0;
  if constexpr (sizeof(Acc) == 4) {
    for (; e + 4 <= num_experts; e += 4) {
      Acc* experts[4] = {tile + e * kLanes, tile + (e + 1) * kLanes, tile + (e + 2) * kLanes, tile + (e + 3) * kLanes};
      for (int64_t lane = 0; lane < kLanes; lane += 4) {
        Row* tokens[4] = {rows[lane] + e, rows[lane + 1] + e, rows[lane + 2] + e, rows[lane + 3] + e};
        Acc* places[4] = {experts[0] + lane, experts[1] + lane, experts[2] + lane, experts[3] + lane};
        if constexpr (kIntoTile) {
          transpose_4x4(places, tokens);
        } else {
          transpose_4x4(tokens, places);
        }
      }
    }
  }
  for (; e < num_experts; ++e) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if constexpr (kIntoTile) {
        tile[e * kLanes + lane] = rows[lane][e];
      } else {
        rows[lane][e] = tile[e * kLanes + lane];
      }
    }
  }
}

// tile.x from the logits of the tokens from `first`. A lane that is not active has zeros: its logits are not looked at.
template <typename T, typename Acc>
MOE_INLINE void load_tile(const Tile<Acc>& tile, const Acc* active, const T* logits, int64_t first, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const Acc* rows[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const T* row = logits + (first + lane) * n;
    if (active[lane] == 0) {
      for (int64_t e = 0; e < n; ++e) {
        tile.idle_row[e] = 0;
      }
      rows[lane] = tile.idle_row;
    } else if constexpr (std::is_same_v<T, Acc>) {
      rows[lane] = row;
    } else {
      Acc* __restrict converted = tile.rows + lane * n;
      for (int64_t e = 0; e < n; ++e) {
        converted[e] = to_acc(row[e]);
      }
      rows[lane] = converted;
    }
  }
  transpose<true>(tile.x, rows, n);
}

// The rows of the tokens [first, end) of grad from `values`; zeros for a lane that is not active.
template <typename T, typename Acc>
MOE_INLINE void store_tile(
    T* grad, Acc* values, const Tile<Acc>& tile, const Acc* active, int64_t first, int64_t end, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Acc* rows[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    if (active[lane] == 0) {
      rows[lane] = tile.idle_row;
    } else if constexpr (std::is_same_v<T, Acc>) {
      rows[lane] = grad + (first + lane) * n;
    } else {
      rows[lane] = tile.rows + lane * n;
    }
  }
  transpose<false>(values, rows, n);
  for (int64_t lane = 0; lane < kLanes && first + lane < end; ++lane) {
    T* __restrict row = grad + (first + lane) * n;
    if (active[lane] == 0) {
      for (int64_t e = 0; e < n; ++e) {
        row[e] = T{};
      }
    } else if constexpr (!std::is_same_v<T, Acc>) {
      const Acc* __restrict from = rows[lane];
      for (int64_t e = 0; e < n; ++e) {
        row[e] = from_acc<T>(from[e]);
      }
    }
  }
}

// active[lane] = 1 for a real token, else 0.
template <typename Acc>
MOE_INLINE void load_mask(Acc* active, const bool* token_mask, int64_t first, int64_t end) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
    active[lane] = first + lane < end && (token_mask == nullptr || token_mask[first + lane]);
  }
}

// Two chains here and below, since a step waits for the one before it. A NaN behind the first row is passed over.
template <typename Acc>
MOE_INLINE Vec<Acc> column_max(const Acc* x, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Vec<Acc> even = load(x);
  Vec<Acc> odd = even;
  int64_t e = 1;
  for (; e + 2 <= n; e += 2) {
    odd = max<Acc>(load(x + e * kLanes), odd);
    even = max<Acc>(load(x + (e + 1) * kLanes), even);
  }
  return max<Acc>(e < n ? max<Acc>(load(x + e * kLanes), odd) : odd, even);
}

template <typename Acc>
MOE_INLINE Vec<Acc> column_sum(const Acc* x, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Vec<Acc> even{}, odd{};
  int64_t e = 0;
  for (; e + 2 <= n; e += 2) {
    even += load(x + e * kLanes);
    odd += load(x + (e + 1) * kLanes);
  }
  return (e < n ? even + load(x + e * kLanes) : even) + odd;
}

// out = exp(x - shift); in place if out is x.
template <typename Acc>
MOE_INLINE void column_exp(Acc* out, const Acc* x, Vec<Acc> shift, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Acc top[kLanes];
  store(top, shift);
  for (int64_t e = 0; e < n; ++e) {
    Acc values[kLanes];
    store(values, load(x + e * kLanes));
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      values[lane] = exp_acc(values[lane] - top[lane]);
    }
    store(out + e * kLanes, load(values));
  }
}

template <ScoreFn kFn, typename Acc>
MOE_INLINE void column_scores(Acc* out, const Acc* x, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  for (int64_t e = 0; e < n; ++e) {
    Acc values[kLanes];
    store(values, load(x + e * kLanes));
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      values[lane] = pointwise_score(kFn, values[lane]);
    }
    store(out + e * kLanes, load(values));
  }
}

// out = f(x) of a score function that looks at one logit alone; in place if out is x.
template <typename Acc>
MOE_INLINE void column_scores(ScoreFn fn, Acc* out, const Acc* x, int64_t n) {
  if (fn == ScoreFn::kSigmoid) {
    column_scores<ScoreFn::kSigmoid>(out, x, n);
  } else {
    column_scores<ScoreFn::kSqrtSoftplus>(out, x, n);
  }
}

// Calls a loop with the function of scores that is f'(x) / f(x): a loop for each, since they differ much in cost.
template <typename Acc, typename Loop>
MOE_INLINE void with_slope(ScoreFn fn, Loop loop) {
  if (fn == ScoreFn::kSqrtSoftplus) {
    loop([](Vec<Acc> scores) {
      Acc values[Lanes<Acc>::kCount];
      store(values, scores);
      for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
        values[lane] = sqrt_softplus_slope(values[lane]);
      }
      return load(values);
    });
  } else if (fn == ScoreFn::kSigmoid) {
    loop([](Vec<Acc> scores) { return Acc(1) - scores; });
  } else {
    loop([](Vec<Acc>) { return broadcast(Acc(1)); });
  }
}

// Fills score, and returns the factor that makes each lane's scores sum to one, zero in a lane that is not active.
template <typename Acc>
MOE_INLINE Vec<Acc> compute_scores(
    const Tile<Acc>& tile, ScoreFn fn, int64_t num_experts, const Acc* active, IntVec<Acc>& finite) {
  const Vec<Acc> top = column_max(tile.x, num_experts);
  if (is_pointwise(fn)) {
    column_scores(fn, tile.score, tile.x, num_experts);
  } else {
    column_exp(tile.score, tile.x, top, num_experts);
  }
  const Vec<Acc> sum = column_sum(tile.score, num_experts);
  // A NaN that the maximum passes over makes the sum NaN.
  finite = (top < kInfinity<Acc>)&(sum == sum);
  return load(active) / max<Acc>(broadcast(kTiny<Acc>), sum);
}

// tile.chosen: the weights of the chosen experts; `sorted` says that tile.list holds their logits, the largest first. A
// choice of -1 weighs nothing.
template <typename Acc>
MOE_INLINE void compute_weights(const Tile<Acc>& tile, Vec<Acc> factor, bool sorted, const GateOptions& options) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = options.top_k;
  const bool softmax_of_chosen = options.softmax_of_chosen();
  if (softmax_of_chosen && sorted) {
    column_exp(tile.chosen, tile.list, load(tile.list), top_k);
  } else {
    const Acc* from = softmax_of_chosen ? tile.x : tile.score;
    const Acc nothing = softmax_of_chosen ? -kInfinity<Acc> : Acc(0);
    for (int64_t i = 0; i < top_k * kLanes; ++i) {
      tile.chosen[i] = tile.idx[i] < 0 ? nothing : from[tile.idx[i] * kLanes + i % kLanes];
    }
    if (softmax_of_chosen) {
      column_exp(tile.chosen, tile.chosen, column_max(tile.chosen, top_k), top_k);
    }
  }
  Vec<Acc> denominator = broadcast(Acc(1));
  Vec<Acc> scale = broadcast(static_cast<Acc>(options.scale));
  if (softmax_of_chosen || options.renormalize) {
    denominator = max<Acc>(broadcast(kTiny<Acc>), column_sum(tile.chosen, top_k));
  } else if (options.score_fn == ScoreFn::kSoftmax) {
    scale *= factor;
  }
  for (int64_t k = 0; k < top_k; ++k) {
    store(tile.chosen + k * kLanes, load(tile.chosen + k * kLanes) / denominator * scale);
  }
}

} // namespace
} // namespace moe_ext::gating::MOE_ISA
