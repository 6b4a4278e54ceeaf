// Packing by mask: the argument checks that both backends share. A bitmap has one bit per element, eight per byte, the
// first element in the lowest bit.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/expert_offsets.h"

namespace moe_ext::mask {

inline int64_t num_bitmap_bytes(int64_t numel) {
  return numel / 8 + (numel % 8 != 0);
}

void check_pack_bits(const Tensor& x);

void check_mask(
    const char* op, const char* name,
    const Tensor& dense,   // N elements
    const Tensor& packed,  // [n]
    const Tensor& bitmap); // [ceil(N / 8)]

void check_masked_mm(
    const Tensor& x,                              // [T, K]
    const Tensor& values,                         // [n]
    const Tensor& bitmap,                         // [M, K / 8]
    const std::optional<Tensor>& expert_offsets); // [E + 1], into the rows of x; values and bitmap then hold E experts

} // namespace moe_ext::mask
