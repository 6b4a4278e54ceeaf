// CUDA side of the capacity limit: allocates and launches, and never waits for the device.
#include <tuple>

#include "capacity/capacity.h"
#include "capacity/capacity_kernels.cuh"
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "permutation/permutation.h"

namespace moe_ext::capacity {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

std::tuple<Tensor, Tensor> limit_capacity_cuda(
    Tensor topk_idx, // [T, K]
    int64_t num_experts, int64_t capacity,
    std::optional<Tensor> order, // [T K]
    int64_t num_groups,
    std::optional<Tensor> ranked_idx) { // [T, R]
  const char* op = "limit_capacity";
  const CapacityOptions options = check_limit_capacity(topk_idx, num_experts, capacity, order, num_groups, ranked_idx);
  num_groups = options.num_groups;
  const int pairs = check_int32(op, "num_experts * num_groups", num_experts * num_groups);
  const int num_slots = check_int32(op, "the number of slots", topk_idx.numel());
  const DeviceScope device(topk_idx);
  const int64_t most = device_properties().shared_bytes_per_block / static_cast<int64_t>(sizeof(int));
  MOE_CHECK(
      !ranked_idx || num_experts <= most, op, ": expected num_experts to be at most ", most,
      " to reroute on CUDA, got ", num_experts);
  const Tensor idx = contiguous(topk_idx);
  const std::optional<Tensor> slots_in_order = optional_contiguous(order);
  const std::optional<Tensor> ranked = optional_contiguous(ranked_idx);
  const permutation::SortPlan plan = permutation::plan_sort(num_slots, pairs, device_properties());
  const int64_t rows = permutation::num_rows(num_slots, {pairs, capacity, false, 1});
  const auto long_tensor = [&](int64_t size) { return new_empty(idx, {size}, ScalarType::Long); };
  const Tensor out = new_empty(idx, {idx.size(0), idx.size(1)}), num_dropped = new_empty(idx, {});
  const Tensor slot_of_row = long_tensor(rows), row_of_slot = long_tensor(num_slots);
  const Tensor offsets = long_tensor(pairs + 1), counts = long_tensor(pairs);
  const Tensor ints = new_empty(idx, {num_slots + num_groups}, ScalarType::Int);
  const Tensor sort = new_empty(idx, {permutation::tables_workspace_bytes(plan, false)}, ScalarType::Byte);
  const Workspace workspace{
      {data<int64_t>(slot_of_row),
       rows,
       data<int64_t>(row_of_slot),
       {data<int64_t>(offsets), data<int64_t>(counts), data<int64_t>(num_dropped), nullptr}},
      data<int>(ints),
      data<int>(ints) + num_slots,
      sort.data_ptr()};
  const Slots slots{
      data<int64_t>(idx),
      data_or_null<int64_t>(slots_in_order),
      data_or_null<int64_t>(ranked),
      data<int64_t>(out),
      num_slots,
      static_cast<int>(idx.size(1)),
      ranked ? static_cast<int>(ranked->size(1)) : 0,
      static_cast<int>(num_experts),
      static_cast<int>(num_groups),
      static_cast<int>(options.slots_per_group),
      options.capacity};
  launch_limit_capacity<kCheckIndices>(slots, plan, workspace, device.stream());
  return {out, num_dropped};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("limit_capacity", TORCH_BOX(&limit_capacity_cuda));
}

} // namespace moe_ext::capacity
