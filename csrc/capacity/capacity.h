// Capacity: argument checks, which both backends share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"

namespace moe_ext::capacity {

struct CapacityOptions {
  int64_t num_experts;
  int64_t capacity; // of each expert in each group
  int64_t num_groups;
  int64_t slots_per_group; // K ceil(T / G); the last groups may have fewer
};

// Check everything that can be checked without reading the data, which may be on a device.
CapacityOptions check_limit_capacity(
    const Tensor& topk_idx, // [T, K]
    int64_t num_experts, int64_t capacity,
    const std::optional<Tensor>& order, // [T K]
    int64_t num_groups,
    const std::optional<Tensor>& ranked_idx); // [T, R]

} // namespace moe_ext::capacity
