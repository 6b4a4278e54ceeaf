// Shared by the forward and backward pass of a block on the CPU: arguments in the form of the loops, the tiles that the
// masks leave, and torch's matrix products.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_tables.h"
#include "attention/attention_tiles.h"
#include "common/dispatch.h"
#include "grouped_gemm/per_expert.h"
#include "grouped_gemm/tiles.h"

namespace moe_ext::attention {

using grouped_gemm::mm_out;
using grouped_gemm::view_of;

// Size of a tile. Its scores are 256 KiB in float, and fit a second-level cache beside the rows that they are computed
// from.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileCols = 512;
// Padded, because rows at a distance of a power of two would compete for the same sets of the cache.
constexpr int64_t kScoreStride = kTileCols + kLanes;

// Call f(task, scratch) for each task. Free threads take the next task; each thread makes one Scratch.
template <typename Scratch, typename F>
void for_each_task(int64_t num_tasks, const F& f) {
  std::atomic<int64_t> next{0};
  const int64_t num_workers = std::min<int64_t>(torch::stable::get_num_threads(), num_tasks);
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      const grouped_gemm::OneThread limit;
      Scratch scratch;
      for (int64_t task = next++; task < num_tasks; task = next++) {
        f(task, scratch);
      }
    }
  });
}

// Return t in the given dtype with adjacent columns, copied only if needed.
inline Tensor as_rows(const Tensor& t, ScalarType dtype) {
  const Tensor converted = t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
  return converted.stride(3) == 1 || converted.size(3) <= 1 ? converted : torch::stable::contiguous(converted);
}

inline Tensor dense(const Tensor& t, ScalarType dtype) {
  return torch::stable::contiguous(t.scalar_type() == dtype ? t : torch::stable::to(t, dtype));
}

// Views of rows [begin, end) of matrix (b, h) of a 4-D tensor, and of their transpose.
inline Tensor rows_at(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t end) {
  const int64_t offset = b * t.stride(0) + h * t.stride(1) + begin * t.stride(2);
  return view_of(t, offset, {end - begin, t.size(3), t.stride(2), 1});
}

inline Tensor columns_at(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t end) {
  const int64_t offset = b * t.stride(0) + h * t.stride(1) + begin * t.stride(2);
  return view_of(t, offset, {t.size(3), end - begin, 1, t.stride(2)});
}

// out += a b
inline void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

// Memory of a tile of scores, with views of it as a matrix.
template <typename Acc>
struct __attribute__((visibility("hidden"))) ScoreTile {
  std::vector<Acc> memory = std::vector<Acc>(kTileRows * kScoreStride);

  Acc* data() {
    return memory.data();
  }
  Tensor view(const Tensor& like, int64_t rows, int64_t cols) {
    const std::array<int64_t, 2> sizes = {rows, cols}, strides = {kScoreStride, 1};
    return torch::stable::from_blob(memory.data(), sizes, strides, like.device(), like.scalar_type());
  }
  Tensor transposed(const Tensor& like, int64_t rows, int64_t cols) {
    const std::array<int64_t, 2> sizes = {cols, rows}, strides = {1, kScoreStride};
    return torch::stable::from_blob(memory.data(), sizes, strides, like.device(), like.scalar_type());
  }
};

// Positions (kMaskedKey where masked) and documents of a tile's columns, padded to a multiple of kLanes.
struct ColumnScratch {
  std::vector<int32_t> positions = std::vector<int32_t>(kTileCols + kLanes);
  std::vector<int32_t> documents = std::vector<int32_t>(kTileCols + kLanes);
};

inline Tokens tokens_of(
    const char* op, const char* position_name, const char* document_name, const Tensor& positions,
    const OptionalTensor& documents) {
  const int64_t n = positions.size(0);
  const Tensor p = torch::stable::contiguous(positions);
  check_range(op, position_name, data<int64_t>(p), n, 0, kMostPositions, "[0, 2^31 - 2)");
  Tokens tokens;
  tokens.positions.assign(data<int64_t>(p), data<int64_t>(p) + n);
  tokens.documents.assign(n, 0);
  if (documents) {
    const Tensor d = torch::stable::contiguous(*documents);
    check_range(op, document_name, data<int64_t>(d), n, INT32_MIN, int64_t{1} << 31, "[-2^31, 2^31)");
    tokens.documents.assign(data<int64_t>(d), data<int64_t>(d) + n);
  }
  return tokens;
}

inline std::vector<Extent> extents_of(const Tokens& tokens, int64_t tile) {
  std::vector<Extent> extents;
  for (int64_t begin = 0; begin < tokens.size(); begin += tile) {
    extents.push_back(extent_of(tokens, begin, std::min(tokens.size(), begin + tile)));
  }
  return extents;
}

// A block's arguments, checked and converted. Positions and documents are checked before results are allocated.
template <typename Acc>
struct __attribute__((visibility("hidden"))) Block {
  Tokens queries, keys;
  std::vector<Extent> row_extents, col_extents;
  Tensor q, k, v;
  OptionalTensor key_mask, slopes, bias;
  Window window;
  Score<Acc> score;
  Dropout dropout = {};
  int64_t batch, heads, key_heads, num_queries, num_keys, batch_offset, head_offset;

  Block(const char* op, const BlockArgs& args)
      : queries(tokens_of(op, "q_positions", "q_documents", args.q_positions, args.q_documents)),
        keys(tokens_of(op, "k_positions", "k_documents", args.k_positions, args.k_documents)),
        row_extents(extents_of(queries, kTileRows)),
        col_extents(extents_of(keys, kTileCols)),
        window(effective_window(args.causal, args.window_left, args.window_right)),
        score{static_cast<Acc>(args.scale), static_cast<Acc>(args.softcap), 0},
        batch(args.q.size(0)),
        heads(args.q.size(1)),
        key_heads(args.k.size(1)),
        num_queries(args.q.size(2)),
        num_keys(args.k.size(2)),
        batch_offset(args.batch_offset),
        head_offset(args.head_offset) {
    const ScalarType dtype = acc_dtype(args.q.scalar_type());
    q = as_rows(args.q, dtype);
    k = as_rows(args.k, dtype);
    v = as_rows(args.v, dtype);
    if (args.key_mask) {
      key_mask = torch::stable::contiguous(*args.key_mask);
    }
    if (args.alibi_slopes) {
      slopes = dense(*args.alibi_slopes, dtype);
    }
    if (args.bias) {
      bias = as_rows(*args.bias, dtype);
    }
    if (args.dropout_p > 0) {
      dropout = dropout_of(args.dropout_p, *data<int64_t>(*args.seed));
    }
  }

  int64_t num_row_tiles() const {
    return static_cast<int64_t>(row_extents.size());
  }
  int64_t group() const {
    return heads / std::max<int64_t>(1, key_heads);
  }

  // Call f(tile) for each key tile of a query tile that has scores to compute.
  template <typename F>
  void each_visible(int64_t b, int64_t row_tile, const F& f) const {
    const int64_t row_begin = row_tile * kTileRows, row_end = std::min(num_queries, row_begin + kTileRows);
    const bool* mask = key_mask ? data<bool>(*key_mask) + b * num_keys : nullptr;
    for (size_t i = 0; i < col_extents.size(); ++i) {
      const int64_t col_begin = static_cast<int64_t>(i) * kTileCols;
      const int64_t col_end = std::min(num_keys, col_begin + kTileCols);
      const VisibleTile tile = visible_tile(
          queries, keys, mask, window, {row_begin, row_end, col_begin, col_end, true}, row_extents[row_tile],
          col_extents[i]);
      if (!tile.empty()) {
        f(tile);
      }
    }
  }

  TileArgs<Acc> tile_args(int64_t b, int64_t h, const VisibleTile& tile, ColumnScratch& columns) const {
    const int64_t cols = tile.col_end - tile.col_begin;
    const bool* mask = key_mask ? data<bool>(*key_mask) + b * num_keys + tile.col_begin : nullptr;
    const int32_t* positions = keys.positions.data() + tile.col_begin;
    bool consecutive = true;
    for (int64_t col = 0; col < cols; ++col) {
      columns.positions[col] = mask == nullptr || mask[col] ? positions[col] : kMaskedKey;
      columns.documents[col] = keys.documents[tile.col_begin + col];
      consecutive &= positions[col] - positions[0] == col;
    }
    std::fill(columns.positions.begin() + cols, columns.positions.end(), kMaskedKey);
    Score<Acc> of_head = score;
    of_head.slope = slopes ? data<Acc>(*slopes)[h] : Acc(0);
    const int64_t bias_stride = bias ? bias->stride(2) : 0;
    const Acc* of_bias = bias ? bias_of(b, h) + tile.row_begin * bias_stride + tile.col_begin : nullptr;
    return {
        tile.row_end - tile.row_begin,
        cols,
        kScoreStride,
        of_head,
        window,
        tile.masked,
        consecutive,
        queries.positions.data() + tile.row_begin,
        queries.documents.data() + tile.row_begin,
        columns.positions.data(),
        columns.documents.data(),
        positions,
        dropout,
        b + batch_offset,
        h + head_offset,
        of_bias,
        bias_stride};
  }

  // The bias [Sq][Sk] of a head. A dimension of size 1 is broadcast.
  const Acc* bias_of(int64_t b, int64_t h) const {
    const int64_t batch_at = bias->size(0) > 1 ? b : 0, head_at = bias->size(1) > 1 ? h : 0;
    return data<Acc>(*bias) + batch_at * bias->stride(0) + head_at * bias->stride(1);
  }
};

} // namespace moe_ext::attention
