// Sparsity by blocks and by rows: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"

namespace moe_ext::sparse_blocks {

inline int64_t num_blocks(int64_t numel, int64_t block) {
  return numel / block + (numel % block != 0);
}

// Bytes of a bitmap with one bit per block.
inline int64_t num_bitmap_bytes(int64_t blocks) {
  return blocks / 8 + (blocks % 8 != 0);
}

// Each function checks all arguments, except for the values of elements.
void check_nonzero_blocks(const Tensor& x, int64_t block);

void check_blocks(const char* op, const char* name, const Tensor& dense, int64_t block,
                  const Tensor& block_idx); // [B]

void check_packed(const char* op, const Tensor& packed, const Tensor& dense, int64_t block, const Tensor& block_idx);

void check_sum_rows(
    const Tensor& rows,    // [N, D]
    const Tensor& row_idx, // [N]
    int64_t num_rows);

} // namespace moe_ext::sparse_blocks
