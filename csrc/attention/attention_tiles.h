// The part of a tile of scores that the masks leave, computed from positions and documents. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention_extent.h"

namespace moe_ext::attention {

// Positions and documents of the queries or keys of a block.
struct Tokens {
  std::vector<int32_t> positions;
  std::vector<int32_t> documents;

  int64_t size() const {
    return static_cast<int64_t>(positions.size());
  }
};

inline Extent extent_of(const Tokens& tokens, int64_t begin, int64_t end) {
  Extent extent;
  for (int64_t i = begin; i < end; ++i) {
    extent.add(tokens.positions[i], tokens.documents[i]);
  }
  return extent;
}

// A tile [row_begin, row_end) x [col_begin, col_end) of scores.
struct VisibleTile {
  int64_t row_begin, row_end, col_begin, col_end;
  bool masked; // true if some row does not see some key

  bool empty() const {
    return row_begin >= row_end || col_begin >= col_end;
  }
};

// Shrink [begin, end) from both sides until f accepts the first and last token. Return the extent of the range.
template <typename F>
Extent shrink(const Tokens& tokens, int64_t& begin, int64_t& end, const F& f) {
  const auto accepts = [&](int64_t i) {
    Extent one;
    one.add(tokens.positions[i], tokens.documents[i]);
    return f(i, one);
  };
  while (begin < end && !accepts(begin)) {
    ++begin;
  }
  while (begin < end && !accepts(end - 1)) {
    --end;
  }
  return extent_of(tokens, begin, end);
}

// Return the part of a tile that has scores to compute. key_mask [keys] may be null.
inline VisibleTile visible_tile(
    const Tokens& queries, const Tokens& keys, const bool* key_mask, Window window, VisibleTile tile,
    const Extent& row_extent, const Extent& col_extent) {
  if (!may_see(row_extent, col_extent, window)) {
    tile.row_end = tile.row_begin;
    return tile;
  }
  const Extent cols = shrink(keys, tile.col_begin, tile.col_end, [&](int64_t i, const Extent& key) {
    return (key_mask == nullptr || key_mask[i]) && may_see(row_extent, key, window);
  });
  if (tile.col_begin >= tile.col_end) {
    return tile;
  }
  const Extent rows = shrink(
      queries, tile.row_begin, tile.row_end, [&](int64_t, const Extent& row) { return may_see(row, cols, window); });
  tile.masked = !all_see_all(rows, cols, window);
  for (int64_t i = tile.col_begin; key_mask != nullptr && !tile.masked && i < tile.col_end; ++i) {
    tile.masked = !key_mask[i];
  }
  return tile;
}

} // namespace moe_ext::attention
