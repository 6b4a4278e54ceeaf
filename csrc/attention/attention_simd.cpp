// Loops over tiles of scores and over rows to merge, compiled once for each instruction set.
#include "attention/attention_tables.h"

namespace moe_ext::attention::MOE_ISA {
namespace {

constexpr int64_t kMaxCols = 1024; // most columns of a tile

// keep[col] = 1 / (1 - p) or 0, for the columns of a row.
template <typename Acc>
MOE_INLINE void dropout_row(Acc* __restrict keep, const TileArgs<Acc>& args, int64_t row, int64_t cols) {
  const TokenDraws draws = dropout_draws(args.dropout.seed, args.batch, args.head, args.q_positions[row]);
  const uint32_t threshold = args.dropout.threshold;
  const Acc inv_keep = static_cast<Acc>(args.dropout.inv_keep);
  if (!args.consecutive) {
    for (int64_t col = 0; col < cols; ++col) {
      const uint32_t position = static_cast<uint32_t>(args.k_dropout[col]);
      const PhiloxWords words = philox4x32({{position / 4, draws.c1, draws.c2, draws.c3}}, draws.key);
      const uint32_t low = (position & 1u) != 0 ? words.w[1] : words.w[0];
      const uint32_t high = (position & 1u) != 0 ? words.w[3] : words.w[2];
      keep[col] = ((position & 2u) != 0 ? high : low) >> 8 >= threshold ? inv_keep : Acc(0);
    }
    return;
  }
  const uint32_t first = static_cast<uint32_t>(args.k_dropout[0]);
  const int64_t offset = first % 4, groups = (cols + offset + 3) / 4;
  Acc aligned[kMaxCols + 4];
  for (int64_t group = 0; group < groups; ++group) {
    const PhiloxWords words =
        philox4x32({{first / 4 + static_cast<uint32_t>(group), draws.c1, draws.c2, draws.c3}}, draws.key);
    aligned[4 * group] = words.w[0] >> 8 >= threshold ? inv_keep : Acc(0);
    aligned[4 * group + 1] = words.w[1] >> 8 >= threshold ? inv_keep : Acc(0);
    aligned[4 * group + 2] = words.w[2] >> 8 >= threshold ? inv_keep : Acc(0);
    aligned[4 * group + 3] = words.w[3] >> 8 >= threshold ? inv_keep : Acc(0);
  }
  for (int64_t col = 0; col < cols; ++col) {
    keep[col] = aligned[col + offset];
  }
}

MOE_INLINE int64_t padded(int64_t cols) {
  return (cols + kLanes - 1) / kLanes * kLanes;
}

// Reductions by halving, which overwrite the lanes. A sequential chain through all lanes would take longer than a row
// of 128 columns.
template <typename Acc>
MOE_INLINE Acc largest(Acc* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
    }
  }
  return lanes[0];
}

template <typename Acc>
MOE_INLINE Acc total(Acc* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Replaces the products of a row by scores, -inf where the row does not see the key. Returns the maximum. `bias`
// [width] is not read without kBias.
template <bool kSoftcap, bool kAlibi, bool kBias, typename Acc>
MOE_INLINE Acc
score_row(Acc* __restrict s, const Acc* __restrict bias, const TileArgs<Acc>& args, int64_t row, int64_t width) {
  const int32_t q = args.q_positions[row], document = args.q_documents[row];
  const Interval visible = visible_positions(q, args.window);
  const int32_t* __restrict positions = args.k_positions;
  const int32_t* __restrict documents = args.k_documents;
  const Score<Acc> score = args.score;
  const Acc none = -Acc(kInf);
  Acc most[kLanes], unused = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    most[lane] = none;
  }
  for (int64_t col = 0; col < width; col += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int32_t k = positions[col + lane];
      Acc value = score_of<kSoftcap, kAlibi>(s[col + lane], score, unused, k - q);
      if constexpr (kBias) {
        value += bias[col + lane];
      }
      // Bitwise operators, because branches would not vectorise.
      const bool seen = (k >= visible.first) & (k <= visible.last) & (documents[col + lane] == document);
      const Acc kept = seen ? value : none;
      s[col + lane] = kept;
      most[lane] = kept > most[lane] ? kept : most[lane];
    }
  }
  return largest(most);
}

// Returns the largest of a row's products, and sets the columns behind the tile's to -inf.
template <typename Acc>
MOE_INLINE Acc largest_product(Acc* __restrict s, int64_t cols, int64_t width) {
  const Acc none = -Acc(kInf);
  Acc most[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    most[lane] = none;
  }
  for (int64_t col = cols; col < width; ++col) {
    s[col] = none;
  }
  for (int64_t col = 0; col < width; col += kLanes) {
    // If this loop were unrolled early, the comparisons would stay scalar.
#pragma GCC unroll 1
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      most[lane] = s[col + lane] > most[lane] ? s[col + lane] : most[lane];
    }
  }
  return largest(most);
}

// s = exp(scale s - shift). Returns the sum.
template <typename Acc>
MOE_INLINE Acc exp_row(Acc* __restrict s, Acc scale, Acc shift, int64_t width) {
  Acc sum[kLanes] = {};
  for (int64_t col = 0; col < width; col += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Acc p = exp_acc(s[col + lane] * scale - shift);
      s[col + lane] = p;
      sum[lane] += p;
    }
  }
  return total(sum);
}

template <bool kSoftcap, bool kAlibi, bool kBias, typename Acc>
void softmax_rows(Acc* scores, const TileArgs<Acc>& args, const RowState<Acc>& state) {
  const int64_t width = padded(args.cols);
  const Acc none = -Acc(kInf);
  alignas(64) Acc keep[kMaxCols];
  // The row's bias, padded as its scores are.
  alignas(64) Acc bias[kBias ? kMaxCols : 1] = {};
  for (int64_t row = 0; row < args.rows; ++row) {
    Acc* s = scores + row * args.row_stride;
    for (int64_t col = 0; kBias && col < args.cols; ++col) {
      bias[col] = args.bias[row * args.bias_stride + col];
    }
    // The score is only the product times a factor, which exp_row applies. A positive factor keeps the order, and -inf.
    const bool plain = !kSoftcap && !kAlibi && !kBias && !args.masked && args.score.scale > 0;
    const Acc scale = plain ? args.score.scale : Acc(1);
    const Acc tile_max = plain ? scale * largest_product(s, args.cols, width)
                               : score_row<kSoftcap, kAlibi, kBias>(s, bias, args, row, width);
    const Acc before = state.max[row];
    const Acc now = tile_max > before ? tile_max : before;
    const Acc shift = now == none ? Acc(0) : now;
    const Acc sum = exp_row(s, scale, shift, width);
    if (now != before) {
      const Acc fade = exp_acc(before - shift);
      Acc* __restrict out = state.out + row * state.dim;
      for (int64_t i = 0; i < state.dim; ++i) {
        out[i] *= fade;
      }
      state.sum[row] *= fade;
      state.max[row] = now;
    }
    state.sum[row] += sum;
    if (args.dropout.threshold > 0) {
      dropout_row(keep, args, row, args.cols);
      for (int64_t col = 0; col < args.cols; ++col) {
        s[col] *= keep[col];
      }
    }
  }
}

template <typename Acc>
void softmax(Acc* scores, const TileArgs<Acc>& args, const RowState<Acc>& state) {
  const bool softcap = args.score.softcap != 0, alibi = args.score.slope != 0;
  if (args.bias != nullptr && softcap) {
    softmax_rows<true, true, true>(scores, args, state);
  } else if (args.bias != nullptr) {
    softmax_rows<false, true, true>(scores, args, state);
  } else if (softcap && alibi) {
    softmax_rows<true, true, false>(scores, args, state);
  } else if (softcap) {
    softmax_rows<true, false, false>(scores, args, state);
  } else if (alibi) {
    softmax_rows<false, true, false>(scores, args, state);
  } else {
    softmax_rows<false, false, false>(scores, args, state);
  }
}

template <typename Acc>
void finish(Acc* lse, const RowState<Acc>& state, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const Acc sum = state.sum[row];
    // The sum is 0 only for rows without keys, because the largest score adds exp(0) = 1. NaN goes on to both results.
    lse[row] = sum == 0 ? -Acc(kInf) : sum > 0 ? state.max[row] + log_positive(sum) : sum;
    const Acc factor = sum == 0 ? Acc(0) : Acc(1) / sum;
    Acc* __restrict out = state.out + row * state.dim;
    for (int64_t i = 0; i < state.dim; ++i) {
      out[i] *= factor;
    }
  }
}

// With kBias, `unscaled` [cols] receives the gradient of the scores.
template <bool kSoftcap, bool kAlibi, bool kBias, bool kDropout, typename Acc>
MOE_INLINE void backward_row(
    Acc* __restrict s, Acc* __restrict g, Acc* __restrict unscaled, const TileArgs<Acc>& args, int64_t row, Acc lse,
    Acc delta, const Acc* __restrict keep) {
  const int32_t q = args.q_positions[row], document = args.q_documents[row];
  const Interval visible = visible_positions(q, args.window);
  const int32_t* __restrict positions = args.k_positions;
  const int32_t* __restrict documents = args.k_documents;
  const Score<Acc> score = args.score;
  const Acc* __restrict bias = kBias ? args.bias + row * args.bias_stride : nullptr;
  const bool all = !args.masked;
  for (int64_t col = 0; col < args.cols; ++col) {
    const int32_t k = positions[col];
    Acc tanh = 0;
    Acc value = score_of<kSoftcap, kAlibi>(s[col], score, tanh, k - q);
    if constexpr (kBias) {
      value += bias[col];
    }
    const bool seen = all | ((k >= visible.first) & (k <= visible.last) & (documents[col] == document));
    const Acc p = seen ? exp_acc(value - lse) : Acc(0);
    const Acc factor = kDropout ? keep[col] : Acc(1);
    const Acc of_score = p * (g[col] * factor - delta);
    Acc ds = of_score * score.scale;
    if constexpr (kSoftcap) {
      ds *= Acc(1) - tanh * tanh;
    }
    s[col] = p * factor;
    // A row without keys has p = 0, but its delta may be anything, even NaN.
    g[col] = p == 0 ? Acc(0) : ds;
    if constexpr (kBias) {
      unscaled[col] = p == 0 ? Acc(0) : of_score;
    }
  }
}

template <bool kSoftcap, bool kAlibi, bool kBias, typename Acc>
void backward_rows(Acc* scores, Acc* grads, const TileArgs<Acc>& args, const Acc* lse, const Acc* delta) {
  alignas(64) Acc keep[kMaxCols];
  alignas(64) Acc unwanted[kBias ? kMaxCols : 1];
  for (int64_t row = 0; row < args.rows; ++row) {
    Acc* s = scores + row * args.row_stride;
    Acc* unscaled = args.grad_bias != nullptr ? args.grad_bias + row * args.grad_bias_stride : unwanted;
    Acc* g = grads + row * args.row_stride;
    // A shift of +inf gives exp(score - inf) = 0 in rows without keys.
    const Acc shift = lse[row] == -Acc(kInf) ? Acc(kInf) : lse[row];
    if (args.dropout.threshold > 0) {
      dropout_row(keep, args, row, args.cols);
      backward_row<kSoftcap, kAlibi, kBias, true>(s, g, unscaled, args, row, shift, delta[row], keep);
    } else {
      backward_row<kSoftcap, kAlibi, kBias, false>(s, g, unscaled, args, row, shift, delta[row], keep);
    }
  }
}

template <typename Acc>
void backward(Acc* scores, Acc* grads, const TileArgs<Acc>& args, const Acc* lse, const Acc* delta) {
  const bool softcap = args.score.softcap != 0, alibi = args.score.slope != 0;
  if (args.bias != nullptr && softcap) {
    backward_rows<true, true, true>(scores, grads, args, lse, delta);
  } else if (args.bias != nullptr) {
    backward_rows<false, true, true>(scores, grads, args, lse, delta);
  } else if (softcap && alibi) {
    backward_rows<true, true, false>(scores, grads, args, lse, delta);
  } else if (softcap) {
    backward_rows<true, false, false>(scores, grads, args, lse, delta);
  } else if (alibi) {
    backward_rows<false, true, false>(scores, grads, args, lse, delta);
  } else {
    backward_rows<false, false, false>(scores, grads, args, lse, delta);
  }
}

template <typename Acc>
void delta_rows(Acc* delta, const Acc* grad_out, const Acc* out, const Acc* grad_lse, int64_t rows, int64_t dim) {
  for (int64_t row = 0; row < rows; ++row) {
    const Acc product = dot<Acc>(grad_out + row * dim, out + row * dim, dim);
    delta[row] = grad_lse != nullptr ? product - grad_lse[row] : product;
  }
}

// out = weight_a a + weight_b b. An output with weight 0 may hold anything, and is not read.
template <typename T>
void merge(acc_t<T>* out, acc_t<T>* lse, const MergeArgs<T>& args, int64_t begin, int64_t end) {
  using Acc = acc_t<T>;
  for (int64_t row = begin; row < end; ++row) {
    const MergeWeights<Acc> w = merge_weights(args.lse_a[row], args.lse_b[row]);
    const T* __restrict a = args.out_a + row * args.dim;
    const T* __restrict b = args.out_b + (args.out_b != nullptr ? row * args.dim : 0);
    Acc* __restrict o = out + row * args.dim;
    const bool has_a = !(w.a == 0), has_b = args.out_b != nullptr && !(w.b == 0);
    lse[row] = w.lse;
    if (has_a && has_b) {
      for (int64_t i = 0; i < args.dim; ++i) {
        o[i] = w.a * to_acc(a[i]) + w.b * to_acc(b[i]);
      }
      continue;
    }
    const T* __restrict one = has_b ? b : a;
    const Acc weight = has_b ? w.b : w.a;
    for (int64_t i = 0; i < args.dim; ++i) {
      o[i] = has_a || has_b ? weight * to_acc(one[i]) : Acc(0);
    }
  }
}

// Merges b into `out` in place. If b has weight 0, out stays unchanged; if a has weight 0, out is overwritten by b.
template <typename T>
void merge_into(const MergeIntoArgs<T>& args, int64_t begin, int64_t end) {
  using Acc = acc_t<T>;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t s = i % args.rows, h = i / args.rows % args.heads, b = i / args.rows / args.heads;
    Acc* const lse = args.lse + args.of_lse.at(b, h, s);
    const MergeWeights<Acc> w = merge_weights(*lse, args.lse_b[args.of_lse_b.at(b, h, s)]);
    *lse = w.lse;
    Acc* __restrict out = args.out + args.of_out.at(b, h, s);
    const T* __restrict other = args.out_b + args.of_out_b.at(b, h, s);
    const bool has_a = !(w.a == 0), has_b = !(w.b == 0);
    if (has_a && has_b) {
      for (int64_t c = 0; c < args.dim; ++c) {
        out[c] = w.a * out[c] + w.b * to_acc(other[c]);
      }
    } else if (!has_a) {
      for (int64_t c = 0; c < args.dim; ++c) {
        out[c] = has_b ? w.b * to_acc(other[c]) : Acc(0);
      }
    }
  }
}

// d lse_a = w_a d lse + w_a w_b d out . (a - b); in d lse_b the product has the opposite sign.
template <typename T>
void merge_backward(const MergeGrads<T>& grads, const MergeArgs<T>& args, int64_t begin, int64_t end) {
  using Acc = acc_t<T>;
  for (int64_t row = begin; row < end; ++row) {
    const MergeWeights<Acc> w = merge_weights(args.lse_a[row], args.lse_b[row]);
    const int64_t offset = row * args.dim;
    const Acc* __restrict grad = grads.grad_out + offset;
    Acc product = 0;
    // With one weight 0 the product is 0, and that output may hold anything.
    if (!(w.a == 0) && !(w.b == 0)) {
      product = dot<Acc>(grad, args.out_a + offset, args.dim);
      product -= args.out_b != nullptr ? dot<Acc>(grad, args.out_b + offset, args.dim) : Acc(0);
      product *= w.a * w.b;
    }
    grads.grad_lse_a[row] = w.a * grads.grad_lse[row] + product;
    grads.grad_lse_b[row] = w.b * grads.grad_lse[row] - product;
    T* __restrict grad_a = grads.grad_a + offset;
    for (int64_t i = 0; i < args.dim; ++i) {
      grad_a[i] = from_acc<T>(w.a * grad[i]);
    }
    for (int64_t i = 0; grads.grad_b != nullptr && i < args.dim; ++i) {
      grads.grad_b[offset + i] = from_acc<T>(w.b * grad[i]);
    }
  }
}

template <typename Acc>
constexpr BlockKernels<Acc> kBlock = {softmax<Acc>, finish<Acc>, backward<Acc>, delta_rows<Acc>};

template <typename T>
constexpr MergeKernels<T> kMerge = {merge<T>, merge_into<T>, merge_backward<T>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    kBlock<float>, kBlock<double>, {kMerge<float>, kMerge<double>, kMerge<BFloat16>, kMerge<Half>}};

} // namespace moe_ext::attention::MOE_ISA
