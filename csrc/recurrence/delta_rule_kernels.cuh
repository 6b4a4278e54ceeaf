// Kernels of the gated delta rule. A block owns some columns of a head's values, whose states do not depend on other
// columns, and processes chunks of kRuleChunk positions in shared memory. If a document begins within a chunk, sums
// begin there, so that no number of one document meets one of another. There are no atomics: partial sums of blocks are
// added by a later sum.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/warp.cuh"
#include "recurrence/decay_math.h"

namespace moe_ext::recurrence {

constexpr int kRuleChunk = 16;
constexpr int kRuleThreads = 128;
// Limit on V, because the grid's second dimension counts tiles of values.
constexpr int64_t kMostValuesOnCuda = int64_t{1} << 17;

// A tensor [B, heads, L, columns] with adjacent columns.
template <typename T>
struct RuleRows {
  T* data;
  int64_t batch, head, position;

  __device__ __forceinline__ T* at(int64_t b, int64_t h, int64_t t) const {
    return data + b * batch + h * head + t * position;
  }
};

template <typename Acc>
struct RuleInput {
  RuleRows<const Acc> q, k, v;
  const Acc *g, *beta;      // [B, H, L]; beta may be null
  const int64_t* documents; // [1 or B, L], or null
  int64_t documents_stride; // 0 if one row serves the whole batch
  int64_t batch, groups, heads, length;
  int dim, v_dim, columns; // K, V, columns of V of a block

  int tiles() const {
    return (v_dim + columns - 1) / columns;
  }
  __device__ __forceinline__ int64_t num_chunks() const {
    return (length + kRuleChunk - 1) / kRuleChunk;
  }
};

// The work of a block: a head of a row of the batch, and columns [first, first + count) of its values.
struct RulePlace {
  int64_t row, head, group, tile;
  int first, count;

  template <typename Acc>
  __device__ __forceinline__ explicit RulePlace(const RuleInput<Acc>& in)
      : row(int64_t{blockIdx.x} / in.heads),
        head(int64_t{blockIdx.x} % in.heads),
        group(head / (in.heads / in.groups)),
        tile(blockIdx.y),
        first(static_cast<int>(tile) * in.columns),
        count(min(in.columns, in.v_dim - first)) {
  }
};

// Calls f(i, j) for all elements of [rows][cols], each in one thread.
template <typename F>
__device__ __forceinline__ void each_element(int rows, int cols, const F& f) {
  for (int e = static_cast<int>(threadIdx.x); e < rows * cols; e += kRuleThreads) {
    f(e / cols, e % cols);
  }
}

// Calls f(row, lane) in a warp for each row.
template <typename F>
__device__ __forceinline__ void each_row(int rows, const F& f) {
  for (int row = warp_id(); row < rows; row += kRuleThreads / kWarpSize) {
    f(row, lane_id());
  }
}

// Shared memory of a block: q and k of a chunk, and the decays between its positions.
template <typename Acc>
struct RuleChunk {
  int n, stride; // positions; stride of rows of q and k, which is dim + 1 to spread rows over banks
  Acc *q, *k;    // [kRuleChunk][stride]
  Acc *sums, *beta, *carried, *to_end; // [kRuleChunk]
  int *first, *end;                    // range of each position's document within the chunk
  int last_begin;                      // begin of the last position's document
  bool has_start;                      // true if a document begins within the chunk

  __device__ __forceinline__ Acc* place(Acc* memory, int dim) {
    stride = dim + 1;
    q = memory;
    k = q + kRuleChunk * stride;
    sums = k + kRuleChunk * stride;
    beta = sums + kRuleChunk;
    carried = beta + kRuleChunk;
    to_end = carried + kRuleChunk;
    first = reinterpret_cast<int*>(to_end + kRuleChunk);
    end = first + kRuleChunk;
    return to_end + 3 * kRuleChunk;
  }

  // Return true if position i belongs to the document that was open before the chunk.
  __device__ __forceinline__ bool is_open(int i, bool begins) const {
    return first[i] == 0 && !begins;
  }

  __device__ __forceinline__ Acc pair(int i, int j) const {
    return decay_of(sums[i] - sums[j]);
  }
};

// Number of elements of shared memory that `RuleChunk::place` uses.
inline int64_t rule_chunk_elements(int dim) {
  return int64_t{2} * kRuleChunk * (dim + 1) + 6 * kRuleChunk;
}

// Reads the chunk from `begin` on. Every thread must call it. Returns true if a document begins at its first position.
template <typename Acc>
__device__ __forceinline__ bool read_chunk(
    RuleChunk<Acc>& chunk, const RuleInput<Acc>& in, const RulePlace& at, int64_t begin) {
  chunk.n = static_cast<int>(min(int64_t{kRuleChunk}, in.length - begin));
  each_element(chunk.n, in.dim, [&](int i, int d) {
    chunk.q[i * chunk.stride + d] = in.q.at(at.row, at.group, begin + i)[d];
    chunk.k[i * chunk.stride + d] = in.k.at(at.row, at.group, begin + i)[d];
  });
  const int64_t numbers = (at.row * in.heads + at.head) * in.length + begin;
  const int64_t* const documents =
      in.documents == nullptr ? nullptr : in.documents + at.row * in.documents_stride + begin;
  const auto starts = [&](int i) { return documents != nullptr && begin + i > 0 && documents[i] != documents[i - 1]; };
  if (threadIdx.x == 0) {
    Acc sum = 0;
    int from = 0;
    for (int i = 0; i < chunk.n; ++i) {
      if (i > 0 && starts(i)) {
        from = i;
        sum = 0;
      }
      sum += in.g[numbers + i];
      chunk.first[i] = from;
      chunk.sums[i] = sum;
      chunk.beta[i] = in.beta == nullptr ? Acc(1) : in.beta[numbers + i];
      chunk.carried[i] = decay_of(sum);
    }
    int to = chunk.n;
    for (int i = chunk.n - 1; i >= 0; --i) {
      chunk.end[i] = to;
      to = chunk.first[i] == i ? i : to;
    }
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < chunk.n) {
    chunk.to_end[threadIdx.x] = decay_of(chunk.sums[chunk.n - 1] - chunk.sums[threadIdx.x]);
  }
  chunk.last_begin = chunk.first[chunk.n - 1];
  chunk.has_start = chunk.last_begin > 0;
  const bool begins = starts(0);
  __syncthreads();
  return begins;
}

// Replaces the state before the chunk by the state after it. news [kRuleChunk][columns].
template <typename Acc>
__device__ __forceinline__ void go_on(
    Acc* state, const RuleChunk<Acc>& chunk, bool begins, const Acc* news, int dim, int columns, int count) {
  const bool kept = !begins && !chunk.has_start;
  const Acc through = chunk.carried[chunk.n - 1];
  each_element(dim, count, [&](int d, int c) {
    Acc sum = kept ? through * state[d * columns + c] : Acc(0);
    for (int i = chunk.last_begin; i < chunk.n; ++i) {
      sum += chunk.to_end[i] * chunk.k[i * chunk.stride + d] * news[i * columns + c];
    }
    state[d * columns + c] = sum;
  });
  __syncthreads();
}

// weights[i][j] = (left_i . k_j) times the decay from j to i, for j <= i of the same document. j == i is left out
// without kDiagonal.
template <bool kDiagonal, typename Acc>
__device__ __forceinline__ void pair_products(Acc* weights, const RuleChunk<Acc>& chunk, const Acc* left, int dim) {
  each_element(chunk.n, chunk.n, [&](int i, int j) {
    if (j < chunk.first[i] || j > i || (!kDiagonal && j == i)) {
      return;
    }
    Acc sum = 0;
    for (int d = 0; d < dim; ++d) {
      sum += left[i * chunk.stride + d] * chunk.k[j * chunk.stride + d];
    }
    weights[i * kRuleChunk + j] = sum * chunk.pair(i, j);
  });
}

template <typename Acc>
inline size_t forward_bytes(int dim, int columns) {
  const int64_t elements =
      rule_chunk_elements(dim) + int64_t{dim} * columns + kRuleChunk * columns + 2 * kRuleChunk * kRuleChunk;
  return elements * sizeof(Acc);
}

// out [B, H, L, V]; last [B, H, K, V], which holds the first state at the start; news [B, H, L, V], or null without
// beta.
template <typename Acc>
__global__ void __launch_bounds__(kRuleThreads)
    delta_rule_kernel(RuleInput<Acc> in, Acc* __restrict__ out, Acc* __restrict__ last, Acc* __restrict__ news) {
  MOE_DYNAMIC_SHARED(Acc, memory);
  RuleChunk<Acc> chunk;
  const int columns = in.columns;
  Acc* const state = chunk.place(memory, in.dim);
  Acc* const rows = state + in.dim * columns;
  Acc* const system = rows + kRuleChunk * columns;
  Acc* const scores = system + kRuleChunk * kRuleChunk;
  const RulePlace at(in);
  const int64_t head = at.row * in.heads + at.head;
  each_element(in.dim, at.count, [&](int d, int c) {
    state[d * columns + c] = last[(head * in.dim + d) * in.v_dim + at.first + c];
  });
  __syncthreads();
  for (int64_t begin = 0; begin < in.length; begin += kRuleChunk) {
    const bool begins = read_chunk(chunk, in, at, begin);
    pair_products<true>(scores, chunk, chunk.q, in.dim);
    if (in.beta != nullptr) {
      pair_products<false>(system, chunk, chunk.k, in.dim);
    }
    each_element(chunk.n, at.count, [&](int i, int c) {
      const Acc value = in.v.at(at.row, at.head, begin + i)[at.first + c];
      Acc read = 0;
      if (in.beta != nullptr && chunk.is_open(i, begins)) {
        for (int d = 0; d < in.dim; ++d) {
          read += chunk.k[i * chunk.stride + d] * state[d * columns + c];
        }
        read *= chunk.carried[i];
      }
      rows[i * columns + c] = in.beta == nullptr ? value : chunk.beta[i] * (value - read);
    });
    __syncthreads();
    if (in.beta != nullptr && static_cast<int>(threadIdx.x) < at.count) {
      const int c = static_cast<int>(threadIdx.x);
      for (int i = 0; i < chunk.n; ++i) {
        Acc sum = rows[i * columns + c];
        for (int j = chunk.first[i]; j < i; ++j) {
          sum -= chunk.beta[i] * system[i * kRuleChunk + j] * rows[j * columns + c];
        }
        rows[i * columns + c] = sum;
      }
    }
    __syncthreads();
    each_element(chunk.n, at.count, [&](int i, int c) {
      Acc sum = 0;
      if (chunk.is_open(i, begins)) {
        for (int d = 0; d < in.dim; ++d) {
          sum += chunk.q[i * chunk.stride + d] * state[d * columns + c];
        }
        sum *= chunk.carried[i];
      }
      for (int j = chunk.first[i]; j <= i; ++j) {
        sum += scores[i * kRuleChunk + j] * rows[j * columns + c];
      }
      const int64_t to = (head * in.length + begin + i) * in.v_dim + at.first + c;
      out[to] = sum;
      if (news != nullptr) {
        news[to] = rows[i * columns + c];
      }
    });
    __syncthreads();
    go_on(state, chunk, begins, rows, in.dim, columns, at.count);
  }
  each_element(in.dim, at.count, [&](int d, int c) {
    last[(head * in.dim + d) * in.v_dim + at.first + c] = state[d * columns + c];
  });
}

// Reads the rows that a chunk adds to the state: `news`, or the values without beta.
template <typename Acc>
__device__ __forceinline__ void read_news(
    Acc* rows, const RuleInput<Acc>& in, const RulePlace& at, const Acc* news, int64_t begin, int n) {
  each_element(n, at.count, [&](int i, int c) {
    const int64_t head = at.row * in.heads + at.head;
    rows[i * in.columns + c] = news == nullptr ? in.v.at(at.row, at.head, begin + i)[at.first + c]
                                               : news[(head * in.length + begin + i) * in.v_dim + at.first + c];
  });
}

// states [B, H, N, K, V]: the state before each chunk.
template <typename Acc>
__global__ void __launch_bounds__(kRuleThreads) delta_rule_states_kernel(
    RuleInput<Acc> in, const Acc* __restrict__ first, const Acc* __restrict__ news, Acc* __restrict__ states) {
  MOE_DYNAMIC_SHARED(Acc, memory);
  RuleChunk<Acc> chunk;
  Acc* const state = chunk.place(memory, in.dim);
  Acc* const rows = state + in.dim * in.columns;
  const RulePlace at(in);
  const int64_t head = at.row * in.heads + at.head;
  each_element(in.dim, at.count, [&](int d, int c) {
    state[d * in.columns + c] = first[(head * in.dim + d) * in.v_dim + at.first + c];
  });
  __syncthreads();
  for (int64_t i = 0; i < in.num_chunks(); ++i) {
    each_element(in.dim, at.count, [&](int d, int c) {
      states[((head * in.num_chunks() + i) * in.dim + d) * in.v_dim + at.first + c] = state[d * in.columns + c];
    });
    const bool begins = read_chunk(chunk, in, at, i * kRuleChunk);
    read_news(rows, in, at, news, i * kRuleChunk, chunk.n);
    __syncthreads();
    go_on(state, chunk, begins, rows, in.dim, in.columns, at.count);
  }
}

// Gradients. q and k are partial sums [B, H, tiles, L, K], g and beta [B, H, tiles, L]. `state` holds the gradient of
// the last state at the start.
template <typename Acc>
struct RuleGradients {
  RuleRows<const Acc> out;
  const Acc *news, *states;
  Acc *q, *k, *v, *g, *beta, *state;
};

template <typename Acc>
inline size_t backward_bytes(int dim, int columns) {
  const int64_t elements = rule_chunk_elements(dim) + int64_t{kRuleChunk} * (dim + 1) + int64_t{2} * dim * columns +
                           3 * kRuleChunk * columns + 3 * kRuleChunk * kRuleChunk + 2 * kRuleChunk;
  return elements * sizeof(Acc);
}

template <typename Acc>
__global__ void __launch_bounds__(kRuleThreads)
    delta_rule_backward_kernel(RuleInput<Acc> in, RuleGradients<Acc> grads) {
  MOE_DYNAMIC_SHARED(Acc, memory);
  RuleChunk<Acc> chunk;
  const int columns = in.columns, dim = in.dim;
  Acc* const before = chunk.place(memory, dim);
  Acc* const of_state = before + dim * columns;
  Acc* const rows = of_state + dim * columns; // rows that are added to the state
  Acc* const of_out = rows + kRuleChunk * columns;
  Acc* const of_rows = of_out + kRuleChunk * columns;
  Acc* const scores = of_rows + kRuleChunk * columns;   // q . k, times decays
  Acc* const system = scores + kRuleChunk * kRuleChunk; // k . k, times decays
  Acc* const of_pairs = system + kRuleChunk * kRuleChunk;
  Acc* const of_sums = of_pairs + kRuleChunk * kRuleChunk;
  Acc* const of_beta = of_sums + kRuleChunk;
  Acc* const keys = of_beta + kRuleChunk; // [kRuleChunk][stride]
  const RulePlace at(in);
  const int64_t head = at.row * in.heads + at.head, tiles = gridDim.y, part = head * tiles + at.tile;
  const int stride = chunk.stride;
  each_element(dim, at.count, [&](int d, int c) {
    of_state[d * columns + c] = grads.state[(head * dim + d) * in.v_dim + at.first + c];
  });
  __syncthreads();
  // keys[i][d] = sum over columns of left[i] right[d] if `has(i)`, else 0.
  const auto against_state = [&](const Acc* left, const Acc* right, const auto& has) {
    each_element(chunk.n, dim, [&](int i, int d) {
      Acc sum = 0;
      if (has(i)) {
        for (int c = 0; c < at.count; ++c) {
          sum += left[i * columns + c] * right[d * columns + c];
        }
      }
      keys[i * stride + d] = sum;
    });
    __syncthreads();
  };
  // Calls f(i, keys[i] . with[i]) in one lane.
  const auto each_dot = [&](const Acc* with, const auto& f) {
    each_row(chunk.n, [&](int i, int lane) {
      Acc sum = 0;
      for (int d = lane; d < dim; d += kWarpSize) {
        sum += keys[i * stride + d] * with[i * stride + d];
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        f(i, sum);
      }
    });
    __syncthreads();
  };
  // Adds the gradients of the logarithms of decays that follow from `of_pairs`, the gradients of `weights`. One thread
  // for each position.
  const auto add_to_sums = [&](const Acc* weights, bool of_system, Acc sign) {
    const int i = static_cast<int>(threadIdx.x);
    if (i < chunk.n) {
      Acc sum = 0, of_own_beta = 0;
      for (int j = chunk.first[i]; j < i; ++j) {
        const Acc one = sign * of_pairs[i * kRuleChunk + j] * weights[i * kRuleChunk + j];
        sum += of_system ? chunk.beta[i] * one : one;
        of_own_beta += one;
      }
      for (int row = i + 1; row < chunk.end[i]; ++row) {
        const Acc one = sign * of_pairs[row * kRuleChunk + i] * weights[row * kRuleChunk + i];
        sum -= of_system ? chunk.beta[row] * one : one;
      }
      of_sums[i] += sum;
      of_beta[i] += of_system ? of_own_beta : Acc(0);
    }
    __syncthreads();
  };
  for (int64_t number = in.num_chunks() - 1; number >= 0; --number) {
    const int64_t begin = number * kRuleChunk;
    const bool begins = read_chunk(chunk, in, at, begin);
    const bool kept = !begins && !chunk.has_start;
    const auto is_open = [&](int i) { return chunk.is_open(i, begins); };
    const auto is_last = [&](int i) { return i >= chunk.last_begin; };
    const int64_t keys_at = (part * in.length + begin) * dim;
    read_news(rows, in, at, grads.news, begin, chunk.n);
    each_element(chunk.n, at.count, [&](int i, int c) {
      of_out[i * columns + c] = grads.out.at(at.row, at.head, begin + i)[at.first + c];
    });
    each_element(dim, at.count, [&](int d, int c) {
      before[d * columns + c] = grads.states[((head * in.num_chunks() + number) * dim + d) * in.v_dim + at.first + c];
    });
    if (static_cast<int>(threadIdx.x) < chunk.n) {
      of_sums[threadIdx.x] = 0;
      of_beta[threadIdx.x] = 0;
    }
    pair_products<true>(scores, chunk, chunk.q, dim);
    if (in.beta != nullptr) {
      pair_products<false>(system, chunk, chunk.k, dim);
    }
    __syncthreads();
    // Gradients of the added rows, from the outputs and from the state after the chunk; and gradients of pairs.
    each_element(chunk.n, at.count, [&](int j, int c) {
      Acc sum = 0;
      if (is_last(j)) {
        for (int d = 0; d < dim; ++d) {
          sum += chunk.k[j * stride + d] * of_state[d * columns + c];
        }
        sum *= chunk.to_end[j];
      }
      for (int i = j; i < chunk.end[j]; ++i) {
        sum += scores[i * kRuleChunk + j] * of_out[i * columns + c];
      }
      of_rows[j * columns + c] = sum;
    });
    each_element(chunk.n, chunk.n, [&](int i, int j) {
      if (j >= chunk.first[i] && j <= i) {
        Acc sum = 0;
        for (int c = 0; c < at.count; ++c) {
          sum += of_out[i * columns + c] * rows[j * columns + c];
        }
        of_pairs[i * kRuleChunk + j] = sum;
      }
    });
    __syncthreads();
    add_to_sums(scores, false, 1);
    // Gradients through the outputs, which read the state before the chunk.
    against_state(of_out, before, is_open);
    each_dot(chunk.q, [&](int i, Acc dot) { of_sums[i] += chunk.carried[i] * dot; });
    each_element(chunk.n, dim, [&](int i, int d) {
      Acc sum = chunk.carried[i] * keys[i * stride + d];
      sum = is_open(i) ? sum : Acc(0);
      for (int j = chunk.first[i]; j <= i; ++j) {
        sum += of_pairs[i * kRuleChunk + j] * chunk.pair(i, j) * chunk.k[j * stride + d];
      }
      grads.q[keys_at + i * dim + d] = sum;
    });
    __syncthreads();
    // Gradients through the state after the chunk.
    against_state(rows, of_state, is_last);
    each_dot(chunk.k, [&](int i, Acc dot) { keys[i * stride + dim] = is_last(i) ? chunk.to_end[i] * dot : Acc(0); });
    if (threadIdx.x == 0) {
      Acc all = 0;
      for (int i = chunk.last_begin; i < chunk.n; ++i) {
        of_sums[i] -= keys[i * stride + dim];
        all += keys[i * stride + dim];
      }
      of_sums[chunk.n - 1] += all;
    }
    if (kept && warp_id() == 0) {
      Acc sum = 0;
      for (int e = lane_id(); e < dim * at.count; e += kWarpSize) {
        const int place = e / at.count * columns + e % at.count;
        sum += before[place] * of_state[place];
      }
      sum = warp_sum(sum);
      if (lane_id() == 0) {
        of_sums[chunk.n - 1] += chunk.carried[chunk.n - 1] * sum;
      }
    }
    each_element(chunk.n, dim, [&](int j, int d) {
      Acc sum = is_last(j) ? chunk.to_end[j] * keys[j * stride + d] : Acc(0);
      for (int i = j; i < chunk.end[j]; ++i) {
        sum += of_pairs[i * kRuleChunk + j] * chunk.pair(i, j) * chunk.q[i * stride + d];
      }
      grads.k[keys_at + j * dim + d] = sum;
    });
    __syncthreads();
    if (in.beta != nullptr) {
      if (static_cast<int>(threadIdx.x) < at.count) {
        const int c = static_cast<int>(threadIdx.x);
        for (int j = chunk.n - 1; j >= 0; --j) {
          Acc sum = of_rows[j * columns + c];
          for (int i = j + 1; i < chunk.end[j]; ++i) {
            sum -= chunk.beta[i] * system[i * kRuleChunk + j] * of_rows[i * columns + c];
          }
          of_rows[j * columns + c] = sum;
        }
      }
      __syncthreads();
      each_element(chunk.n, chunk.n, [&](int i, int j) {
        if (j >= chunk.first[i] && j < i) {
          Acc sum = 0;
          for (int c = 0; c < at.count; ++c) {
            sum += of_rows[i * columns + c] * rows[j * columns + c];
          }
          of_pairs[i * kRuleChunk + j] = sum;
        }
      });
      __syncthreads();
      add_to_sums(system, true, -1);
      against_state(of_rows, before, is_open);
      each_dot(chunk.k, [&](int i, Acc dot) {
        if (is_open(i)) {
          of_beta[i] -= chunk.carried[i] * dot;
          of_sums[i] -= chunk.beta[i] * chunk.carried[i] * dot;
        }
      });
      each_row(chunk.n, [&](int i, int lane) {
        Acc sum = 0;
        for (int c = lane; c < at.count; c += kWarpSize) {
          sum += of_rows[i * columns + c] * in.v.at(at.row, at.head, begin + i)[at.first + c];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
          grads.beta[part * in.length + begin + i] = of_beta[i] + sum;
        }
      });
      each_element(chunk.n, dim, [&](int i, int d) {
        Acc sum = is_open(i) ? chunk.beta[i] * chunk.carried[i] * keys[i * stride + d] : Acc(0);
        for (int j = chunk.first[i]; j < i; ++j) {
          sum += chunk.beta[i] * of_pairs[i * kRuleChunk + j] * chunk.pair(i, j) * chunk.k[j * stride + d];
        }
        for (int row = i + 1; row < chunk.end[i]; ++row) {
          sum += chunk.beta[row] * of_pairs[row * kRuleChunk + i] * chunk.pair(row, i) * chunk.k[row * stride + d];
        }
        grads.k[keys_at + i * dim + d] -= sum;
      });
    }
    __syncthreads();
    each_element(chunk.n, at.count, [&](int i, int c) {
      const Acc factor = in.beta == nullptr ? Acc(1) : chunk.beta[i];
      grads.v[(head * in.length + begin + i) * in.v_dim + at.first + c] = factor * of_rows[i * columns + c];
    });
    each_element(dim, at.count, [&](int d, int c) {
      Acc sum = kept ? chunk.carried[chunk.n - 1] * of_state[d * columns + c] : Acc(0);
      for (int i = 0; i < chunk.n && is_open(i); ++i) {
        sum += chunk.carried[i] * chunk.q[i * stride + d] * of_out[i * columns + c];
        if (in.beta != nullptr) {
          sum -= chunk.beta[i] * chunk.carried[i] * chunk.k[i * stride + d] * of_rows[i * columns + c];
        }
      }
      of_state[d * columns + c] = sum;
    });
    if (threadIdx.x == 0) {
      Acc sum = 0;
      for (int i = chunk.n - 1; i >= 0; --i) {
        sum += of_sums[i];
        grads.g[part * in.length + begin + i] = sum;
        sum = chunk.first[i] == i ? Acc(0) : sum;
      }
    }
    __syncthreads();
  }
  each_element(dim, at.count, [&](int d, int c) {
    grads.state[(head * dim + d) * in.v_dim + at.first + c] = of_state[d * columns + c];
  });
}

// Columns of the values of a block: as many as 96 KiB of shared memory hold in the backward pass; 0 if not even 4 fit.
template <typename Acc>
int rule_columns(int dim) {
  for (const int columns : {32, 16, 8, 4}) {
    if (backward_bytes<Acc>(dim, columns) <= size_t{96} << 10) {
      return columns;
    }
  }
  return 0;
}

template <typename Acc>
Launch over_heads(const RuleInput<Acc>& in, size_t bytes, cudaStream_t stream) {
  const Dim3 grid(in.batch * in.heads, in.tiles());
  return {grid, Dim3(kRuleThreads), bytes, stream};
}

template <typename Acc>
void launch_delta_rule(const RuleInput<Acc>& in, Acc* out, Acc* last, Acc* news, cudaStream_t stream) {
  if (in.batch * in.heads * in.v_dim == 0) {
    return;
  }
  launch(over_heads(in, forward_bytes<Acc>(in.dim, in.columns), stream), delta_rule_kernel<Acc>, in, out, last, news);
}

template <typename Acc>
void launch_delta_rule_backward(
    const RuleInput<Acc>& in, const Acc* first, Acc* states, const RuleGradients<Acc>& grads, cudaStream_t stream) {
  if (in.batch * in.heads * in.v_dim == 0) {
    return;
  }
  launch(
      over_heads(in, forward_bytes<Acc>(in.dim, in.columns), stream), delta_rule_states_kernel<Acc>, in, first,
      grads.news, states);
  launch(over_heads(in, backward_bytes<Acc>(in.dim, in.columns), stream), delta_rule_backward_kernel<Acc>, in, grads);
}

} // namespace moe_ext::recurrence
