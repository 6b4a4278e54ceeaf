// Backward pass of block attention: FlashAttention-2 (Dao 2023), algorithm 2, without atomics. For each tile of
// queries, one pass over the keys sums grad_q. For each tile of keys, one pass over the queries of all heads of a group
// sums grad_k and grad_v. Each pass computes the scores again, and the order of every sum is fixed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/attention_kernels.cuh"

namespace moe_ext::attention {

template <typename Acc>
struct BackwardArrays {
  Heads<Acc> grad_out;           // [B, H, Sq, Dv]
  const Acc* lse;                // [B, H, Sq]
  const Acc* delta;              // [B, H, Sq]
  Acc *grad_q, *grad_k, *grad_v; // dense
  Acc* grad_bias = nullptr;      // [B, H, Sq, Sk], zeros at first, or null
};

// Copies LSE and delta of a tile's queries. Queries without keys, and those behind the last query, get LSE +inf, so
// that exp(score - inf) is 0.
template <typename Acc>
__device__ __forceinline__ void copy_statistics(
    const BackwardArrays<Acc>& arrays, int64_t row0, int rows, TileTokens<Acc>& tokens) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kTile) {
    const Acc lse = i < rows ? arrays.lse[row0 + i] : Acc(kInf);
    tokens.q_lse[i] = lse == -Acc(kInf) ? Acc(kInf) : lse;
    tokens.q_delta[i] = i < rows ? arrays.delta[row0 + i] : Acc(0);
  }
}

// Replaces products q.k (s) by the softmax with dropout, and grad_out.v (g) by the gradient of q.k. Rows of the tile
// are queries, or keys if not kRowsAreQueries. `bias` is not used without kBias.
template <typename Layout, bool kRowsAreQueries, bool kSoftcap, bool kAlibi, bool kBias, typename Acc>
__device__ __forceinline__ void softmax_gradient(
    Scores<Acc, Layout>& s, Scores<Acc, Layout>& g, const TileTokens<Acc>& tokens, const HeadScore<Acc>& head,
    const volatile TileBias<Acc>& bias, unsigned kept, bool masked) {
  const Score<Acc> score = head.score;
  const Acc inv_keep = head.inv_keep;
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < Layout::kCols; ++j) {
      const int row = Layout::row(i), col = Layout::col(j);
      const int of_q = kRowsAreQueries ? row : col, of_k = kRowsAreQueries ? col : row;
      const int32_t q = tokens.q_positions[of_q], k = tokens.k_positions[of_k];
      Acc tanh = 0;
      Acc value = score_of<kSoftcap, kAlibi>(s[i][j], score, tanh, k - q);
      if constexpr (kBias) {
        value += bias.at(of_q, of_k);
      }
      const Interval visible = visible_positions(q, head.window);
      const bool seen = (!masked) | ((k >= visible.first) & (k <= visible.last) &
                                     (tokens.q_documents[of_q] == tokens.k_documents[of_k]));
      const Acc p = seen ? exp_acc(value - tokens.q_lse[of_q]) : Acc(0);
      const Acc keep = (kept >> (Layout::kCols * i + j) & 1u) != 0 ? inv_keep : Acc(0);
      const Acc of_score = p * (g[i][j] * keep - tokens.q_delta[of_q]);
      const Acc ds = of_score * score.scale;
      s[i][j] = p * keep;
      // A row without keys has p = 0, but its delta may be anything, even NaN.
      g[i][j] = p == 0 ? Acc(0) : kSoftcap ? ds * (Acc(1) - tanh * tanh) : ds;
      if constexpr (kBias && kRowsAreQueries) {
        bias.set_grad(of_q, of_k, p == 0 ? Acc(0) : of_score);
      }
    }
  }
}

// Calls softmax_gradient for the current tile, with the numbers that dropout keeps.
template <typename Layout, bool kRowsAreQueries, bool kBias, typename T, typename Acc>
__device__ __forceinline__ void gradient_of_tile(
    Scores<Acc, Layout>& s, Scores<Acc, Layout>& g, const TileContext<T>& scratch, bool masked) {
  const unsigned kept =
      scratch.head.threshold > 0 ? kept_scores<Layout, kRowsAreQueries>(scratch.tokens, scratch.head) : ~0u;
  with_score<kBias>(scratch.head.score, [&]<bool kSoftcap, bool kAlibi>() {
    softmax_gradient<Layout, kRowsAreQueries, kSoftcap, kAlibi, kBias>(
        s, g, scratch.tokens, scratch.head, scratch.bias, kept, masked);
  });
}

// The bound of one block per SM keeps ptxas from spilling registers in order to fit two blocks.
template <int kCols, bool kBias, typename T>
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_q_kernel(BlockParams<T> params, BackwardArrays<acc_t<T>> arrays, int num_chunks) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(TileScratch<T>, scratch);
  const TileTask task(params.queries.num_tiles, num_chunks, params.heads);
  const int tile = params.queries.num_tiles - 1 - task.tile;
  const int64_t row = int64_t{tile} * kTile, b = task.sequence;
  const int64_t row0 = task.matrix * params.q.num_rows + row;
  const TokenTile& own = params.queries.of_sequence(b)[tile];
  const TokenTile* const keys = params.keys.of_sequence(b);
  TileTokens<Acc>& tokens = scratch->tokens;
  if (threadIdx.x == 0) {
    const int64_t key_head = task.head / params.group();
    scratch->q = params.q.of(b, task.head);
    scratch->k = params.k.of(b, key_head);
    scratch->v = params.v.of(b, key_head);
    scratch->grad_out = arrays.grad_out.of(b, task.head);
    scratch->head = head_score(params, b, task.head);
    scratch->first_col = task.chunk * kCols;
    scratch->row = row;
    scratch->row0 = row0;
  }
  copy_tokens(own, tokens.q_positions, tokens.q_documents);
  copy_statistics(arrays, row0, own.count, tokens);
  Sums<Acc, kCols> grad_q;
  grad_q.clear();
  const auto may = [&](int t) { return may_see(own.extent, keys[t].extent, params.window); };
  for_each_visible<kNumThreads>(params.keys.num_tiles, scratch->visible, may, [&](int t, int) {
    copy_tokens(keys[t], tokens.k_positions, tokens.k_documents);
    if (kBias && threadIdx.x == 0) {
      // Only the first chunk of columns writes the gradient of the bias.
      Acc* const grads = task.chunk == 0 ? arrays.grad_bias : nullptr;
      scratch->bias = tile_bias(params, grads, b, task.head, row, int64_t{t} * kTile);
    }
    __syncthreads();
    Scores<Acc> s, g;
    multiply_rows(s, scratch->stage, scratch->q, scratch->row, scratch->k, int64_t{t} * kTile);
    multiply_rows(g, scratch->stage, scratch->grad_out, scratch->row, scratch->v, int64_t{t} * kTile);
    gradient_of_tile<SquareLayout, true, kBias>(s, g, *scratch, is_masked(own.extent, keys[t], params.window));
    write_weights(scratch->weights, g);
    grad_q.add(scratch->stage, scratch->weights, scratch->k.columns(scratch->first_col, kCols), int64_t{t} * kTile);
  });
  __syncthreads();
  const int cols = params.q.cols;
  grad_q.store_tile(arrays.grad_q + scratch->row0 * cols, own.count, cols, scratch->first_col);
}

// A thread block owns a tile of keys, and up to kCols columns of both gradients.
template <int kCols, bool kBias, typename T>
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kv_kernel(BlockParams<T> params, BackwardArrays<acc_t<T>> arrays, int num_chunks) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(TileScratch<T>, scratch);
  const TileTask task(params.keys.num_tiles, num_chunks, params.key_heads);
  const int64_t row = int64_t{task.tile} * kTile, b = task.sequence, key_head = task.head;
  const TokenTile& own = params.keys.of_sequence(b)[task.tile];
  const TokenTile* const queries = params.queries.of_sequence(b);
  TileTokens<Acc>& tokens = scratch->tokens;
  if (threadIdx.x == 0) {
    scratch->k = params.k.of(b, key_head);
    scratch->v = params.v.of(b, key_head);
    scratch->first_col = task.chunk * kCols;
    scratch->row = row;
    scratch->row0 = task.matrix * params.k.num_rows + row;
  }
  copy_tokens(own, tokens.k_positions, tokens.k_documents);
  Sums<Acc, kCols> grad_k, grad_v;
  grad_k.clear();
  grad_v.clear();
  const auto may = [&](int t) { return may_see(queries[t].extent, own.extent, params.window); };
  for (int64_t h = key_head * params.group(); h < (key_head + 1) * params.group(); ++h) {
    if (threadIdx.x == 0) {
      scratch->q = params.q.of(b, h);
      scratch->grad_out = arrays.grad_out.of(b, h);
      scratch->head = head_score(params, b, h);
    }
    const int64_t row0 = (b * params.heads + h) * params.q.num_rows;
    for_each_visible<kNumThreads>(params.queries.num_tiles, scratch->visible, may, [&](int t, int) {
      copy_tokens(queries[t], tokens.q_positions, tokens.q_documents);
      copy_statistics(arrays, row0 + int64_t{t} * kTile, queries[t].count, tokens);
      if (kBias && threadIdx.x == 0) {
        scratch->bias = tile_bias(params, nullptr, b, h, int64_t{t} * kTile, row);
      }
      __syncthreads();
      Scores<Acc> s, g;
      multiply_rows(s, scratch->stage, scratch->k, scratch->row, scratch->q, int64_t{t} * kTile);
      multiply_rows(g, scratch->stage, scratch->v, scratch->row, scratch->grad_out, int64_t{t} * kTile);
      gradient_of_tile<SquareLayout, false, kBias>(s, g, *scratch, is_masked(queries[t].extent, own, params.window));
      write_weights(scratch->weights, s);
      grad_v.add(
          scratch->stage, scratch->weights, scratch->grad_out.columns(scratch->first_col, kCols), int64_t{t} * kTile);
      write_weights(scratch->weights, g);
      grad_k.add(scratch->stage, scratch->weights, scratch->q.columns(scratch->first_col, kCols), int64_t{t} * kTile);
    });
  }
  __syncthreads();
  const int64_t first = scratch->row0, rows = params.k.num_rows - scratch->row;
  grad_k.store_tile(arrays.grad_k + first * params.k.cols, rows, params.k.cols, scratch->first_col);
  grad_v.store_tile(arrays.grad_v + first * params.v.cols, rows, params.v.cols, scratch->first_col);
}

template <int kCols, bool kBias, typename T>
void launch_backward_columns(
    const BlockParams<T>& params, const BackwardArrays<acc_t<T>>& arrays, cudaStream_t stream) {
  const auto shared_bytes = sizeof(TileScratch<T>);
  const int q_chunks = num_chunks(params.k.cols, kCols);
  const int64_t q_blocks = int64_t{params.queries.num_tiles} * params.batch * params.heads * q_chunks;
  if (q_blocks > 0) {
    launch(
        {Dim3(q_blocks), Dim3(kNumThreads), shared_bytes, stream}, backward_q_kernel<kCols, kBias, T>, params, arrays,
        q_chunks);
  }
  const int kv_chunks = num_chunks(std::max(params.k.cols, params.v.cols), kCols);
  const int64_t kv_blocks = int64_t{params.keys.num_tiles} * params.batch * params.key_heads * kv_chunks;
  if (kv_blocks > 0) {
    launch(
        {Dim3(kv_blocks), Dim3(kNumThreads), shared_bytes, stream}, backward_kv_kernel<kCols, kBias, T>, params, arrays,
        kv_chunks);
  }
}

template <typename T>
void launch_backward(const BlockParams<T>& params, const BackwardArrays<acc_t<T>>& arrays, cudaStream_t stream) {
  if (params.bias.values != nullptr) {
    launch_backward_columns<kGroupCols, true>(params, arrays, stream);
  } else if (std::max(params.k.cols, params.v.cols) > kGroupCols && kMostCols<acc_t<T>> > kGroupCols) {
    launch_backward_columns<kMostCols<acc_t<T>>, false>(params, arrays, stream);
  } else {
    launch_backward_columns<kGroupCols, false>(params, arrays, stream);
  }
}

} // namespace moe_ext::attention
