// Token permutation: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/check.h"

namespace moe_ext::permutation {

struct IndexOptions {
  int64_t num_experts;
  int64_t capacity; // most rows of an expert; INT64_MAX when dropless
  bool drop_by_score;
  int64_t align; // the rows of each expert are padded to a multiple of this number
};

// Check all arguments, except for the values of elements, and return the options with defaults filled in.
IndexOptions check_permute_tokens(
    const Tensor& x,        // [T, D]
    const Tensor& topk_idx, // [T, K]
    int64_t num_experts,
    const std::optional<Tensor>& topk_weights, // [T, K]
    std::optional<int64_t> capacity, const std::string& drop_policy, int64_t align);

// min(T K, E capacity) + E (align - 1). The number does not depend on data, so that no backend waits for the counts.
int64_t num_rows(int64_t num_slots, const IndexOptions& options);

void check_gather_tokens(
    const Tensor& x,           // [T, D]
    const Tensor& slot_of_row, // [N]
    int64_t top_k);

void check_unpermute_tokens(
    const char* op,
    const Tensor& rows,        // [N, D]
    const Tensor& slot_of_row, // [N]
    const Tensor& row_of_slot, // [T K]
    int64_t top_k,
    const std::optional<Tensor>& topk_weights); // [T, K]

void check_unpermute_tokens_backward(
    const Tensor& grad,          // [T, D]
    const Tensor& rows,          // [N, D]
    const Tensor& slot_of_row,   // [N]
    const Tensor& row_of_slot,   // [T K]
    const Tensor& topk_weights); // [T, K]

} // namespace moe_ext::permutation
