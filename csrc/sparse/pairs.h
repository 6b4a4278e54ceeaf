// Pairs of values and indices: the argument checks that both backends share.
#pragma once

#include "common/check.h"
#include "sparse/pair_format.h"

namespace moe_ext::pairs {

// Each function checks all arguments, except for the values of elements, and returns the layout of the packed indices.
IndexLayout check_pack_indices(
    const Tensor& indices, // [K]
    int64_t numel);

IndexLayout check_unpack_indices(const Tensor& packed, int64_t count, int64_t numel);

IndexLayout check_add_pairs(
    const Tensor& out,
    const Tensor& values, // [K]
    const Tensor& packed, int64_t numel, int64_t start, double divisor);

} // namespace moe_ext::pairs
