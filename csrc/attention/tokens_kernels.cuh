// The tokens of a tile in the form of the kernels: positions, documents and their ranges, which a small kernel computes
// once a call; and the loop over the tiles that the masks leave.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/attention_extent.h"
#include "common/launch.cuh"
#include "common/warp.cuh"

namespace moe_ext::attention {

constexpr int kTile = 64; // number of queries and of keys of a tile of scores
constexpr int kNumThreads = 256;
constexpr int kNumWarps = kNumThreads / kWarpSize;

struct TokenTile {
  int32_t positions[kTile]; // kMaskedKey for masked tokens, and behind the last token
  int32_t documents[kTile];
  Extent extent; // of tokens that are not masked
  int32_t count;
};

// Tiles of the queries or keys of a block. Sequence b has tiles [b * num_tiles, ...); without a mask all sequences
// share tiles.
struct TokenTiles {
  TokenTile* tiles;
  int num_tiles; // of a sequence
  int64_t num_sequences;

  __device__ __forceinline__ const TokenTile* of_sequence(int64_t b) const {
    return tiles + (num_sequences > 1 ? b * num_tiles : 0);
  }
};

struct TokenSource {
  const int64_t* positions; // [n]
  const int64_t* documents; // [n], or null: one document
  const bool* mask;         // [B, n], or null
  int64_t n;
};

template <bool kCheck>
__device__ __forceinline__ int32_t narrow_token(int64_t value, int64_t low, int64_t high) {
  if constexpr (kCheck) {
    if (value < low || value >= high) {
      __trap();
    }
  }
  return static_cast<int32_t>(value);
}

template <bool kCheck>
__device__ __forceinline__ void describe_tile(const TokenSource& source, const TokenTiles& to, int64_t index) {
  const int64_t sequence = index / to.num_tiles, first = (index - sequence * to.num_tiles) * kTile;
  TokenTile& tile = to.tiles[index];
  Extent extent;
  int32_t count = 0;
#pragma unroll
  for (int part = 0; part < kTile; part += kWarpSize) {
    const int place = part + lane_id();
    const int64_t token = first + place;
    int32_t position = kMaskedKey, document = 0;
    if (token < source.n) {
      position = narrow_token<kCheck>(source.positions[token], 0, kMostPositions);
      if (source.documents != nullptr) {
        document = narrow_token<kCheck>(source.documents[token], INT32_MIN, int64_t{1} << 31);
      }
      if (source.mask == nullptr || source.mask[sequence * source.n + token]) {
        extent.add(position, document);
        ++count;
      } else {
        position = kMaskedKey;
      }
    }
    tile.positions[place] = position;
    tile.documents[place] = document;
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    Extent other;
    other.first = __shfl_xor_sync(kFullMask, extent.first, offset);
    other.last = __shfl_xor_sync(kFullMask, extent.last, offset);
    other.first_document = __shfl_xor_sync(kFullMask, extent.first_document, offset);
    other.last_document = __shfl_xor_sync(kFullMask, extent.last_document, offset);
    extent.add(other);
  }
  count = warp_sum(count);
  if (lane_id() == 0) {
    tile.extent = extent;
    tile.count = count;
  }
}

// One warp for each tile: first the tiles of the queries, then those of the keys.
template <bool kCheck>
__global__ void describe_tokens_kernel(
    TokenSource q_source, TokenTiles queries, TokenSource k_source, TokenTiles keys) {
  const int64_t query_tiles = queries.num_tiles * queries.num_sequences, index = blockIdx.x;
  if (index < query_tiles) {
    describe_tile<kCheck>(q_source, queries, index);
  } else {
    describe_tile<kCheck>(k_source, keys, index - query_tiles);
  }
}

template <bool kCheck>
void launch_describe_tokens(
    const TokenSource& q_source, const TokenTiles& queries, const TokenSource& k_source, const TokenTiles& keys,
    cudaStream_t stream) {
  const int64_t tiles = queries.num_sequences * queries.num_tiles + keys.num_sequences * keys.num_tiles;
  if (tiles > 0) {
    launch(
        {Dim3(tiles), Dim3(kWarpSize), 0, stream}, describe_tokens_kernel<kCheck>, q_source, queries, k_source, keys);
  }
}

// Calls f(tile, next) in order for each tile that `may` accepts. `next` is the tile of the following call, or -1 if
// there is none or it is not known yet. Threads test kThreads tiles at a time, so that hidden tiles cost almost
// nothing. `visible`, one word for each warp, is shared memory used by nothing else.
template <int kThreads, typename Visible, typename F>
__device__ __forceinline__ void for_each_visible(int num_tiles, unsigned* visible, const Visible& may, const F& f) {
  for (int base = 0; base < num_tiles; base += kThreads) {
    const int mine = base + static_cast<int>(threadIdx.x);
    const unsigned word = __ballot_sync(kFullMask, mine < num_tiles && may(mine));
    if (lane_id() == 0) {
      visible[warp_id()] = word;
    }
    __syncthreads();
    int warp = 0;
    unsigned left = visible[0];
    const auto take = [&] {
      while (left == 0 && ++warp < kThreads / kWarpSize) {
        left = visible[warp];
      }
      const int tile = left == 0 ? -1 : base + warp * kWarpSize + __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      return tile;
    };
    for (int tile = take(); tile >= 0;) {
      const int next = take();
      f(tile, next);
      tile = next;
    }
    __syncthreads();
  }
}

} // namespace moe_ext::attention
