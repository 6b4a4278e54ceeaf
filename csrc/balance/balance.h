// Balance: argument checks of plans, which throw unless dtypes and shapes fit. P ranks, E experts, S = 2 E / P slots of
// each rank.
#pragma once

#include <cstdint>

#include "common/check.h"

namespace moe_ext::balance {

void check_plan_balance(const Tensor& num_tokens_per_expert, int64_t num_ranks); // [E]

void check_split_rows(
    const Tensor& counts,      // [P, E]
    const Tensor& slot_expert, // [P, S]
    const Tensor& slot_rows);  // [P, S]

} // namespace moe_ext::balance
