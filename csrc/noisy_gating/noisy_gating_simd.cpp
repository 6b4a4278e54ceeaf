// Loops of the noisy gates, compiled once per instruction set. They work on one tile of tokens at a time
// (gating_tile.h). Each gate computes the statistics for its losses per block of tokens. A backward pass draws the
// noise again, so that no noise is saved.
#include "gating/gating_select.h"
#include "noisy_gating/noisy_gating_math.h"
#include "noisy_gating/noisy_gating_tables.h"

namespace moe_ext::noisy_gating::MOE_ISA {
namespace {

using namespace moe_ext::gating::MOE_ISA;
using gating::GateOptions;
using gating::kMaxLanes;

// Columns that are drawn in one batch.
constexpr int64_t kDraws = 64;

MOE_INLINE void draw_uniforms(float* out, const TokenDraws& draws, int64_t column) {
  for (int64_t i = 0; i < kDraws / 4; ++i) {
    const PhiloxWords words = draws.words(column + 4 * i);
    for (int j = 0; j < 4; ++j) {
      out[4 * i + j] = to_uniform(words.w[j]);
    }
  }
}

void uniform(float* out, int64_t num_columns, Stream stream, RngSource rng, int64_t begin, int64_t end) {
  float drawn[kDraws];
  for (int64_t t = begin; t < end; ++t) {
    const TokenDraws draws = token_draws(rng, stream, t);
    for (int64_t c = 0; c < num_columns; c += kDraws) {
      // A row of few columns draws four numbers instead of a whole batch.
      const int64_t count = num_columns - c < kDraws ? num_columns - c : kDraws;
      if (count > 4) {
        draw_uniforms(drawn, draws, c);
      } else {
        const PhiloxWords words = draws.words(c);
        for (int j = 0; j < 4; ++j) {
          drawn[j] = to_uniform(words.w[j]);
        }
      }
      __builtin_memcpy(out + t * num_columns + c, drawn, count * sizeof(float));
    }
  }
}

template <typename T>
void jitter(const JitterArgs<T>& args, int64_t begin, int64_t end) {
  using Acc = acc_t<T>;
  const Acc low = static_cast<Acc>(1 - args.eps), span = static_cast<Acc>(2 * args.eps);
  float drawn[kDraws];
  for (int64_t t = begin; t < end; ++t) {
    const TokenDraws draws = token_draws(args.rng, Stream::kJitter, t);
    for (int64_t c = 0; c < args.dim; c += kDraws) {
      draw_uniforms(drawn, draws, c);
      const T* __restrict x = args.x + t * args.dim + c;
      T* __restrict out = args.out + t * args.dim + c;
      const int64_t count = args.dim - c < kDraws ? args.dim - c : kDraws;
      for (int64_t i = 0; i < count; ++i) {
        out[i] = from_acc<T>(to_acc(x[i]) * (low + span * static_cast<Acc>(drawn[i])));
      }
    }
  }
}

MOE_INLINE GateOptions tile_options(int64_t num_experts, int64_t num_ranked) {
  return {num_experts, num_ranked, 1, 1, gating::ScoreFn::kSoftmax, true, 1.0};
}

template <typename Acc>
MOE_INLINE void clear(Acc* sums, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    sums[i] = 0;
  }
}

// Adds the sixteen sums of each expert. Their number does not depend on the width of a vector, so that every
// instruction set adds in the same order.
template <typename Acc>
MOE_INLINE void add_lanes(Acc* out, const Acc* sums, int64_t num_experts) {
  for (int64_t e = 0; e < num_experts; ++e) {
    Acc lanes[kMaxLanes];
    __builtin_memcpy(lanes, sums + e * kMaxLanes, sizeof(lanes));
    for (int64_t half = kMaxLanes / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) {
        lanes[i] += lanes[i + half];
      }
    }
    out[e] = lanes[0];
  }
}

// Returns the first real token of the tile with a logit out of range or no expert in `last_idx`, or -1.
template <typename Acc>
MOE_INLINE int64_t first_refused(const Acc* active, IntVec<Acc> good, const Int<Acc>* last_idx, int64_t first) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
    if (active[lane] != 0 && (good[lane] == 0 || last_idx[lane] < 0)) {
      return first + lane;
    }
  }
  return -1;
}

template <typename Acc>
MOE_INLINE void exp_lanes(Acc* x) {
  for (int64_t lane = 0; lane < Lanes<Acc>::kCount; ++lane) {
    x[lane] = exp_acc(x[lane]);
  }
}

// GShard gate: p = softmax(x); the weights of the two largest are the softmax of their logits.
template <typename T, typename Acc>
int64_t gshard(const GShardArgs<T>& args, int64_t begin, int64_t end, Acc* sums, int64_t* counts, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t n = args.num_experts;
  const Tile<Acc> tile(scratch, tile_options(n, 2));
  clear(tile.score_sum, n * kMaxLanes);
  clear(counts, 2 * n);
  const Acc scale = static_cast<Acc>(args.scale);
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes], ratio[kLanes];
    load_mask(active, args.token_mask, first, end);
    load_tile(tile, active, args.logits, first, n);
    const Vec<Acc> top = column_max(tile.x, n);
    column_exp(tile.score, tile.x, top, n);
    const Vec<Acc> sum = column_sum(tile.score, n);
    const Vec<Acc> factor = load(active) / sum;
    Acc* lane_sums = tile.score_sum + (first - begin) % kMaxLanes;
    for (int64_t e = 0; e < n; ++e) {
      store(lane_sums + e * kMaxLanes, load(lane_sums + e * kMaxLanes) + load(tile.score + e * kLanes) * factor);
    }
    select_fixed<Acc, 2>(tile.list, tile.idx, tile.x, n);
    const IntVec<Acc> good = (top < kInfinity<Acc>)&(sum == sum);
    const int64_t token = first_refused<Acc>(active, good, tile.idx + kLanes, first);
    if (token >= 0) {
      return token;
    }
    store(ratio, load(tile.list + kLanes) - load(tile.list));
    exp_lanes(ratio);
    for (int64_t lane = 0; lane < kLanes && first + lane < end; ++lane) {
      const int64_t t = first + lane;
      const bool real = active[lane] != 0;
      const int64_t e1 = tile.idx[lane], e2 = tile.idx[kLanes + lane];
      const Acc w2 = ratio[lane] / (1 + ratio[lane]);
      bool kept = real;
      if (real && args.rng.state != nullptr) {
        kept = Acc(to_uniform(token_draws(args.rng, Stream::kSecondExpert, t).words(0).w[0])) < 2 * w2;
      }
      args.idx[2 * t] = real ? e1 : -1;
      args.idx[2 * t + 1] = kept ? e2 : -1;
      args.weights[2 * t] = real ? scale / (1 + ratio[lane]) : 0;
      args.weights[2 * t + 1] = kept ? scale * w2 : 0;
      counts[e1] += real;
      counts[n + e1] += real;
      counts[e2] += kept;
    }
  }
  add_lanes(sums, tile.score_sum, n);
  return -1;
}

// The backward pass ranks again to find a dropped second choice, whose logit is part of the first choice's weight.
template <typename T, typename Acc>
void gshard_backward(const GShardGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t n = args.num_experts;
  const Tile<Acc> tile(scratch, tile_options(n, 2));
  const Acc scale = static_cast<Acc>(args.scale);
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes], ratio[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      active[lane] = first + lane < end && args.idx[2 * (first + lane)] >= 0;
    }
    load_tile(tile, active, args.logits, first, n);
    select_fixed<Acc, 2>(tile.list, tile.idx, tile.x, n);
    clear(tile.key, n * kLanes);
    if (args.grad_score_sum != nullptr) {
      column_exp(tile.score, tile.x, column_max(tile.x, n), n);
      const Vec<Acc> factor = Acc(1) / column_sum(tile.score, n);
      Vec<Acc> mean{};
      for (int64_t e = 0; e < n; ++e) {
        mean += load(tile.score + e * kLanes) * args.grad_score_sum[e];
      }
      mean *= factor;
      for (int64_t e = 0; e < n; ++e) {
        store(tile.key + e * kLanes, load(tile.score + e * kLanes) * factor * (args.grad_score_sum[e] - mean));
      }
    }
    store(ratio, load(tile.list + kLanes) - load(tile.list));
    exp_lanes(ratio);
    for (int64_t lane = 0; args.grad_weights != nullptr && lane < kLanes; ++lane) {
      // With logits that the forward pass would have refused there may be no second expert.
      if (active[lane] != 0 && tile.idx[kLanes + lane] >= 0) {
        const int64_t t = first + lane;
        const Acc denominator = 1 + ratio[lane];
        const Acc g2 = args.idx[2 * t + 1] >= 0 ? args.grad_weights[2 * t + 1] : Acc(0);
        const Acc slope = scale * ratio[lane] / denominator / denominator * (args.grad_weights[2 * t] - g2);
        tile.key[tile.idx[lane] * kLanes + lane] += slope;
        tile.key[tile.idx[kLanes + lane] * kLanes + lane] -= slope;
      }
    }
    store_tile(args.grad, tile.key, tile, active, first, end, n);
  }
}

// A tile of tokens for the noisy gate and its gradient: h = clean + normal * deviation, and its ranking.
template <typename T, typename Acc>
struct NoisyTile {
  static constexpr int64_t kLanes = Lanes<Acc>::kCount;
  NoisyOptions options;
  Tile<Acc> clean; // x: clean logits; key: h; list, idx: ranked h and their experts
  Tile<Acc> noise; // x: noise logits; score: deviations; key: normals

  NoisyTile(Acc* scratch, const NoisyOptions& o)
      : options(o),
        clean(scratch, tile_options(o.num_experts, o.num_ranked())),
        noise(
            scratch + gating::scratch_size(tile_options(o.num_experts, o.num_ranked())),
            tile_options(o.num_experts, o.num_ranked())) {
  }

  // Loads a tile, draws its noise and ranks h. Returns a mask of the lanes whose logits are all in range.
  MOE_INLINE IntVec<Acc> load_and_rank(
      const Acc* active, const T* clean_logits, const T* noise_logits, const RngSource& rng, int64_t first) {
    const int64_t n = options.num_experts;
    load_tile(clean, active, clean_logits, first, n);
    IntVec<Acc> good = IntVec<Acc>{} - 1;
    if (noise_logits != nullptr) {
      load_tile(noise, active, noise_logits, first, n);
      draw_normals(active, rng, first);
    }
    const Acc epsilon = static_cast<Acc>(options.noise_epsilon);
    for (int64_t e = 0; e < n; ++e) {
      const Vec<Acc> x = load(clean.x + e * kLanes);
      good &= x < kInfinity<Acc>;
      if (noise_logits == nullptr) {
        store(clean.key + e * kLanes, x);
        continue;
      }
      Acc deviation[kLanes];
      const Vec<Acc> raw = load(noise.x + e * kLanes);
      good &= (raw < kInfinity<Acc>)&(raw > -kInfinity<Acc>);
      store(deviation, raw);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        deviation[lane] = deviation_of(deviation[lane], epsilon);
      }
      store(noise.score + e * kLanes, load(deviation));
      store(clean.key + e * kLanes, x + load(noise.key + e * kLanes) * load(deviation));
    }
    select<Acc>(clean.list, clean.idx, clean.key, n, options.num_ranked());
    return good;
  }

  // Sets clean.score to 1 for chosen experts and to 0 for the others.
  MOE_INLINE void mark_chosen() {
    clear(clean.score, options.num_experts * kLanes);
    for (int64_t i = 0; i < options.top_k * kLanes; ++i) {
      if (clean.idx[i] >= 0) {
        clean.score[clean.idx[i] * kLanes + i % kLanes] = 1;
      }
    }
  }

  // Eq. 9: the h that expert e must exceed to be chosen: that of rank K + 1 for a chosen expert, of rank K otherwise.
  MOE_INLINE Vec<Acc> threshold(int64_t e) const {
    const Vec<Acc> next =
        options.top_k < options.num_experts ? load(clean.list + options.top_k * kLanes) : broadcast(-kInfinity<Acc>);
    return load(clean.score + e * kLanes) != Acc(0) ? next : load(clean.list + (options.top_k - 1) * kLanes);
  }

 private:
  MOE_INLINE void draw_normals(const Acc* active, const RngSource& rng, int64_t first) {
    const int64_t n = options.num_experts;
    uint32_t c1[kLanes], c3[kLanes];
    TokenDraws draws = {};
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      // The token of an idle lane may lie beyond the last one, so such a lane draws for token 0.
      draws = token_draws(rng, Stream::kNoise, active[lane] != 0 ? first + lane : 0);
      c1[lane] = draws.c1;
      c3[lane] = draws.c3;
    }
    for (int64_t e = 0; e < n; e += 4) {
      float normals[4][kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const PhiloxWords words = philox4x32({{static_cast<uint32_t>(e / 4), c1[lane], draws.c2, c3[lane]}}, draws.key);
        const NormalPair low = to_normals(words.w[0], words.w[1]), high = to_normals(words.w[2], words.w[3]);
        normals[0][lane] = low.first;
        normals[1][lane] = low.second;
        normals[2][lane] = high.first;
        normals[3][lane] = high.second;
      }
      for (int64_t i = 0; i < 4 && e + i < n; ++i) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          noise.key[(e + i) * kLanes + lane] = normals[i][lane];
        }
      }
    }
  }
};

template <typename T, typename Acc>
int64_t noisy(const NoisyArgs<T>& args, int64_t begin, int64_t end, Acc* sums, int64_t* counts, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t n = args.options.num_experts, top_k = args.options.top_k;
  NoisyTile<T, Acc> tile(scratch, args.options);
  Acc* const importance = tile.clean.score_sum;
  Acc* const load_sums = tile.noise.score_sum;
  clear(importance, n * kMaxLanes);
  clear(load_sums, n * kMaxLanes);
  clear(counts, n);
  const Acc scale = static_cast<Acc>(args.options.scale);
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes];
    load_mask(active, args.token_mask, first, end);
    const IntVec<Acc> good = tile.load_and_rank(active, args.clean, args.noise, args.rng, first);
    const int64_t token = first_refused<Acc>(active, good, tile.clean.idx + (top_k - 1) * kLanes, first);
    if (token >= 0) {
      return token;
    }
    const int64_t offset = (first - begin) % kMaxLanes;
    column_exp(tile.clean.chosen, tile.clean.list, load(tile.clean.list), top_k);
    const Vec<Acc> factor = load(active) / column_sum(tile.clean.chosen, top_k);
    for (int64_t k = 0; k < top_k; ++k) {
      store(tile.clean.chosen + k * kLanes, load(tile.clean.chosen + k * kLanes) * factor);
    }
    for (int64_t lane = 0; lane < kLanes && first + lane < end; ++lane) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t place = (first + lane) * top_k + k, expert = tile.clean.idx[k * kLanes + lane];
        const bool real = active[lane] != 0;
        const Acc gate = tile.clean.chosen[k * kLanes + lane];
        args.weights[place] = real ? scale * gate : 0;
        args.idx[place] = real ? expert : -1;
        importance[expert * kMaxLanes + offset + lane] += gate;
        counts[expert] += real;
      }
    }
    if (args.noise == nullptr) {
      continue;
    }
    tile.mark_chosen();
    for (int64_t e = 0; e < n; ++e) {
      Acc p[kLanes], bound[kLanes];
      store(bound, tile.threshold(e));
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t i = e * kLanes + lane;
        p[lane] = activation::normal_cdf(standardize(tile.clean.x[i], bound[lane], tile.noise.score[i])).value;
      }
      Acc* const to = load_sums + e * kMaxLanes + offset;
      store(to, load(to) + load(p) * load(active));
    }
  }
  add_lanes(sums, importance, n);
  add_lanes(sums + n, load_sums, n);
  return -1;
}

// Gradients of the clean logits and of the deviations for a tile.
template <typename T, typename Acc>
struct NoisyGradient {
  static constexpr int64_t kLanes = Lanes<Acc>::kCount;
  NoisyTile<T, Acc>& tile;
  Acc* clean;     // [E]
  Acc* deviation; // [E]

  // Adds a gradient `slope` of the h = clean + normal * deviation of one rank.
  MOE_INLINE void add_to_h(int64_t rank, int64_t lane, Acc slope, bool noisy) {
    const int64_t expert = tile.clean.idx[rank * kLanes + lane];
    if (expert >= 0) {
      clean[expert * kLanes + lane] += slope;
      deviation[expert * kLanes + lane] += noisy ? slope * tile.noise.key[expert * kLanes + lane] : Acc(0);
    }
  }

  // Adds the gradient through weights and importance: scale q (g - <q, g>), where q is the softmax of the chosen h.
  MOE_INLINE void of_gates(const NoisyGradArgs<T>& args, const Acc* active, int64_t first) {
    const int64_t top_k = tile.options.top_k;
    const Acc scale = static_cast<Acc>(tile.options.scale);
    Acc* const q = tile.clean.chosen;
    column_exp(q, tile.clean.list, load(tile.clean.list), top_k);
    const Vec<Acc> factor = Acc(1) / column_sum(q, top_k);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      Acc mean = 0;
      Acc* const g = tile.noise.chosen + lane;
      for (int64_t k = 0; active[lane] != 0 && k < top_k; ++k) {
        const Acc of_weight =
            args.grad_weights != nullptr ? scale * args.grad_weights[(first + lane) * top_k + k] : Acc(0);
        const int64_t expert = tile.clean.idx[k * kLanes + lane];
        const bool counts = args.grad_importance != nullptr && expert >= 0;
        g[k * kLanes] = of_weight + (counts ? args.grad_importance[expert] : Acc(0));
        q[k * kLanes + lane] *= factor[lane];
        mean += q[k * kLanes + lane] * g[k * kLanes];
      }
      for (int64_t k = 0; active[lane] != 0 && k < top_k; ++k) {
        add_to_h(k, lane, q[k * kLanes + lane] * (g[k * kLanes] - mean), args.noise != nullptr);
      }
    }
  }

  // Adds the gradient through the load: by the clean logit, the deviation, and the h at the threshold.
  MOE_INLINE void of_load(const Acc* grad_load, const Acc* active) {
    const int64_t n = tile.options.num_experts, top_k = tile.options.top_k;
    Vec<Acc> of_next{}, of_last{};
    tile.mark_chosen();
    for (int64_t e = 0; e < n; ++e) {
      Acc slope[kLanes], z[kLanes], bound[kLanes];
      store(bound, tile.threshold(e));
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t i = e * kLanes + lane;
        z[lane] = standardize(tile.clean.x[i], bound[lane], tile.noise.score[i]);
        slope[lane] = grad_load[e] * activation::normal_cdf(z[lane]).density / tile.noise.score[i];
      }
      store(clean + e * kLanes, load(clean + e * kLanes) + load(slope));
      store(deviation + e * kLanes, load(deviation + e * kLanes) - load(slope) * load(z));
      const auto chosen = load(tile.clean.score + e * kLanes) != Acc(0);
      of_next -= chosen ? load(slope) : Vec<Acc>{};
      of_last -= chosen ? Vec<Acc>{} : load(slope);
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (active[lane] != 0) {
        add_to_h(top_k - 1, lane, of_last[lane], true);
        if (top_k < n) {
          add_to_h(top_k, lane, of_next[lane], true);
        }
      }
    }
  }
};

template <typename T, typename Acc>
void noisy_backward(const NoisyGradArgs<T>& args, int64_t begin, int64_t end, Acc* scratch) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  const int64_t n = args.options.num_experts;
  NoisyTile<T, Acc> tile(scratch, args.options);
  NoisyGradient<T, Acc> grad{tile, tile.clean.score_sum, tile.noise.score_sum};
  for (int64_t first = begin; first < end; first += kLanes) {
    Acc active[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      active[lane] = first + lane < end && args.idx[(first + lane) * args.options.top_k] >= 0;
    }
    tile.load_and_rank(active, args.clean, args.noise, args.rng, first);
    clear(grad.clean, n * kLanes);
    clear(grad.deviation, n * kLanes);
    if (args.grad_weights != nullptr || args.grad_importance != nullptr) {
      grad.of_gates(args, active, first);
    }
    if (args.grad_load != nullptr && args.noise != nullptr) {
      grad.of_load(args.grad_load, active);
    }
    store_tile(args.grad_clean, grad.clean, tile.clean, active, first, end, n);
    if (args.grad_noise != nullptr) {
      for (int64_t i = 0; i < n * kLanes; ++i) {
        grad.deviation[i] *= sigmoid_acc(tile.noise.x[i]);
      }
      store_tile(args.grad_noise, grad.deviation, tile.noise, active, first, end, n);
    }
  }
}

template <typename T>
constexpr NoisyKernels<T> kNoisyKernels = {
    jitter<T>, gshard<T, acc_t<T>>, gshard_backward<T, acc_t<T>>, noisy<T, acc_t<T>>, noisy_backward<T, acc_t<T>>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    {kNoisyKernels<float>, kNoisyKernels<double>, kNoisyKernels<BFloat16>, kNoisyKernels<Half>}, uniform};

} // namespace moe_ext::noisy_gating::MOE_ISA
