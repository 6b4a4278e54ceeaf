// Lossless coding of floating point numbers by their exponents: the checks that both backends share.
//
// A payload is a header of 16 bytes (magic, dtype, number of elements), the size of each block in bytes as uint32,
// padded to 8 bytes, and the blocks of 8192 elements. A block is 24 bytes (plan, exponents), the bits that are not
// exponents, the bit planes of each level, and one byte for each exponent that no level codes. With plan 0 it holds the
// elements unchanged. exponent_tables.h lists the plans.
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

// Bytes of a full block with unchanged elements, the largest size of a block.
inline int64_t raw_block_bytes(int64_t item) {
  return kBlockHeader + kBlock * item;
}

inline int64_t most_bytes(int64_t numel, int64_t item) {
  const int64_t last = numel % kBlock;
  return table_bytes(numel) + numel / kBlock * raw_block_bytes(item) +
         (last ? kBlockHeader + (last * item + 7) / 8 * 8 : 0);
}

// Returns the kind of a tensor's dtype; refuses dtypes other than bfloat16, float16 and float32.
Kind check_elements(const char* op, const char* name, const Tensor& t);

// Checks the arguments of encode_exponent_rows and returns the kind. Each row holds the payload of `row_numel`
// elements; the last ones hold fewer.
Kind check_rows(const Tensor& x, int64_t num_rows);

inline int64_t row_numel(int64_t numel, int64_t num_rows) {
  return (numel + num_rows - 1) / num_rows;
}

// Number of elements whose payload is in a row.
inline int64_t numel_of_row(int64_t numel, int64_t num_rows, int64_t row) {
  const int64_t each = row_numel(numel, num_rows);
  return std::clamp<int64_t>(numel - row * each, 0, each);
}

Kind check_row(const Tensor& out, const Tensor& row, const Tensor& damaged);

void check_payload(const char* op, const Tensor& payload, const Tensor& out);

// Refuses a payload that is too short for the head (header and table of sizes) of numel elements.
void check_length(const char* op, const Tensor& payload, int64_t numel);

// Returns the begin of each block and the end of the last one, from a head in host memory. The result is empty if the
// head has another kind or number of elements.
std::vector<int64_t> places(const uint8_t* head, int64_t numel, Kind kind);

// Returns the begin of each block and the end of the last one, from the first table_bytes of a payload in host memory.
// Refuses a head that does not fit `out`.
std::vector<int64_t> block_starts(
    const char* op, const uint8_t* head, const Tensor& payload, const Tensor& out, Kind kind);

} // namespace moe_ext::exponent
