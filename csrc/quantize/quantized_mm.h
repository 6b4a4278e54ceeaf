// Products with weights of 8 or 4 bits: the argument checks that both backends share.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/expert_offsets.h"

namespace moe_ext::quantized_mm {

void check_quantized_mm(
    const Tensor& x,               // [T, K]
    const Tensor& codes,           // [M, K bits / 8]
    const Tensor& scales,          // [M, K / block]
    const Tensor& outliers,        // [n]
    const Tensor& outlier_columns, // [n]
    const Tensor& outlier_offsets, // [M + 1]
    int64_t bits,
    const std::optional<Tensor>& expert_offsets); // [E + 1], into the rows of x; the weight then holds E experts

} // namespace moe_ext::quantized_mm
