// Grouped matrix product: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"

namespace moe_ext::grouped_gemm {

// Each checks everything that needs no look at the data.
void check_grouped_mm(
    const Tensor& x,                    // [N, K]
    const Tensor& weight,               // [E, M, K]
    const Tensor& expert_offsets,       // [E + 1]
    const std::optional<Tensor>& bias); // [E, M]

void check_backward_weight(
    const Tensor& grad,            // [N, M]
    const Tensor& x,               // [N, K]
    const Tensor& expert_offsets); // [E + 1]

void check_backward_bias(
    const Tensor& grad,            // [N, M]
    const Tensor& expert_offsets); // [E + 1]

// Throws unless 0 <= offsets[0] <= ... <= offsets[num_experts] <= num_rows. Host memory.
void check_offsets(const char* op, const int64_t* offsets, int64_t num_experts, int64_t num_rows);

} // namespace moe_ext::grouped_gemm
