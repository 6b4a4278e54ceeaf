// Permutation on CUDA: allocation and launches on the current stream. The host never waits for the device.
#include <tuple>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "permutation/permutation.h"
#include "permutation/permutation_kernels.cuh"
#include "permutation/rows_kernels.cuh"

namespace moe_ext::permutation {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

template <typename IndexT, typename Weight>
void build_tables(
    const Tensor& idx, const std::optional<Tensor>& weights, const IndexOptions& options, const Tables& tables,
    cudaStream_t stream) {
  const SortPlan plan =
      plan_sort(static_cast<int>(idx.numel()), static_cast<int>(options.num_experts), device_properties());
  const Tensor workspace = new_empty(idx, {tables_workspace_bytes(plan, weights.has_value())}, ScalarType::Byte);
  launch_build_tables<kCheckIndices>(
      data<IndexT>(idx), weights ? data<Weight>(*weights) : nullptr, plan, options.capacity, options.align,
      data<void>(workspace), tables, stream);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> permute_tokens_cuda(
    Tensor x,        // [T, D]
    Tensor topk_idx, // [T, K]
    int64_t num_experts,
    std::optional<Tensor> topk_weights, // [T, K]
    std::optional<int64_t> capacity, std::string drop_policy, int64_t align) {
  const char* op = "permute_tokens";
  const IndexOptions options =
      check_permute_tokens(x, topk_idx, num_experts, topk_weights, capacity, drop_policy, align);
  check_int32(op, "num_experts", num_experts);
  check_int32(op, "align", align);
  check_int32(op, "the number of slots", topk_idx.numel());
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  const Tensor idx = contiguous(topk_idx);
  const auto long_tensor = [&](std::initializer_list<int64_t> size) { return new_empty(idx, size, ScalarType::Long); };
  const int64_t rows = num_rows(idx.numel(), options);
  const Tensor slot_of_row = long_tensor({rows}), row_of_slot = long_tensor({idx.numel()});
  const Tensor offsets = long_tensor({num_experts + 1}), counts = long_tensor({num_experts}), dropped = long_tensor({});
  const Tables tables = {
      data<int64_t>(slot_of_row),
      rows,
      data<int64_t>(row_of_slot),
      {data<int64_t>(offsets), data<int64_t>(counts), data<int64_t>(dropped), nullptr}};
  const bool in_double = topk_weights && topk_weights->scalar_type() == ScalarType::Double;
  const std::optional<Tensor> weights =
      options.drop_by_score
          ? std::optional(torch::stable::to(contiguous(*topk_weights), acc_dtype(topk_weights->scalar_type())))
          : std::nullopt;
  const auto build = idx.scalar_type() == ScalarType::Int
                         ? (in_double ? build_tables<int32_t, double> : build_tables<int32_t, float>)
                         : (in_double ? build_tables<int64_t, double> : build_tables<int64_t, float>);
  build(idx, weights, options, tables, device.stream());
  const Tensor out = new_empty(in, {rows, in.size(1)});
  launch_scatter_tokens<kCheckIndices>(
      in.data_ptr(), tables.row_of_slot, tables.slot_of_row, in.size(0), rows, static_cast<int>(idx.size(1)),
      in.size(1), in.element_size(), out.data_ptr(), device.stream());
  return {out, slot_of_row, row_of_slot, offsets, counts, dropped};
}

Tensor gather_tokens_cuda(Tensor x, Tensor slot_of_row, int64_t top_k) {
  check_gather_tokens(x, slot_of_row, top_k);
  const char* op = "_gather_tokens";
  check_int32(op, "the number of slots", x.size(0) * top_k);
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  const Tensor slots = contiguous(slot_of_row);
  const Tensor out = new_empty(in, {slots.size(0), in.size(1)});
  launch_gather_tokens<kCheckIndices>(
      in.data_ptr(), data<int64_t>(slots), in.size(0), slots.size(0), static_cast<int>(top_k), in.size(1),
      in.element_size(), out.data_ptr(), device.stream());
  return out;
}

Tensor unpermute_tokens_cuda(
    Tensor rows,        // [N, D]
    Tensor slot_of_row, // [N]
    Tensor row_of_slot, // [T K]
    int64_t top_k,
    std::optional<Tensor> topk_weights) { // [T, K]
  const char* op = "unpermute_tokens";
  check_unpermute_tokens(op, rows, slot_of_row, row_of_slot, top_k, topk_weights);
  check_int32(op, "the number of slots", row_of_slot.numel());
  const DeviceScope device(rows);
  const Tensor in = contiguous(rows);
  const Tensor index = contiguous(row_of_slot);
  const std::optional<Tensor> weights = topk_weights ? std::optional(contiguous(*topk_weights)) : std::nullopt;
  const Tensor out = new_empty(in, {index.numel() / top_k, in.size(1)});
  dispatch_floating_cuda(in.scalar_type(), [&]<typename T>() {
    launch_unpermute_tokens<kCheckIndices, T>(
        data<T>(in), data<int64_t>(index), weights ? data<acc_t<T>>(*weights) : nullptr, out.size(0), in.size(0),
        static_cast<int>(top_k), in.size(1), data<T>(out), device.stream());
  });
  return out;
}

std::tuple<Tensor, Tensor> unpermute_tokens_backward_cuda(
    Tensor grad,           // [T, D]
    Tensor rows,           // [N, D]
    Tensor slot_of_row,    // [N]
    Tensor row_of_slot,    // [T K]
    Tensor topk_weights) { // [T, K]
  check_unpermute_tokens_backward(grad, rows, slot_of_row, row_of_slot, topk_weights);
  check_int32("_unpermute_tokens_backward", "the number of slots", row_of_slot.numel());
  const DeviceScope device(rows);
  const Tensor g = contiguous(grad), in = contiguous(rows), weights = contiguous(topk_weights);
  const Tensor slots = contiguous(slot_of_row), index = contiguous(row_of_slot);
  const Tensor grad_rows = new_empty(in, {in.size(0), in.size(1)});
  const Tensor grad_weights = new_empty(weights, {weights.size(0), weights.size(1)});
  dispatch_floating_cuda(in.scalar_type(), [&]<typename T>() {
    launch_unpermute_tokens_backward<kCheckIndices, T>(
        data<T>(g), data<T>(in), data<int64_t>(slots), data<int64_t>(index), data<acc_t<T>>(weights), index.numel(),
        in.size(0), static_cast<int>(weights.size(1)), in.size(1), data<T>(grad_rows), data<acc_t<T>>(grad_weights),
        device.stream());
  });
  return {grad_rows, grad_weights};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("permute_tokens", TORCH_BOX(&permute_tokens_cuda));
  m.impl("unpermute_tokens", TORCH_BOX(&unpermute_tokens_cuda));
  m.impl("_unpermute_tokens_backward", TORCH_BOX(&unpermute_tokens_backward_cuda));
  m.impl("_gather_tokens", TORCH_BOX(&gather_tokens_cuda));
}

} // namespace moe_ext::permutation
