// Loops of the gate, compiled once per instruction set. They work on one tile of tokens at a time (gating_tile.h).
// Forward: transpose in, maximum, exp, sum, score_sum, group limit, top-k by insertion into a sorted list, weights,
// write out. Backward: recompute the scores, gradient through scores, gradient through weights, transpose out.
#include "gating/gating_select.h"

namespace moe_ext::gating::MOE_ISA {
namespace {

// Sets key = score + bias, or -inf for a logit of -inf, so that no bias can make such an expert eligible.
template <typename Acc>
MOE_INLINE void bias_scores(const Tile<Acc>& tile, Vec<Acc> factor, const Acc* bias, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  for (int64_t e = 0; e < n; ++e) {
    const Vec<Acc> biased = load(tile.score + e * kLanes) * factor + bias[e];
    const IntVec<Acc> possible = load(tile.x + e * kLanes) > -kInfinity<Acc>;
    store(tile.key + e * kLanes, possible ? biased : broadcast(-kInfinity<Acc>));
  }
}

// Sets the keys of all but the top_groups best groups to -inf. The score of a group is the sum of its group_terms
// largest keys, without keys of -inf.
template <typename Acc>
MOE_INLINE void limit_groups(const Tile<Acc>& tile, Acc* keys, const GateOptions& options) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t group_size = options.num_experts / options.num_groups;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    select<Acc>(tile.list, tile.idx, keys + g * group_size * kLanes, group_size, options.group_terms);
    Vec<Acc> sum = load(tile.list);
    for (int64_t i = 1; i < options.group_terms; ++i) {
      const Vec<Acc> next = load(tile.list + i * kLanes);
      sum = next > -kInfinity<Acc> ? sum + next : sum;
    }
    store(tile.group + g * kLanes, sum);
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
    store(keys + e * kLanes, keep != Acc(0) ? load(keys + e * kLanes) : broadcast(-kInfinity<Acc>));
  }
}

template <typename T, typename Acc>
MOE_INLINE void write_tile(
    const Tile<Acc>& tile, const Acc* active, const GateArgs<T>& args, int64_t first, int64_t end, int64_t* counts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = args.options.top_k;
  for (int64_t lane = 0; lane < kLanes && first + lane < end; ++lane) {
    Acc* __restrict weights = args.weights + (first + lane) * top_k;
    int64_t* __restrict idx = args.idx + (first + lane) * top_k;
    if (active[lane] == 0) {
      for (int64_t k = 0; k < top_k; ++k) {
        weights[k] = 0;
        idx[k] = -1;
      }
      continue;
    }
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t expert = tile.idx[k * kLanes + lane];
      weights[k] = tile.chosen[k * kLanes + lane];
      idx[k] = expert;
      ++counts[expert];
    }
  }
}

// Returns the first real token of the tile that has a logit of NaN or +inf or fewer than K eligible experts, or -1.
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

// Adds scores to sixteen sums per expert, so that instruction sets with any width of vectors add in the same order.
template <typename Acc>
MOE_INLINE void add_scores(const Tile<Acc>& tile, Acc* sums, Vec<Acc> factor, int64_t num_experts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  for (int64_t e = 0; e < num_experts; ++e) {
    store(sums + e * kMaxLanes, load(sums + e * kMaxLanes) + load(tile.score + e * kLanes) * factor);
  }
}

template <typename T, typename Acc>
int64_t gate(const GateArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const GateOptions& options = args.options;
  const int64_t num_experts = options.num_experts;
  const bool biased = args.bias != nullptr;
  const Tile<Acc> tile(scratch, options);
  for (int64_t i = 0; i < num_experts * kMaxLanes; ++i) {
    tile.score_sum[i] = 0;
  }
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes];
    IntVec<Acc> finite;
    load_mask(active, args.token_mask, first, end);
    load_tile(tile, active, args.logits, first, num_experts);
    ask_for_next_tile(args.logits, first, num_experts);
    const Vec<Acc> factor = compute_scores(tile, options.score_fn, num_experts, active, finite);
    add_scores(tile, tile.score_sum + (first - begin) % kMaxLanes, factor, num_experts);
    Acc* keys = biased ? tile.key : tile.x;
    if (biased) {
      const Vec<Acc> unit = is_pointwise(options.score_fn) ? broadcast(Acc(1)) : factor;
      bias_scores(tile, unit, args.bias, num_experts);
    }
    if (options.top_groups < options.num_groups) {
      limit_groups(tile, keys, options);
    }
    select(tile.list, tile.idx, keys, num_experts, options.top_k);
    const int64_t token = refused<Acc>(active, finite, tile.idx + (options.top_k - 1) * kLanes, first);
    if (token >= 0) {
      return token;
    }
    compute_weights(tile, factor, !biased, options);
    write_tile(tile, active, args, first, end, counts);
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    score_sum[e] = reduce_lanes(tile.score_sum + e * kMaxLanes);
  }
  return -1;
}

MOE_INLINE bool has_choice(const int64_t* idx, int64_t top_k) {
  int64_t highest = -1;
  for (int64_t k = 0; k < top_k; ++k) {
    highest = idx[k] > highest ? idx[k] : highest;
  }
  return highest >= 0;
}

// Flags about the choices of a tile: `outside` is negative if one is outside of [-1, n), `none` if one is negative.
struct Choices {
  int64_t outside = 0;
  int64_t none = 0;
};

MOE_INLINE Choices look_at(const int64_t* idx, int64_t count, int64_t n) {
  Choices found;
  for (int64_t i = 0; i < count; ++i) {
    // The sign bit is set if either term is negative. If one term wraps around, the other is negative.
    const uint64_t choice = static_cast<uint64_t>(idx[i]);
    found.outside |= static_cast<int64_t>((choice + 1) | (static_cast<uint64_t>(n - 1) - choice));
    found.none |= idx[i];
  }
  return found;
}

MOE_INLINE int64_t first_outside(const int64_t* idx, int64_t top_k, int64_t n) {
  int64_t i = 0;
  while (idx[i] >= -1 && idx[i] < n) {
    ++i;
  }
  return i / top_k;
}

// Maps a choice of -1 to expert 0, to which a gradient of zero is then added.
MOE_INLINE int64_t expert_of(int64_t choice) {
  return choice < 0 ? 0 : choice;
}

// Loads the logits of the chosen experts into tile.chosen, and the gradients of their weights into tile.list. A choice
// of -1 gets the logit -inf, hence no weight, and a zero gradient. Lanes from `tokens` on hold garbage.
template <typename T, typename Acc>
MOE_INLINE void load_chosen(
    const Tile<Acc>& tile, const GateGradArgs<T>& args, int64_t first, int64_t tokens, bool has_none) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = args.options.top_k;
  const Acc* grads[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t token = first + (lane < tokens ? lane : 0);
    const int64_t* idx = args.idx + token * top_k;
    const T* row = args.logits + token * args.options.num_experts;
    grads[lane] = args.grad_weights + token * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      tile.chosen[k * kLanes + lane] = to_acc(row[expert_of(idx[k])]);
    }
  }
  transpose<true>(tile.list, grads, top_k);
  for (int64_t i = 0; has_none && i < tokens * top_k; ++i) {
    if (args.idx[first * top_k + i] < 0) {
      const int64_t place = i % top_k * kLanes + i / top_k;
      tile.chosen[place] = -kInfinity<Acc>;
      tile.list[place] = 0;
    }
  }
}

// Sets tile.key = p f'/f (g - <p, g>), the gradient through the normalised scores p, with f'/f = 1 for the softmax. g
// is the gradient of score_sum, equal for all tokens. If the weights are probabilities (`of_weights`), their gradients
// are part of <p, g>, and tile.chosen becomes the separate term of the choices idx [tokens, K].
template <typename Acc>
MOE_INLINE void scores_backward(
    const Tile<Acc>& tile, Vec<Acc> factor, const Acc* grad_score_sum, bool of_weights, const int64_t* idx,
    int64_t tokens, const GateOptions& options) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Vec<Acc> mean{};
  for (int64_t e = 0; grad_score_sum != nullptr && e < options.num_experts; ++e) {
    mean += load(tile.score + e * kLanes) * grad_score_sum[e];
  }
  mean *= factor;
  if (of_weights) {
    for (int64_t lane = 0; lane < tokens; ++lane) {
      for (int64_t k = 0; k < options.top_k; ++k) {
        const int64_t expert = expert_of(idx[lane * options.top_k + k]);
        tile.chosen[k * kLanes + lane] = tile.score[expert * kLanes + lane];
      }
    }
    for (int64_t k = 0; k < options.top_k; ++k) {
      const Vec<Acc> p = load(tile.chosen + k * kLanes) * factor;
      const Vec<Acc> own = p * static_cast<Acc>(options.scale) * load(tile.list + k * kLanes);
      store(tile.chosen + k * kLanes, own);
      mean += own;
    }
  }
  with_slope<Acc>(options.score_fn, [&](auto slope_of) {
    for (int64_t e = 0; e < options.num_experts; ++e) {
      const Vec<Acc> s = load(tile.score + e * kLanes);
      const Acc g = grad_score_sum != nullptr ? grad_score_sum[e] : Acc(0);
      store(tile.key + e * kLanes, s * factor * slope_of(s) * (g - mean));
    }
  });
}

// Replaces the chosen logits in tile.chosen by scale q f'/f (g - <q, g>), the gradient through weights q that are
// scores divided by their sum over the chosen experts. Without renormalisation, <q, g> is absent.
template <typename Acc>
MOE_INLINE void weights_backward(const Tile<Acc>& tile, const GateOptions& options) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = options.top_k;
  const bool pointwise = is_pointwise(options.score_fn);
  if (pointwise) {
    column_scores(options.score_fn, tile.chosen, tile.chosen, top_k);
  } else {
    column_exp(tile.chosen, tile.chosen, column_max(tile.chosen, top_k), top_k);
  }
  const bool normalized = !pointwise || options.renormalize;
  Vec<Acc> factor = broadcast(Acc(1));
  Vec<Acc> mean{};
  if (normalized) {
    factor = Acc(1) / max<Acc>(broadcast(kTiny<Acc>), column_sum(tile.chosen, top_k));
    for (int64_t k = 0; k < top_k; ++k) {
      mean += load(tile.chosen + k * kLanes) * load(tile.list + k * kLanes);
    }
    mean *= factor;
  }
  with_slope<Acc>(options.score_fn, [&](auto slope_of) {
    for (int64_t k = 0; k < top_k; ++k) {
      const Vec<Acc> s = load(tile.chosen + k * kLanes);
      const Vec<Acc> g = load(tile.list + k * kLanes) - mean;
      store(tile.chosen + k * kLanes, static_cast<Acc>(options.scale) * (s * factor) * slope_of(s) * g);
    }
  });
}

template <typename T, typename Acc>
int64_t gate_backward(const GateGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const GateOptions& options = args.options;
  const int64_t n = options.num_experts, top_k = options.top_k;
  const bool of_weights = args.grad_weights != nullptr;
  const bool of_probabilities = of_weights && options.score_fn == ScoreFn::kSoftmax && !options.softmax_of_chosen();
  const Tile<Acc> tile(scratch, options);
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t tokens = end - first < kLanes ? end - first : kLanes;
    const int64_t* idx = args.idx + first * top_k;
    const Choices choices = look_at(idx, tokens * top_k, n);
    if (choices.outside < 0) {
      return first + first_outside(idx, top_k, n);
    }
    Acc active[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      active[lane] = lane < tokens && (choices.none >= 0 || has_choice(idx + lane * top_k, top_k));
    }
    const bool of_scores = args.grad_score_sum != nullptr || of_probabilities;
    if (of_scores) {
      load_tile(tile, active, args.logits, first, n);
    }
    if (of_weights) {
      load_chosen(tile, args, first, tokens, choices.none < 0);
    }
    Acc* rows[kLanes];
    rows_of(rows, args.grad, tile, active, first, n);
    if (of_scores) {
      IntVec<Acc> finite;
      const Vec<Acc> factor = compute_scores(tile, options.score_fn, n, active, finite);
      scores_backward(tile, factor, args.grad_score_sum, of_probabilities, idx, tokens, options);
      transpose<false>(tile.key, rows, n);
    } else {
      for (int64_t lane = 0; lane < tokens; ++lane) {
        fill(rows[lane], Acc(0), n);
      }
    }
    if (of_weights) {
      if (!of_probabilities) {
        weights_backward(tile, options);
      }
      for (int64_t lane = 0; lane < tokens; ++lane) {
        for (int64_t k = 0; k < top_k; ++k) {
          rows[lane][expert_of(idx[lane * top_k + k])] += tile.chosen[k * kLanes + lane];
        }
      }
    }
    finish_rows(args.grad, rows, active, first, end, n);
  }
  return -1;
}

// Writes the weights and adds the counts of a tile with a given choice. Returns the first refused token, or -1.
template <typename T, typename Acc>
MOE_INLINE int64_t write_given(
    const Tile<Acc>& tile, const Acc* active, IntVec<Acc> finite, const GateWeightsArgs<T>& args, int64_t first,
    int64_t end, int64_t* counts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t top_k = args.options.top_k;
  for (int64_t lane = 0; lane < kLanes && first + lane < end; ++lane) {
    Acc* __restrict weights = args.weights + (first + lane) * top_k;
    if (active[lane] != 0 && finite[lane] == 0) {
      return first + lane;
    }
    for (int64_t k = 0; k < top_k; ++k) {
      const Acc weight = tile.chosen[k * kLanes + lane];
      const int64_t expert = active[lane] != 0 ? tile.idx[k * kLanes + lane] : -1;
      // A non-zero weight implies a logit above -inf, so only other weights need a read of the logit.
      const bool is_number = weight > 0 || weight < 0;
      if (!is_number && expert >= 0 && tile.x[expert * kLanes + lane] == -kInfinity<Acc>) {
        return first + lane;
      }
      weights[k] = expert < 0 ? Acc(0) : weight;
      counts[expert < 0 ? 0 : expert] += expert >= 0;
    }
  }
  return -1;
}

// The gate for a given choice: scores, sums and weights, without selection.
template <typename T, typename Acc>
int64_t weigh(
    const GateWeightsArgs<T>& args, int64_t begin, int64_t end, Acc* score_sum, int64_t* counts, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const GateOptions& options = args.options;
  const int64_t num_experts = options.num_experts, top_k = options.top_k;
  const Tile<Acc> tile(scratch, options);
  for (int64_t i = 0; i < num_experts * kMaxLanes; ++i) {
    tile.score_sum[i] = 0;
  }
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes];
    IntVec<Acc> finite;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t* idx = args.idx + (first + lane) * top_k;
      active[lane] = first + lane < end && has_choice(idx, top_k);
      for (int64_t k = 0; k < top_k; ++k) {
        tile.idx[k * kLanes + lane] = active[lane] != 0 ? static_cast<Int<Acc>>(idx[k]) : 0;
      }
    }
    load_tile(tile, active, args.logits, first, num_experts);
    const Vec<Acc> factor = compute_scores(tile, options.score_fn, num_experts, active, finite);
    add_scores(tile, tile.score_sum + (first - begin) % kMaxLanes, factor, num_experts);
    compute_weights(tile, factor, false, options);
    const int64_t token = write_given(tile, active, finite, args, first, end, counts);
    if (token >= 0) {
      return token;
    }
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    score_sum[e] = reduce_lanes(tile.score_sum + e * kMaxLanes);
  }
  return -1;
}

MOE_INLINE float log_acc(float x) {
  return __builtin_logf(x);
}

MOE_INLINE double log_acc(double x) {
  return __builtin_log(x);
}

// Computes tile.score = exp(x - max) and lse = log sum exp(x). Returns 1 / sum.
template <typename Acc>
MOE_INLINE Vec<Acc> logsumexp(const Tile<Acc>& tile, Acc* lse, int64_t n) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const Vec<Acc> top = column_max(tile.x, n);
  column_exp(tile.score, tile.x, top, n);
  const Vec<Acc> sum = column_sum(tile.score, n);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    lse[lane] = top[lane] + log_acc(sum[lane]);
    // If all logits are -inf, or one is +inf, x - max was NaN, but the result is infinite without a NaN logit.
    if (top[lane] == kInfinity<Acc> || top[lane] == -kInfinity<Acc>) {
      lse[lane] = top[lane];
      for (int64_t e = 0; e < n; ++e) {
        const Acc v = tile.x[e * kLanes + lane];
        lse[lane] = v != v ? v : lse[lane];
      }
    }
  }
  return Acc(1) / sum;
}

template <typename T, typename Acc>
double z_loss(const ZLossArgs<T>& args, int64_t begin, int64_t end, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const Tile<Acc> tile(scratch, z_loss_options(args.num_experts));
  double sum = 0;
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes], lse[kLanes];
    load_mask(active, args.token_mask, first, end);
    load_tile(tile, active, args.logits, first, args.num_experts);
    logsumexp(tile, lse, args.num_experts);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sum += active[lane] != 0 ? static_cast<double>(lse[lane]) * static_cast<double>(lse[lane]) : 0;
    }
  }
  return sum;
}

template <typename T, typename Acc>
void z_loss_backward(const ZLossArgs<T>& args, T* grad, Acc factor, int64_t begin, int64_t end, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t n = args.num_experts;
  const Tile<Acc> tile(scratch, z_loss_options(n));
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes], lse[kLanes];
    load_mask(active, args.token_mask, first, end);
    load_tile(tile, active, args.logits, first, n);
    const Vec<Acc> inverse = logsumexp(tile, lse, n);
    const Vec<Acc> scale = factor * load(lse) * inverse;
    for (int64_t e = 0; e < n; ++e) {
      store(tile.key + e * kLanes, load(tile.score + e * kLanes) * scale);
    }
    store_tile(grad, tile.key, tile, active, first, end, n);
  }
}

template <typename T>
constexpr GateKernels<T> kGateKernels = {
    gate<T, acc_t<T>>, weigh<T, acc_t<T>>, gate_backward<T, acc_t<T>>, z_loss<T, acc_t<T>>,
    z_loss_backward<T, acc_t<T>>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kGateKernels<float>, kGateKernels<double>, kGateKernels<BFloat16>, kGateKernels<Half>};

} // namespace moe_ext::gating::MOE_ISA
