#include "capacity/capacity.h"

#include <algorithm>

#include "common/dispatch.h"
#include "common/library.h"

namespace moe_ext::capacity {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "limit_capacity(Tensor topk_idx, SymInt num_experts, SymInt capacity, Tensor? order=None, "
      "SymInt num_groups=1, Tensor? ranked_idx=None) -> (Tensor topk_idx, Tensor num_dropped)");
}

CapacityOptions check_limit_capacity(
    const Tensor& topk_idx, int64_t num_experts, int64_t capacity, const std::optional<Tensor>& order,
    int64_t num_groups, const std::optional<Tensor>& ranked_idx) {
  const char* op = "limit_capacity";
  check_dtype(op, "topk_idx", topk_idx, ScalarType::Long);
  check_dim(op, "topk_idx", topk_idx, 2, "[T, K]");
  MOE_CHECK(
      topk_idx.size(1) >= 1, op, ": expected topk_idx to have at least 1 column, got shape ", shape_string(topk_idx));
  MOE_CHECK(num_experts >= 1, op, ": expected num_experts to be at least 1, got ", num_experts);
  MOE_CHECK(num_experts <= INT32_MAX, op, ": expected num_experts to be below 2^31, got ", num_experts);
  MOE_CHECK(capacity >= 1, op, ": expected capacity to be at least 1, got ", capacity);
  MOE_CHECK(num_groups >= 1, op, ": expected num_groups to be at least 1, got ", num_groups);
  if (order) {
    check_same_device(op, "order", *order, "topk_idx", topk_idx);
    check_dtype(op, "order", *order, ScalarType::Long);
    check_dim(op, "order", *order, 1, "[T K]");
    check_size(op, "order", *order, 0, topk_idx.size(0) * topk_idx.size(1), "the slots of topk_idx");
  }
  if (ranked_idx) {
    check_same_device(op, "ranked_idx", *ranked_idx, "topk_idx", topk_idx);
    check_dtype(op, "ranked_idx", *ranked_idx, ScalarType::Long);
    check_dim(op, "ranked_idx", *ranked_idx, 2, "[T, R]");
    check_size(op, "ranked_idx", *ranked_idx, 0, topk_idx.size(0), "the tokens of topk_idx");
  }
  // More groups than tokens would be empty.
  const int64_t num_tokens = topk_idx.size(0), groups = std::min(num_groups, std::max(num_tokens, int64_t{1}));
  return {num_experts, capacity, groups, topk_idx.size(1) * ((num_tokens + groups - 1) / groups)};
}

} // namespace moe_ext::capacity
