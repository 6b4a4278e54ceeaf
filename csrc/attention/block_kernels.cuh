// Shared by the passes over a block: its arguments, the tokens of the current tile, and the computation of scores from
// products, masks, bias and dropout.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "attention/tile_products.cuh"
#include "attention/tokens_kernels.cuh"

namespace moe_ext::attention {

// A bias [Sq][Sk] for each head. A stride is 0 if heads or sequences share a bias.
template <typename Acc>
struct Bias {
  const Acc* values = nullptr; // null: no bias
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

template <typename T>
struct BlockParams {
  Heads<T> q; // [B, H, Sq, Dk]
  Heads<T> k; // [B, Hkv, Sk, Dk]
  Heads<T> v; // [B, Hkv, Sk, Dv]
  TokenTiles queries, keys;
  const acc_t<T>* slopes; // [H], or null
  const int64_t* seed;    // [1], or null
  acc_t<T> scale, softcap;
  Window window;
  uint32_t threshold; // of `Dropout`
  acc_t<T> inv_keep;
  int64_t batch, heads, key_heads;
  int64_t batch_offset, head_offset;
  Bias<acc_t<T>> bias = {};

  __device__ __forceinline__ int64_t group() const {
    return heads / key_heads;
  }
};

template <typename Acc>
struct TileTokens {
  int32_t q_positions[kTile], q_documents[kTile];
  int32_t k_positions[kTile], k_documents[kTile];
  Acc q_lse[kTile], q_delta[kTile]; // in the backward pass only
};

// The task of a thread block: blockIdx.x = (matrix * chunks + chunk) * tiles + tile.
struct TileTask {
  int tile, chunk;
  int matrix, sequence, head; // matrix = sequence * heads + head

  __device__ __forceinline__ TileTask(int num_tiles, int num_chunks, int64_t num_heads) {
    const unsigned index = blockIdx.x, tiles = static_cast<unsigned>(num_tiles), rest = index / tiles;
    const unsigned chunks = static_cast<unsigned>(num_chunks), heads = static_cast<unsigned>(num_heads);
    tile = static_cast<int>(index - rest * tiles);
    matrix = static_cast<int>(rest / chunks);
    chunk = static_cast<int>(rest - rest / chunks * chunks);
    sequence = matrix / static_cast<int>(heads);
    head = matrix - sequence * static_cast<int>(heads);
  }
};

// Number of chunks of columns of the results. At least one, which writes the LSE even if there are no columns.
inline int num_chunks(int cols, int chunk_cols) {
  return std::max(1, ceil_div(cols, chunk_cols));
}

// Copies positions and documents to shared memory. A barrier must follow.
__device__ __forceinline__ void copy_tokens(const TokenTile& tile, int32_t* positions, int32_t* documents) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kTile) {
    positions[i] = tile.positions[i];
  } else if (i < 2 * kTile) {
    documents[i - kTile] = tile.documents[i - kTile];
  }
}

// Parameters that turn the products of one head into scores.
template <typename Acc>
struct HeadScore {
  Score<Acc> score;
  Window window;
  uint64_t seed;
  uint32_t threshold;
  Acc inv_keep;
  int64_t batch, head; // in the whole batch and model: they select the random numbers

  __device__ __forceinline__ bool keeps(int32_t q_position, int32_t k_position) const {
    const uint32_t column = static_cast<uint32_t>(k_position);
    const PhiloxWords words = dropout_draws(seed, batch, head, q_position).words(column);
    const uint32_t low = (column & 1u) != 0 ? words.w[1] : words.w[0];
    const uint32_t high = (column & 1u) != 0 ? words.w[3] : words.w[2];
    return ((column & 2u) != 0 ? high : low) >> 8 >= threshold;
  }
};

template <typename T>
__device__ __forceinline__ HeadScore<acc_t<T>> head_score(const BlockParams<T>& p, int64_t b, int64_t h) {
  const acc_t<T> slope = p.slopes != nullptr ? p.slopes[h] : acc_t<T>(0);
  const uint64_t seed = p.threshold > 0 ? static_cast<uint64_t>(*p.seed) : 0;
  return {{p.scale, p.softcap, slope}, p.window, seed, p.threshold, p.inv_keep, b + p.batch_offset, h + p.head_offset};
}

// Pointers to the first bias of a tile of queries and keys, and to its gradient. Elements behind the last query or key
// are not accessed. Volatile, so that it is read from shared memory at each use: in registers it would make kernels for
// double spill.
template <typename Acc>
struct TileBias {
  const Acc* values;
  Acc* grads; // null: not needed
  int64_t row_stride, grads_stride;
  int num_queries, num_keys; // in the tile

  __device__ __forceinline__ Acc at(int q, int k) const volatile {
    return q < num_queries && k < num_keys ? values[q * row_stride + k] : Acc(0);
  }
  __device__ __forceinline__ void set_grad(int q, int k, Acc value) const volatile {
    if (grads != nullptr && q < num_queries && k < num_keys) {
      grads[q * grads_stride + k] = value;
    }
  }
};

// Bias of the tile from `first_query` and `first_key` on. `grads` is the gradient [B, H, Sq, Sk], or null.
template <typename T>
__device__ __forceinline__ TileBias<acc_t<T>> tile_bias(
    const BlockParams<T>& p, acc_t<T>* grads, int64_t b, int64_t h, int64_t first_query, int64_t first_key) {
  const int64_t num_queries = p.q.num_rows, num_keys = p.k.num_rows;
  const int64_t offset = ((b * p.heads + h) * num_queries + first_query) * num_keys + first_key;
  const acc_t<T>* const values = p.bias.values + b * p.bias.batch_stride + h * p.bias.head_stride;
  return {
      values + first_query * p.bias.row_stride + first_key,
      grads == nullptr ? nullptr : grads + offset,
      p.bias.row_stride,
      num_keys,
      static_cast<int>(num_queries - first_query < kTile ? num_queries - first_query : kTile),
      static_cast<int>(num_keys - first_key < kTile ? num_keys - first_key : kTile)};
}

// Calls f.operator()<softcap, alibi>(). A branch at each score would keep the compiler from interleaving a thread's
// sixteen scores.
template <bool kBias, typename Acc, typename F>
__device__ __forceinline__ void with_score(const Score<Acc>& score, const F& f) {
  if (score.softcap != 0) {
    f.template operator()<true, true>();
  } else if (kBias || score.slope != 0) {
    f.template operator()<false, true>();
  } else {
    f.template operator()<false, false>();
  }
}

// Shared memory of a thread block, with and without tensor cores. It also holds rarely read values for which registers
// have no room.
template <typename T>
struct TileContext {
  using Acc = acc_t<T>;
  TileTokens<Acc> tokens;
  unsigned visible[kNumWarps];
  Rows<T> q, k, v;
  Rows<Acc> grad_out;
  HeadScore<Acc> head;
  TileBias<Acc> bias; // of the current tiles
  int first_col;      // of the chunk of the results
  int64_t row;        // first row of the block's own tile, in its sequence
  int64_t row0;       // `row` in [B * H, Sq] or [B * Hkv, Sk]
};

template <typename T>
struct TileScratch : TileContext<T> {
  alignas(16) acc_t<T> stage[kStageSize];
  alignas(16) acc_t<T> weights[kTile * kWeightStride];
};

// Return true if some query may not see some key of a tile, so that masks must be applied.
__device__ __forceinline__ bool is_masked(const Extent& queries, const TokenTile& keys, Window window) {
  return keys.count < kTile || !all_see_all(queries, keys.extent, window);
}

// Return the scores of a thread that dropout keeps, as bits kCols * i + j. The loop is not unrolled, because sixteen
// generators at a time would need all registers.
template <typename Layout, bool kRowsAreQueries, typename Acc>
__device__ __forceinline__ unsigned kept_scores(const TileTokens<Acc>& tokens, const HeadScore<Acc>& head) {
  unsigned kept = 0;
#pragma unroll 1
  for (int n = 0; n < Layout::kRows * Layout::kCols; ++n) {
    const int row = Layout::row(n / Layout::kCols), col = Layout::col(n % Layout::kCols);
    const int32_t q = tokens.q_positions[kRowsAreQueries ? row : col];
    const int32_t k = tokens.k_positions[kRowsAreQueries ? col : row];
    kept |= unsigned{head.keeps(q, k)} << n;
  }
  return kept;
}

} // namespace moe_ext::attention
