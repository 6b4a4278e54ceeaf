// Forward pass of block attention: FlashAttention-2 (Dao 2023), algorithm 1, over tiles of 64 queries and 64 keys. A
// thread block owns a tile of queries and up to kCols columns of their output, which stay in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/block_kernels.cuh"

namespace moe_ext::attention {

template <typename Acc>
struct ForwardState {
  Acc* out;          // [B, H, Sq, Dv]
  Acc* lse;          // [B, H, Sq]
  const Acc* before; // LSE of the result in `out` to which the block is added; null: there is none
  int cols;          // Dv
  bool aligned;      // rows of `out` allow accesses of 16 bytes
};

// Replaces products by scores, -inf where the query does not see the key. `bias` is not read without kBias.
template <typename Layout, bool kSoftcap, bool kAlibi, bool kBias, typename Acc>
__device__ __forceinline__ void mask_scores(
    Scores<Acc, Layout>& s, const TileTokens<Acc>& tokens, const HeadScore<Acc>& head,
    const volatile TileBias<Acc>& bias, bool masked) {
  const Score<Acc> score = head.score;
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
    const int row = Layout::row(i);
    const int32_t q = tokens.q_positions[row], document = tokens.q_documents[row];
    const Interval visible = visible_positions(q, head.window);
#pragma unroll
    for (int j = 0; j < Layout::kCols; ++j) {
      const int col = Layout::col(j);
      const int32_t k = tokens.k_positions[col];
      Acc unused = 0;
      Acc value = score_of<kSoftcap, kAlibi>(s[i][j], score, unused, k - q);
      if constexpr (kBias) {
        value += bias.at(row, col);
      }
      const bool seen =
          (!masked) | ((k >= visible.first) & (k <= visible.last) & (tokens.k_documents[col] == document));
      s[i][j] = seen ? value : -Acc(kInf);
    }
  }
}

// Replaces scores by exp(score - max) after updating the maxima. `sum` holds a thread's sums over its own columns.
template <typename Layout, typename Acc, typename Out>
__device__ __forceinline__ void softmax_tile(
    Scores<Acc, Layout>& s, Acc (&max)[Layout::kRows], Acc (&sum)[Layout::kRows], Out& out) {
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
    Acc most = max[i];
#pragma unroll
    for (int j = 0; j < Layout::kCols; ++j) {
      most = s[i][j] > most ? s[i][j] : most;
    }
    most = warp_max<Layout::kLanes>(most);
    const Acc shift = most == -Acc(kInf) ? Acc(0) : most;
    const Acc fade = exp_acc(max[i] - shift);
    max[i] = most;
    sum[i] *= fade;
    out.scale_row(i, fade);
#pragma unroll
    for (int j = 0; j < Layout::kCols; ++j) {
      s[i][j] = exp_acc(s[i][j] - shift);
      sum[i] += s[i][j];
    }
  }
}

template <typename Layout, typename Acc>
__device__ __forceinline__ void drop(Scores<Acc, Layout>& s, unsigned kept, Acc inv_keep) {
#pragma unroll
  for (int n = 0; n < Layout::kRows * Layout::kCols; ++n) {
    s[n / Layout::kCols][n % Layout::kCols] *= (kept >> n & 1u) != 0 ? inv_keep : Acc(0);
  }
}

// Starts a tile's rows from a finished result: sum 1, maximum LSE. The output of rows without keys is not read.
template <typename Layout, typename Acc, typename Out>
__device__ __forceinline__ void load_state(
    const ForwardState<Acc>& state, int64_t row0, int rows, int first_col, Acc (&max)[Layout::kRows],
    Acc (&sum)[Layout::kRows], Out& out) {
  const Rows<Acc> before = {state.out + row0 * state.cols, state.cols, rows, state.cols, state.aligned};
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
    const int row = Layout::row(i);
    const Acc lse = state.before != nullptr && row < rows ? state.before[row0 + row] : -Acc(kInf);
    const bool empty = lse == Acc(kInf) || lse == -Acc(kInf);
    max[i] = empty ? -Acc(kInf) : lse;
    sum[i] = empty || Layout::lane() > 0 ? Acc(0) : Acc(1);
    if (empty) {
      out.clear_row(i);
    } else {
      out.load_row(i, before, row, first_col);
    }
  }
}

// out /= sum, lse = max + log(sum). Rows without keys get out 0, LSE -inf. Only the first chunk of columns writes the
// LSE.
template <typename Layout, typename Acc, typename Out>
__device__ __forceinline__ void finish_rows(
    const ForwardState<Acc>& state, int64_t row0, int rows, int first_col, const Acc (&max)[Layout::kRows],
    const Acc (&sum)[Layout::kRows], Out& out) {
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
    const int row = Layout::row(i);
    const Acc total = warp_sum<Layout::kLanes>(sum[i]);
    if (row >= rows) {
      continue;
    }
    out.scale_row(i, total == 0 ? Acc(0) : Acc(1) / total);
    out.store_row(i, state.out + (row0 + row) * state.cols, state.cols, first_col, state.aligned);
    if (first_col == 0 && Layout::lane() == 0) {
      // The sum is 0 only for rows without keys, because the largest score adds exp(0) = 1. NaN goes on to both
      // results.
      state.lse[row0 + row] = total == 0 ? -Acc(kInf) : total > 0 ? max[i] + log_positive(total) : total;
    }
  }
}

// Thread blocks that an SM should hold at once, which limits their registers. Two if the output takes few registers.
template <typename Acc, int kCols, bool kBias>
constexpr int kBlocksPerSm = sizeof(Acc) == 4 && kCols == kGroupCols && !kBias ? 2 : 1;

template <int kCols, bool kBias, typename T>
__global__ void __launch_bounds__(kNumThreads, kBlocksPerSm<acc_t<T>, kCols, kBias>)
    forward_kernel(BlockParams<T> params, ForwardState<acc_t<T>> state, int num_chunks) {
  using Acc = acc_t<T>;
  MOE_DYNAMIC_SHARED(TileScratch<T>, scratch);
  const TileTask task(params.queries.num_tiles, num_chunks, params.heads);
  // Under a causal mask the last tiles cost most. They come first, so that no SM ends late.
  const int tile = params.queries.num_tiles - 1 - task.tile;
  const int64_t row = int64_t{tile} * kTile, b = task.sequence;
  const int first_col = task.chunk * kCols;
  const TokenTile& own = params.queries.of_sequence(b)[tile];
  const TokenTile* const keys = params.keys.of_sequence(b);
  TileTokens<Acc>& tokens = scratch->tokens;
  const int64_t row0 = task.matrix * params.q.num_rows + row;
  if (threadIdx.x == 0) {
    const int64_t key_head = task.head / params.group();
    scratch->q = params.q.of(b, task.head);
    scratch->k = params.k.of(b, key_head);
    scratch->v = params.v.of(b, key_head).columns(first_col, kCols);
    scratch->head = head_score(params, b, task.head);
    scratch->row = row;
    scratch->row0 = row0;
  }
  copy_tokens(own, tokens.q_positions, tokens.q_documents);
  Acc max[kPerThread], sum[kPerThread];
  Sums<Acc, kCols> out;
  load_state<SquareLayout>(state, row0, own.count, first_col, max, sum, out);
  const auto may = [&](int t) { return may_see(own.extent, keys[t].extent, params.window); };
  for_each_visible<kNumThreads>(params.keys.num_tiles, scratch->visible, may, [&](int t, int) {
    copy_tokens(keys[t], tokens.k_positions, tokens.k_documents);
    if (kBias && threadIdx.x == 0) {
      scratch->bias = tile_bias(params, nullptr, b, task.head, row, int64_t{t} * kTile);
    }
    __syncthreads();
    Scores<Acc> s;
    multiply_rows(s, scratch->stage, scratch->q, scratch->row, scratch->k, int64_t{t} * kTile);
    const bool masked = is_masked(own.extent, keys[t], params.window);
    with_score<kBias>(scratch->head.score, [&]<bool kSoftcap, bool kAlibi>() {
      mask_scores<SquareLayout, kSoftcap, kAlibi, kBias>(s, tokens, scratch->head, scratch->bias, masked);
    });
    softmax_tile<SquareLayout>(s, max, sum, out);
    if (params.threshold > 0) {
      drop<SquareLayout>(s, kept_scores<SquareLayout, true>(tokens, scratch->head), params.inv_keep);
    }
    write_weights(scratch->weights, s);
    out.add(scratch->stage, scratch->weights, scratch->v, int64_t{t} * kTile);
  });
  __syncthreads();
  finish_rows<SquareLayout>(state, scratch->row0, own.count, first_col, max, sum, out);
}

template <int kCols, bool kBias, typename T>
void launch_forward_columns(const BlockParams<T>& params, const ForwardState<acc_t<T>>& state, cudaStream_t stream) {
  const int chunks = num_chunks(state.cols, kCols);
  const int64_t blocks = int64_t{params.queries.num_tiles} * params.batch * params.heads * chunks;
  if (blocks > 0) {
    launch(
        {Dim3(blocks), Dim3(kNumThreads), sizeof(TileScratch<T>), stream}, forward_kernel<kCols, kBias, T>, params,
        state, chunks);
  }
}

// Most columns of the output that a thread block keeps. More columns share the cost of the scores, but double takes
// twice the registers.
template <typename Acc>
constexpr int kMostCols = sizeof(Acc) == 8 ? kGroupCols : 2 * kGroupCols;

template <typename T>
void launch_forward(const BlockParams<T>& params, const ForwardState<acc_t<T>>& state, cudaStream_t stream) {
  if (params.bias.values != nullptr) {
    launch_forward_columns<kGroupCols, true>(params, state, stream);
  } else if (state.cols > kGroupCols && kMostCols<acc_t<T>> > kGroupCols) {
    launch_forward_columns<kMostCols<acc_t<T>>, false>(params, state, stream);
  } else {
    launch_forward_columns<kGroupCols, false>(params, state, stream);
  }
}

} // namespace moe_ext::attention
