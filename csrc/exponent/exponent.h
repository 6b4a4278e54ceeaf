// Lossless coding of floating point numbers by their exponents: the argument checks.
//
// A payload is a header of 16 bytes (magic, dtype, number of elements), the bytes of each block as uint32, padded to 8,
// and the blocks of 8192 elements. A block is 24 bytes (plan, exponents), the bits that are not exponents, the bit
// planes of each level, and a byte for each exponent that no level has; or plan 0 and the elements as they are. See
// exponent_simd.cpp for the plans.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "exponent/exponent_tables.h"

namespace moe_ext::exponent {

inline int64_t num_blocks(int64_t numel) {
  return (numel + kBlock - 1) / kBlock;
}

inline int64_t table_bytes(int64_t numel) {
  return kHeader + (4 * num_blocks(numel) + 7) / 8 * 8;
}

// Bytes of a full block that is not coded: no block takes more.
inline int64_t raw_block_bytes(int64_t item) {
  return kBlockHeader + kBlock * item;
}

inline int64_t most_bytes(int64_t numel, int64_t item) {
  const int64_t last = numel % kBlock;
  return table_bytes(numel) + numel / kBlock * raw_block_bytes(item) +
         (last ? kBlockHeader + (last * item + 7) / 8 * 8 : 0);
}

// Refuses other dtypes.
Kind check_elements(const char* op, const char* name, const Tensor& t);

// Payloads in rows of one length: `row_numel` elements each, fewer in the last ones.
Kind check_rows(const Tensor& x, int64_t num_rows);

inline int64_t row_numel(int64_t numel, int64_t num_rows) {
  return (numel + num_rows - 1) / num_rows;
}

// Elements of a row.
inline int64_t numel_of_row(int64_t numel, int64_t num_rows, int64_t row) {
  const int64_t each = row_numel(numel, num_rows);
  return std::clamp<int64_t>(numel - row * each, 0, each);
}

Kind check_row(const Tensor& out, const Tensor& row, const Tensor& damaged);

void check_payload(const char* op, const Tensor& payload, const Tensor& beside, const char* name);

// Refuses a payload without room for the head of numel elements.
void check_length(const char* op, const Tensor& payload, int64_t numel);

// The begin of each block, and the end of the last one, from a head on the host; empty where that is of another kind or
// number of elements.
std::vector<int64_t> places(const uint8_t* head, int64_t numel, Kind kind);

// The begin of each block, and the end of the last one, from a payload's head (table_bytes) on the host; refuses a head
// that does not fit `out`.
std::vector<int64_t> block_starts(
    const char* op, const uint8_t* head, const Tensor& payload, const Tensor& out, Kind kind);

} // namespace moe_ext::exponent
