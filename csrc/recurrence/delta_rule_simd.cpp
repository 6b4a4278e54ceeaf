// Loops within a chunk of the gated delta rule, compiled once for each instruction set.
#include "recurrence/decay_math.h"
#include "recurrence/delta_rule_tables.h"

namespace moe_ext::recurrence::MOE_ISA {
namespace {

template <typename Acc>
void decays(const Decays<Acc>& decays, const Acc* g, int64_t n) {
  Acc sums[kChunk] = {};
  Acc sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += g[i];
    sums[i] = sum;
  }
  const Acc whole = sum;
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict row = decays.pairs + i * kChunk;
    const Acc here = sums[i];
    for (int64_t j = 0; j < kChunk; ++j) {
      const Acc decay = decay_of(here - sums[j]);
      row[j] = j <= i ? decay : Acc(0);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    decays.carried[i] = decay_of(sums[i]);
    decays.to_end[i] = decay_of(whole - sums[i]);
  }
}

template <typename Acc>
void scale_rows(Acc* out, const Acc* in, int64_t in_stride, const Acc* by, int64_t n, int64_t cols) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict to = out + i * cols;
    const Acc* __restrict from = in + i * in_stride;
    const Acc factor = by[i];
    for (int64_t c = 0; c < cols; ++c) {
      to[c] = factor * from[c];
    }
  }
}

template <typename Acc>
void add_scaled_rows(Acc* out, const Acc* in, const Acc* by, int64_t n, int64_t cols) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict to = out + i * cols;
    const Acc* __restrict from = in + i * cols;
    const Acc factor = by[i];
    for (int64_t c = 0; c < cols; ++c) {
      to[c] += factor * from[c];
    }
  }
}

template <typename Acc>
void row_dots(Acc* dots, const Acc* a, int64_t a_stride, const Acc* b, int64_t b_stride, int64_t n, int64_t cols) {
  for (int64_t i = 0; i < n; ++i) {
    dots[i] = dot<Acc>(a + i * a_stride, b + i * b_stride, cols);
  }
}

template <typename Acc>
void weigh(Acc* scores, const Acc* products, const Acc* pairs, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict to = scores + i * kChunk;
    const Acc* __restrict from = products + i * kChunk;
    const Acc* __restrict by = pairs + i * kChunk;
    // Memory above the diagonal may hold NaN, which a product with 0 would keep.
    for (int64_t j = 0; j < kChunk; ++j) {
      to[j] = j <= i ? from[j] * by[j] : Acc(0);
    }
  }
}

template <typename Acc>
void system(Acc* system, const Acc* products, const Acc* pairs, const Acc* beta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict to = system + i * kChunk;
    const Acc* __restrict from = products + i * kChunk;
    const Acc* __restrict by = pairs + i * kChunk;
    const Acc step = beta[i];
    for (int64_t j = 0; j < kChunk; ++j) {
      to[j] = j < i ? step * (from[j] * by[j]) : Acc(0);
    }
  }
}

template <typename Acc>
void right_side(
    Acc* out, const Acc* read, const Acc* v, int64_t v_stride, const Acc* carried, const Acc* beta, int64_t n,
    int64_t cols) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* to = out + i * cols;
    const Acc* from = read + i * cols;
    const Acc* __restrict value = v + i * v_stride;
    const Acc kept = carried[i], step = beta[i];
#pragma GCC ivdep
    for (int64_t c = 0; c < cols; ++c) {
      to[c] = step * (value[c] - kept * from[c]);
    }
  }
}

// Columns of a row that a thread holds in registers while it subtracts other rows.
constexpr int64_t kBlock = 32;

// rows[i] -= sum over j in [begin, end) of factor(j) * rows[j], for columns [col, col + width).
template <bool kWhole, typename Acc, typename F>
MOE_INLINE void subtract_rows(
    Acc* rows, int64_t i, int64_t begin, int64_t end, int64_t col, int64_t width, int64_t cols, const F& factor) {
  Acc sum[kBlock];
  Acc* to = rows + i * cols + col;
  const int64_t size = kWhole ? kBlock : width;
  for (int64_t c = 0; c < size; ++c) {
    sum[c] = to[c];
  }
  for (int64_t j = begin; j < end; ++j) {
    const Acc* __restrict from = rows + j * cols + col;
    const Acc by = factor(j);
    for (int64_t c = 0; c < size; ++c) {
      sum[c] -= by * from[c];
    }
  }
  for (int64_t c = 0; c < size; ++c) {
    to[c] = sum[c];
  }
}

template <typename Acc, typename F>
MOE_INLINE void subtract_from_row(Acc* rows, int64_t i, int64_t begin, int64_t end, int64_t cols, const F& factor) {
  int64_t col = 0;
  for (; col + kBlock <= cols; col += kBlock) {
    subtract_rows<true>(rows, i, begin, end, col, kBlock, cols, factor);
  }
  if (col < cols) {
    subtract_rows<false>(rows, i, begin, end, col, cols - col, cols, factor);
  }
}

template <typename Acc>
void solve(Acc* rows, const Acc* system, int64_t n, int64_t cols) {
  for (int64_t i = 1; i < n; ++i) {
    const Acc* row = system + i * kChunk;
    subtract_from_row(rows, i, 0, i, cols, [row](int64_t j) { return row[j]; });
  }
}

template <typename Acc>
void solve_transposed(Acc* rows, const Acc* system, int64_t n, int64_t cols) {
  for (int64_t i = n - 2; i >= 0; --i) {
    const Acc* column = system + i;
    subtract_from_row(rows, i, i + 1, n, cols, [column](int64_t j) { return column[j * kChunk]; });
  }
}

// decay[i] += sum (of the row), decay[j] -= row[j].
template <typename Acc>
MOE_INLINE void add_to_decay(Acc* decay, const Acc* row, int64_t i, Acc sum) {
  for (int64_t j = 0; j < kChunk; ++j) {
    decay[j] -= row[j];
  }
  decay[i] += sum;
}

template <typename Acc>
MOE_INLINE Acc sum_of(const Acc* row) {
  constexpr int64_t kLanes = 16;
  Acc lanes[kLanes] = {};
  for (int64_t j = 0; j < kChunk; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += row[j + lane];
    }
  }
  Acc sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum += lanes[lane];
  }
  return sum;
}

template <typename Acc>
void of_scores(Acc* grads, const Acc* products, const Acc* pairs, Acc* decay, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict grad = grads + i * kChunk;
    const Acc* __restrict product = products + i * kChunk;
    const Acc* __restrict pair = pairs + i * kChunk;
    Acc logs[kChunk];
    for (int64_t j = 0; j < kChunk; ++j) {
      const Acc of_product = grad[j] * pair[j];
      const Acc of_log = of_product * product[j];
      grad[j] = j <= i ? of_product : Acc(0);
      logs[j] = j <= i ? of_log : Acc(0);
    }
    add_to_decay(decay, logs, i, sum_of(logs));
  }
}

template <typename Acc>
void of_system(
    Acc* grads, const Acc* products, const Acc* pairs, const Acc* beta, Acc* decay, Acc* grad_beta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Acc* __restrict grad = grads + i * kChunk;
    const Acc* __restrict product = products + i * kChunk;
    const Acc* __restrict pair = pairs + i * kChunk;
    const Acc step = beta[i];
    Acc betas[kChunk], logs[kChunk];
    for (int64_t j = 0; j < kChunk; ++j) {
      const Acc weighed = -(grad[j] * pair[j]);
      const Acc of_beta = weighed * product[j];
      grad[j] = j < i ? step * weighed : Acc(0);
      betas[j] = j < i ? of_beta : Acc(0);
      logs[j] = step * betas[j];
    }
    grad_beta[i] += sum_of(betas);
    add_to_decay(decay, logs, i, sum_of(logs));
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      grads[j * kChunk + i] = grads[i * kChunk + j];
    }
  }
}

template <typename Acc>
constexpr ChunkKernels<Acc> kChunkKernels = {
    decays<Acc>,     scale_rows<Acc>, add_scaled_rows<Acc>,  row_dots<Acc>,  weigh<Acc>,    system<Acc>,
    right_side<Acc>, solve<Acc>,      solve_transposed<Acc>, of_scores<Acc>, of_system<Acc>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kChunkKernels<float>, kChunkKernels<double>};

} // namespace moe_ext::recurrence::MOE_ISA
