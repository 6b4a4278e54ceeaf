// A tile of tokens for the loops of gates, compiled once per instruction set (*_simd.cpp). Each lane of a vector holds
// one token; arrays are [rows, lanes]. A loop over experts then works on whole vectors: it never reduces across lanes,
// and no number of experts leaves a tail.
#pragma once

#include "common/simd.h"
#include "gating/score_math.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
// The smallest normal number. It replaces smaller denominators.
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

// The arrays of a tile, in scratch memory of scratch_size(options) elements.
template <typename Acc>
struct Tile {
  Acc* x;              // [E] logits
  Acc* score;          // [E] exp(x - max), or sigmoid(x)
  Acc* key;            // [E] keys of the selection if they are not the logits; gradients in the backward pass
  Acc* score_sum;      // [E, 16] sums of the block
  Acc* rows;           // [lanes, E] logits or gradients in Acc, before or after the transposition
  Acc* idle_row;       // [E] row for lanes without a real token
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

// A vector of all lanes, viewed as quads of four numbers.
using Quads = Vec<float>;

#if defined(__AVX512F__)
// Loads four numbers of each of rows[0], rows[4], rows[8] and rows[12].
MOE_INLINE Quads load_quads(const float* const* rows, int64_t e) {
  __m512 r = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + e));
  r = _mm512_insertf32x4(r, _mm_loadu_ps(rows[4] + e), 1);
  r = _mm512_insertf32x4(r, _mm_loadu_ps(rows[8] + e), 2);
  return _mm512_insertf32x4(r, _mm_loadu_ps(rows[12] + e), 3);
}

MOE_INLINE void store_quads(float* const* rows, int64_t e, Quads r) {
  _mm_storeu_ps(rows[0] + e, _mm512_castps512_ps128(r));
  _mm_storeu_ps(rows[4] + e, _mm512_extractf32x4_ps(r, 1));
  _mm_storeu_ps(rows[8] + e, _mm512_extractf32x4_ps(r, 2));
  _mm_storeu_ps(rows[12] + e, _mm512_extractf32x4_ps(r, 3));
}

// Transposes the 4 x 4 numbers in each 16 bytes of four vectors, in place.
MOE_INLINE void transpose_quads(Quads& r0, Quads& r1, Quads& r2, Quads& r3) {
  const __m512 a = _mm512_unpacklo_ps(r0, r1), b = _mm512_unpacklo_ps(r2, r3);
  const __m512 c = _mm512_unpackhi_ps(r0, r1), d = _mm512_unpackhi_ps(r2, r3);
  r0 = _mm512_shuffle_ps(a, b, 0x44);
  r1 = _mm512_shuffle_ps(a, b, 0xEE);
  r2 = _mm512_shuffle_ps(c, d, 0x44);
  r3 = _mm512_shuffle_ps(c, d, 0xEE);
}
#elif defined(__AVX2__)
// Loads four numbers of each of rows[0] and rows[4].
MOE_INLINE Quads load_quads(const float* const* rows, int64_t e) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + e)), _mm_loadu_ps(rows[4] + e), 1);
}

MOE_INLINE void store_quads(float* const* rows, int64_t e, Quads r) {
  _mm_storeu_ps(rows[0] + e, _mm256_castps256_ps128(r));
  _mm_storeu_ps(rows[4] + e, _mm256_extractf128_ps(r, 1));
}

// Transposes the 4 x 4 numbers in each 16 bytes of four vectors, in place.
MOE_INLINE void transpose_quads(Quads& r0, Quads& r1, Quads& r2, Quads& r3) {
  const __m256 a = _mm256_unpacklo_ps(r0, r1), b = _mm256_unpacklo_ps(r2, r3);
  const __m256 c = _mm256_unpackhi_ps(r0, r1), d = _mm256_unpackhi_ps(r2, r3);
  r0 = _mm256_shuffle_ps(a, b, 0x44);
  r1 = _mm256_shuffle_ps(a, b, 0xEE);
  r2 = _mm256_shuffle_ps(c, d, 0x44);
  r3 = _mm256_shuffle_ps(c, d, 0xEE);
}
#else
// Selects elements of a (0 to 3) and b (4 to 7). GCC before 12 has no __builtin_shufflevector, Clang no
// __builtin_shuffle.
template <int kFirst, int kSecond, int kThird, int kFourth>
MOE_INLINE Quads shuffle(Quads a, Quads b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kFirst, kSecond, kThird, kFourth);
#else
  return __builtin_shuffle(a, b, IntVec<float>{kFirst, kSecond, kThird, kFourth});
#endif
}

MOE_INLINE Quads load_quads(const float* const* rows, int64_t e) {
  return load<float>(rows[0] + e);
}

MOE_INLINE void store_quads(float* const* rows, int64_t e, Quads r) {
  store<float>(rows[0] + e, r);
}

// Transposes the 4 x 4 numbers of four vectors, in place.
MOE_INLINE void transpose_quads(Quads& r0, Quads& r1, Quads& r2, Quads& r3) {
  const Quads a = shuffle<0, 4, 1, 5>(r0, r1), b = shuffle<0, 4, 1, 5>(r2, r3);
  const Quads c = shuffle<2, 6, 3, 7>(r0, r1), d = shuffle<2, 6, 3, 7>(r2, r3);
  r0 = shuffle<0, 1, 4, 5>(a, b);
  r1 = shuffle<2, 3, 6, 7>(a, b);
  r2 = shuffle<0, 1, 4, 5>(c, d);
  r3 = shuffle<2, 3, 6, 7>(c, d);
}
#endif

// Sets tile[e][lane] = rows[lane][e], or the inverse. Works on four experts at a time: before the transposition vector
// i holds row i of each four rows, afterwards expert e + i of all lanes.
template <bool kIntoTile, typename Acc, typename Row>
MOE_INLINE void transpose(Acc* tile, Row* const* rows, int64_t num_experts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  int64_t e = 0;
  if constexpr (sizeof(Acc) == 4) {
    for (; e + 4 <= num_experts; e += 4) {
      Acc* at = tile + e * kLanes;
      if constexpr (kIntoTile) {
        Quads r0 = load_quads(rows, e), r1 = load_quads(rows + 1, e);
        Quads r2 = load_quads(rows + 2, e), r3 = load_quads(rows + 3, e);
        transpose_quads(r0, r1, r2, r3);
        store(at, r0);
        store(at + kLanes, r1);
        store(at + 2 * kLanes, r2);
        store(at + 3 * kLanes, r3);
      } else {
        Quads r0 = load(at), r1 = load(at + kLanes), r2 = load(at + 2 * kLanes), r3 = load(at + 3 * kLanes);
        transpose_quads(r0, r1, r2, r3);
        store_quads(rows, e, r0);
        store_quads(rows + 1, e, r1);
        store_quads(rows + 2, e, r2);
        store_quads(rows + 3, e, r3);
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

template <typename Acc>
MOE_INLINE void fill(Acc* to, Acc value, int64_t n) {
  for (int64_t e = 0; e < n; ++e) {
    to[e] = value;
  }
}

// Prefetches the rows of the next tile, which may lie past the end. A tile of 64 experts fills a page, and the hardware
// prefetcher stops at the end of a page.
template <typename T, typename Acc = acc_t<T>>
MOE_INLINE void ask_for_next_tile(const T* rows, int64_t first, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const auto* next = reinterpret_cast<const char*>(rows + (first + kLanes) * n);
  for (int64_t i = 0; i < kLanes * n * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(next + i, 0, 2);
  }
}

// Loads the logits of the tokens from `first` on into tile.x. A lane that is not active gets zeros without a read.
template <typename T, typename Acc>
MOE_INLINE void load_tile(const Tile<Acc>& tile, const Acc* active, const T* logits, int64_t first, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const Acc* rows[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const T* row = logits + (first + lane) * n;
    if (active[lane] == 0) {
      fill(tile.idle_row, Acc(0), n);
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

// Chooses where each lane computes its row of `grad`: in `grad` itself if T is Acc, otherwise in the tile. A lane that
// is not active writes to tile.idle_row.
template <typename T, typename Acc>
MOE_INLINE void rows_of(Acc** rows, T* grad, const Tile<Acc>& tile, const Acc* active, int64_t first, int64_t n) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
    if (active[lane] == 0) {
      rows[lane] = tile.idle_row;
    } else if constexpr (std::is_same_v<T, Acc>) {
      rows[lane] = grad + (first + lane) * n;
    } else {
      rows[lane] = tile.rows + lane * n;
    }
  }
}

// Converts the rows from `rows_of` to the rows of the tokens [first, end) of grad. Lanes that are not active get zeros.
template <typename T, typename Acc>
MOE_INLINE void finish_rows(T* grad, Acc* const* rows, const Acc* active, int64_t first, int64_t end, int64_t n) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount && first + lane < end; ++lane) {
    T* __restrict row = grad + (first + lane) * n;
    if (active[lane] == 0) {
      fill(row, T{}, n);
    } else if constexpr (!std::is_same_v<T, Acc>) {
      const Acc* __restrict from = rows[lane];
      for (int64_t e = 0; e < n; ++e) {
        row[e] = from_acc<T>(from[e]);
      }
    }
  }
}

// Writes the columns `values` to the rows of the tokens [first, end) of grad. Lanes that are not active get zeros.
template <typename T, typename Acc>
MOE_INLINE void store_tile(
    T* grad, Acc* values, const Tile<Acc>& tile, const Acc* active, int64_t first, int64_t end, int64_t n) {
  Acc* rows[Lanes<Acc>::kCount];
  rows_of(rows, grad, tile, active, first, n);
  transpose<false>(values, rows, n);
  finish_rows(grad, rows, active, first, end, n);
}

// Sets active[lane] to 1 for a real token, otherwise to 0.
template <typename Acc>
MOE_INLINE void load_mask(Acc* active, const bool* token_mask, int64_t first, int64_t end) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
    active[lane] = first + lane < end && (token_mask == nullptr || token_mask[first + lane]);
  }
}

// Maximum over experts, without NaN after the first row. Two accumulators halve the chain of dependent operations.
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

// Computes out = exp(x - shift). `out` may be x.
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

// Computes out = f(x) for a pointwise score function. `out` may be x.
template <typename Acc>
MOE_INLINE void column_scores(ScoreFn fn, Acc* out, const Acc* x, int64_t n) {
  if (fn == ScoreFn::kSigmoid) {
    column_scores<ScoreFn::kSigmoid>(out, x, n);
  } else {
    column_scores<ScoreFn::kSqrtSoftplus>(out, x, n);
  }
}

// Calls loop(slope), where slope(scores) is f'(x) / f(x). Each score function gets its own instance of the loop,
// because slopes differ much in cost.
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

// Fills tile.score and sets `finite`. Returns the factor by which a lane's scores sum to one, or 0 if it is not active.
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
  // The maximum ignores NaN, but the sum does not.
  finite = (top < kInfinity<Acc>)&(sum == sum);
  return load(active) / max<Acc>(broadcast(kTiny<Acc>), sum);
}

// Computes the weights of the chosen experts in tile.chosen. `sorted` tells that tile.list holds their logits in
// descending order. A choice of -1 gets weight 0.
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
