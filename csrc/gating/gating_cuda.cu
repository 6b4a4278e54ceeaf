// Gate and router losses on CUDA: allocation and launches on the current stream, without host synchronisation.
#include <tuple>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "gating/gating.h"
#include "gating/gating_kernels.cuh"
#include "gating/losses_kernels.cuh"
#include "gating/weights_kernels.cuh"

namespace moe_ext::gating {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

template <typename Acc>
GatePlan checked_plan(const char* op, int64_t num_tokens, const GateOptions& options) {
  check_int32(op, "the number of experts", options.num_experts);
  const GatePlan plan = plan_gate<Acc>(num_tokens, options, device_properties());
  MOE_CHECK(
      plan.num_warps > 0, op, ": expected the experts of a token to fit into ",
      device_properties().shared_bytes_per_block_opt_in, " bytes of shared memory, got ", options.num_experts,
      " experts, which take ", plan.bytes_per_warp);
  return plan;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> topk_gate_cuda(
    Tensor logits, // [T, E]
    int64_t top_k, std::string score_fn, bool renormalize, double scale,
    std::optional<Tensor> selection_bias, // [E]
    int64_t num_groups, int64_t top_groups,
    std::optional<Tensor> token_mask, // [T]
    std::optional<std::string> group_score) {
  const char* op = "topk_gate";
  const GateOptions options = check_topk_gate(
      logits, top_k, score_fn, renormalize, scale, selection_bias, num_groups, top_groups, token_mask, group_score);
  const DeviceScope device(logits);
  const ScalarType acc = acc_dtype(logits.scalar_type());
  const int64_t num_tokens = logits.size(0), num_experts = options.num_experts;
  const Tensor x = contiguous(logits);
  std::optional<Tensor> bias =
      selection_bias ? std::optional(contiguous(torch::stable::to(*selection_bias, acc))) : std::nullopt;
  if (!bias && options.sums_groups()) {
    bias = torch::stable::new_zeros(x, {num_experts}, acc);
  }
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const Tensor weights = new_empty(x, {num_tokens, top_k}, acc);
  const Tensor idx = new_empty(x, {num_tokens, top_k}, ScalarType::Long);
  const Tensor counts = new_empty(x, {num_experts}, ScalarType::Long);
  const Tensor score_sum = new_empty(x, {num_experts}, acc);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const GatePlan plan = checked_plan<acc_t<T>>(op, num_tokens, options);
    const Tensor workspace = new_empty(x, {gate_workspace_bytes<acc_t<T>>(plan, num_experts)}, ScalarType::Byte);
    const GateArgs<T> args{
        data<T>(x), data_or_null<acc_t<T>>(bias), data_or_null<bool>(mask), data<acc_t<T>>(weights), data<int64_t>(idx),
        options};
    launch_topk_gate<kCheckIndices>(
        args, num_tokens, plan, workspace.data_ptr(), data<acc_t<T>>(score_sum), data<int64_t>(counts),
        device.stream());
  });
  return {weights, idx, counts, score_sum};
}

std::tuple<Tensor, Tensor, Tensor> gate_weights_cuda(
    Tensor logits,   // [T, E]
    Tensor topk_idx, // [T, K]
    std::string score_fn, bool renormalize, double scale) {
  const GateOptions options = check_gate_weights(logits, topk_idx, score_fn, renormalize, scale);
  const DeviceScope device(logits);
  const ScalarType acc = acc_dtype(logits.scalar_type());
  const int64_t num_tokens = logits.size(0), num_experts = options.num_experts;
  const Tensor x = contiguous(logits), idx = contiguous(topk_idx);
  const Tensor weights = new_empty(x, {num_tokens, options.top_k}, acc);
  const Tensor counts = new_empty(x, {num_experts}, ScalarType::Long);
  const Tensor score_sum = new_empty(x, {num_experts}, acc);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const GatePlan plan = checked_plan<acc_t<T>>("gate_weights", num_tokens, options);
    const Tensor workspace = new_empty(x, {gate_workspace_bytes<acc_t<T>>(plan, num_experts)}, ScalarType::Byte);
    const GateWeightsArgs<T> args{data<T>(x), data<int64_t>(idx), data<acc_t<T>>(weights), options};
    launch_gate_weights<kCheckIndices>(
        args, num_tokens, plan, workspace.data_ptr(), data<acc_t<T>>(score_sum), data<int64_t>(counts),
        device.stream());
  });
  return {weights, counts, score_sum};
}

Tensor topk_gate_backward_cuda(
    std::optional<Tensor> grad_weights,   // [T, K]
    std::optional<Tensor> grad_score_sum, // [E]
    Tensor logits,                        // [T, E]
    Tensor topk_idx,                      // [T, K]
    std::string score_fn, bool renormalize, double scale) {
  const GateOptions options =
      check_topk_gate_backward(grad_weights, grad_score_sum, logits, topk_idx, score_fn, renormalize, scale);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits), idx = contiguous(topk_idx);
  const std::optional<Tensor> dw = optional_contiguous(grad_weights), ds = optional_contiguous(grad_score_sum);
  const Tensor grad = new_empty(x, {x.size(0), x.size(1)});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const GatePlan plan = checked_plan<acc_t<T>>("_topk_gate_backward", x.size(0), options);
    const GateGradArgs<T> args{
        data<T>(grad), data<T>(x), data<int64_t>(idx), data_or_null<acc_t<T>>(dw), data_or_null<acc_t<T>>(ds), options};
    launch_topk_gate_backward<kCheckIndices>(args, x.size(0), plan, device.stream());
  });
  return grad;
}

Tensor router_z_loss_cuda(
    Tensor logits,                      // [T, E]
    std::optional<Tensor> token_mask) { // [T]
  check_router_z_loss("router_z_loss", logits, token_mask);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const Tensor partials = new_empty(x, {2 * int64_t{z_loss_blocks(x.size(0))}}, ScalarType::Double);
  const Tensor loss = new_empty(x, {}, acc_dtype(x.scalar_type()));
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const ZLossArgs<T> args{data<T>(x), data_or_null<bool>(mask), x.size(1)};
    launch_router_z_loss(args, x.size(0), data<double>(partials), data<acc_t<T>>(loss), device.stream());
  });
  return loss;
}

Tensor router_z_loss_backward_cuda(
    Tensor grad,                        // []
    Tensor logits,                      // [T, E]
    std::optional<Tensor> token_mask) { // [T]
  check_router_z_loss("_router_z_loss_backward", logits, token_mask);
  check_scalar_grad("_router_z_loss_backward", grad, "logits", logits);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const Tensor factor = new_empty(x, {}, ScalarType::Double);
  const Tensor out = new_empty(x, {x.size(0), x.size(1)});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const ZLossArgs<T> args{data<T>(x), data_or_null<bool>(mask), x.size(1)};
    launch_router_z_loss_backward(
        data<acc_t<T>>(grad), args, x.size(0), data<double>(factor), data<T>(out), device.stream());
  });
  return out;
}

// Calls f.operator()<Acc, Index>() with the dtypes of the score sums and of the counts.
template <typename F>
void dispatch_balance(const Tensor& score_sum, const Tensor& counts, F&& f) {
  const bool wide = score_sum.scalar_type() == ScalarType::Double;
  if (counts.scalar_type() == ScalarType::Int) {
    wide ? f.template operator()<double, int32_t>() : f.template operator()<float, int32_t>();
  } else {
    wide ? f.template operator()<double, int64_t>() : f.template operator()<float, int64_t>();
  }
}

Tensor load_balance_loss_cuda(
    Tensor score_sum,             // [E]
    Tensor num_tokens_per_expert, // [E]
    int64_t top_k) {
  const char* op = "load_balance_loss";
  check_load_balance_loss(op, score_sum, num_tokens_per_expert, top_k);
  const int num_experts = check_int32(op, "the number of experts", score_sum.size(0));
  const DeviceScope device(score_sum);
  const Tensor sums = contiguous(score_sum), counts = contiguous(num_tokens_per_expert);
  const Tensor loss = new_empty(sums, {});
  dispatch_balance(sums, counts, [&]<typename Acc, typename Index>() {
    launch_load_balance_loss(
        data<Acc>(sums), data<Index>(counts), num_experts, top_k, data<Acc>(loss), device.stream());
  });
  return loss;
}

Tensor load_balance_loss_backward_cuda(
    Tensor grad,                  // []
    Tensor score_sum,             // [E]
    Tensor num_tokens_per_expert, // [E]
    int64_t top_k) {
  const char* op = "_load_balance_loss_backward";
  check_load_balance_loss(op, score_sum, num_tokens_per_expert, top_k);
  check_scalar_grad(op, grad, "score_sum", score_sum);
  const int num_experts = check_int32(op, "the number of experts", score_sum.size(0));
  const DeviceScope device(score_sum);
  const Tensor counts = contiguous(num_tokens_per_expert);
  const Tensor out = new_empty(score_sum, {score_sum.size(0)});
  dispatch_balance(score_sum, counts, [&]<typename Acc, typename Index>() {
    launch_load_balance_loss_backward(
        data<Acc>(grad), data<Index>(counts), num_experts, top_k, data<Acc>(out), device.stream());
  });
  return out;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("topk_gate", TORCH_BOX(&topk_gate_cuda));
  m.impl("gate_weights", TORCH_BOX(&gate_weights_cuda));
  m.impl("_topk_gate_backward", TORCH_BOX(&topk_gate_backward_cuda));
  m.impl("router_z_loss", TORCH_BOX(&router_z_loss_cuda));
  m.impl("_router_z_loss_backward", TORCH_BOX(&router_z_loss_backward_cuda));
  m.impl("load_balance_loss", TORCH_BOX(&load_balance_loss_cuda));
  m.impl("_load_balance_loss_backward", TORCH_BOX(&load_balance_loss_backward_cuda));
}

} // namespace moe_ext::gating
