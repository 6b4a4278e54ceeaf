#include "permutation/permutation.h"

#include <algorithm>
#include <limits>

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::permutation {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "permute_tokens(Tensor x, Tensor topk_idx, SymInt num_experts, Tensor? topk_weights=None, "
      "SymInt? capacity=None, str drop_policy=\"position\", SymInt align=1) -> "
      "(Tensor rows, Tensor slot_of_row, Tensor row_of_slot, Tensor expert_offsets, "
      "Tensor num_tokens_per_expert, Tensor num_dropped)");
  m.def(
      "unpermute_tokens(Tensor rows, Tensor slot_of_row, Tensor row_of_slot, SymInt top_k, "
      "Tensor? topk_weights=None) -> Tensor");
  m.def(
      "_unpermute_tokens_backward(Tensor grad, Tensor rows, Tensor slot_of_row, Tensor row_of_slot, "
      "Tensor topk_weights) -> (Tensor grad_rows, Tensor grad_weights)");
  m.def("_gather_tokens(Tensor x, Tensor slot_of_row, SymInt top_k) -> Tensor");
}

constexpr int64_t kMostAlign = 65536; // bounds the memory: every expert may get almost so many rows of zeros

IndexOptions check_permute_tokens(
    const Tensor& x, const Tensor& topk_idx, int64_t num_experts, const std::optional<Tensor>& topk_weights,
    std::optional<int64_t> capacity, const std::string& drop_policy, int64_t align) {
  const char* op = "permute_tokens";
  check_same_device(op, "topk_idx", topk_idx, "x", x);
  check_index(op, "topk_idx", topk_idx);
  check_dim(op, "x", x, 2, "[T, D]");
  check_dim(op, "topk_idx", topk_idx, 2, "[T, K]");
  check_size(op, "topk_idx", topk_idx, 0, x.size(0), "the tokens of x");
  MOE_CHECK(
      topk_idx.size(1) >= 1, op, ": expected topk_idx to have at least 1 column, got shape ", shape_string(topk_idx));
  MOE_CHECK(num_experts >= 1, op, ": expected num_experts to be at least 1, got ", num_experts);
  MOE_CHECK(num_experts <= INT32_MAX, op, ": expected num_experts to be below 2^31, got ", num_experts);
  MOE_CHECK(!capacity || *capacity >= 1, op, ": expected capacity to be at least 1, got ", capacity.value_or(0));
  MOE_CHECK(align >= 1, op, ": expected align to be at least 1, got ", align);
  MOE_CHECK(align <= kMostAlign, op, ": expected align to be at most ", kMostAlign, ", got ", align);
  MOE_CHECK(
      drop_policy == "position" || drop_policy == "score", op, ": expected drop_policy to be position or score, got ",
      drop_policy);
  const bool by_score = capacity && drop_policy == "score";
  MOE_CHECK(!by_score || topk_weights, op, ": expected topk_weights to be given with drop_policy score, got None");
  if (topk_weights) {
    check_same_device(op, "topk_weights", *topk_weights, "x", x);
    check_floating(op, "topk_weights", *topk_weights);
    check_dim(op, "topk_weights", *topk_weights, 2, "[T, K]");
    check_size(op, "topk_weights", *topk_weights, 0, topk_idx.size(0), "the tokens of topk_idx");
    check_size(op, "topk_weights", *topk_weights, 1, topk_idx.size(1), "the columns of topk_idx");
  }
  return {num_experts, capacity.value_or(std::numeric_limits<int64_t>::max()), by_score, align};
}

int64_t num_rows(int64_t num_slots, const IndexOptions& options) {
  const bool bounded = options.capacity < num_slots / options.num_experts + 1;
  const int64_t kept = bounded ? std::min(num_slots, options.num_experts * options.capacity) : num_slots;
  return kept + options.num_experts * (options.align - 1);
}

void check_gather_tokens(const Tensor& x, const Tensor& slot_of_row, int64_t top_k) {
  const char* op = "_gather_tokens";
  check_same_device(op, "slot_of_row", slot_of_row, "x", x);
  check_dtype(op, "slot_of_row", slot_of_row, ScalarType::Long);
  check_dim(op, "x", x, 2, "[T, D]");
  check_dim(op, "slot_of_row", slot_of_row, 1, "[N]");
  MOE_CHECK(top_k >= 1, op, ": expected top_k to be at least 1, got ", top_k);
}

void check_unpermute_tokens(
    const char* op, const Tensor& rows, const Tensor& slot_of_row, const Tensor& row_of_slot, int64_t top_k,
    const std::optional<Tensor>& topk_weights) {
  check_same_device(op, "slot_of_row", slot_of_row, "rows", rows);
  check_same_device(op, "row_of_slot", row_of_slot, "rows", rows);
  check_floating(op, "rows", rows);
  check_dtype(op, "slot_of_row", slot_of_row, ScalarType::Long);
  check_dtype(op, "row_of_slot", row_of_slot, ScalarType::Long);
  check_dim(op, "rows", rows, 2, "[N, D]");
  check_dim(op, "slot_of_row", slot_of_row, 1, "[N]");
  check_dim(op, "row_of_slot", row_of_slot, 1, "[T K]");
  check_size(op, "rows", rows, 0, slot_of_row.size(0), "the rows of the permutation");
  MOE_CHECK(
      top_k >= 1 && row_of_slot.size(0) % top_k == 0, op, ": expected top_k to be a divisor of the ",
      row_of_slot.size(0), " slots, got ", top_k);
  if (topk_weights) {
    check_same_device(op, "topk_weights", *topk_weights, "rows", rows);
    check_dtype(op, "topk_weights", *topk_weights, acc_dtype(rows.scalar_type()));
    check_dim(op, "topk_weights", *topk_weights, 2, "[T, K]");
    check_size(op, "topk_weights", *topk_weights, 0, row_of_slot.size(0) / top_k, "the tokens of the permutation");
    check_size(op, "topk_weights", *topk_weights, 1, top_k, "top_k");
  }
}

void check_unpermute_tokens_backward(
    const Tensor& grad, const Tensor& rows, const Tensor& slot_of_row, const Tensor& row_of_slot,
    const Tensor& topk_weights) {
  const char* op = "_unpermute_tokens_backward";
  check_dim(op, "topk_weights", topk_weights, 2, "[T, K]");
  check_unpermute_tokens(op, rows, slot_of_row, row_of_slot, topk_weights.size(1), topk_weights);
  check_same_device(op, "grad", grad, "rows", rows);
  check_dtype(op, "grad", grad, rows.scalar_type());
  check_dim(op, "grad", grad, 2, "[T, D]");
  check_size(op, "grad", grad, 0, topk_weights.size(0), "the tokens of the permutation");
  check_size(op, "grad", grad, 1, rows.size(1), "the columns of rows");
}

} // namespace moe_ext::permutation
