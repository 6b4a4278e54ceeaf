// Random numbers and noisy gates on CUDA: allocation and launches on the current stream, without host synchronisation.
#include <tuple>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "noisy_gating/noisy_gating.h"
#include "noisy_gating/noisy_gating_kernels.cuh"
#include "noisy_gating/random_kernels.cuh"

namespace moe_ext::noisy_gating {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using OptionalTensor = std::optional<Tensor>;

RngSource rng_source(const OptionalTensor& rng_state, const OptionalTensor& token_idx) {
  return {data_or_null<int64_t>(rng_state), data_or_null<int64_t>(token_idx)};
}

template <typename Acc>
GatePlan checked_plan(const char* op, int64_t num_tokens, int64_t num_experts, int64_t num_ranked) {
  check_int32(op, "the number of experts", num_experts);
  const GatePlan plan = plan_noisy<Acc>(num_tokens, num_experts, num_ranked, device_properties());
  MOE_CHECK(
      plan.num_warps > 0, op, ": expected the experts of a token to fit into ",
      device_properties().shared_bytes_per_block_opt_in, " bytes of shared memory, got ", num_experts,
      " experts, which take ", plan.bytes_per_warp);
  return plan;
}

Tensor routing_uniform_cuda(
    Tensor rng_state, // [4]
    int64_t num_tokens, int64_t num_columns, int64_t stream,
    OptionalTensor token_idx) { // [T]
  check_routing_uniform(rng_state, num_tokens, num_columns, stream, token_idx);
  const DeviceScope device(rng_state);
  const Tensor state = contiguous(rng_state);
  const OptionalTensor idx = optional_contiguous(token_idx);
  const Tensor out = new_empty(state, {num_tokens, num_columns}, ScalarType::Float);
  launch_routing_uniform(
      data<float>(out), num_tokens, num_columns, static_cast<Stream>(stream), rng_source(state, idx), device.stream());
  return out;
}

Tensor routing_jitter_cuda(
    Tensor x,         // [T, D]
    Tensor rng_state, // [4]
    double eps,
    OptionalTensor token_idx) { // [T]
  check_routing_jitter(x, rng_state, eps, token_idx);
  const DeviceScope device(x);
  const Tensor in = contiguous(x), state = contiguous(rng_state);
  const OptionalTensor idx = optional_contiguous(token_idx);
  const Tensor out = new_empty(in, {x.size(0), x.size(1)});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const JitterArgs<T> args{data<T>(out), data<const T>(in), x.size(1), eps, rng_source(state, idx)};
    launch_routing_jitter(args, x.size(0), device.stream());
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gshard_gate_cuda(
    Tensor logits,            // [T, E]
    OptionalTensor rng_state, // [4]
    double scale,
    OptionalTensor token_mask,  // [T]
    OptionalTensor token_idx) { // [T]
  check_gshard_gate(logits, rng_state, scale, token_mask, token_idx);
  const DeviceScope device(logits);
  const ScalarType acc = acc_dtype(logits.scalar_type());
  const int64_t num_tokens = logits.size(0), n = logits.size(1);
  const Tensor x = contiguous(logits);
  const OptionalTensor mask = optional_contiguous(token_mask);
  const OptionalTensor state = optional_contiguous(rng_state), token = optional_contiguous(token_idx);
  const Tensor weights = new_empty(x, {num_tokens, 2}, acc), idx = new_empty(x, {num_tokens, 2}, ScalarType::Long);
  const Tensor counts = new_empty(x, {n}, ScalarType::Long), firsts = new_empty(x, {n}, ScalarType::Long);
  const Tensor score_sum = new_empty(x, {n}, acc);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const GatePlan plan = checked_plan<Acc>("gshard_gate", num_tokens, n, 2);
    const Tensor workspace = new_empty(x, {noisy_workspace_bytes<Acc>(plan, n)}, ScalarType::Byte);
    const GShardArgs<T> args{data<T>(x), data_or_null<bool>(mask), data<Acc>(weights), data<int64_t>(idx), n,
                             scale,      rng_source(state, token)};
    const Totals<Acc> totals{{data<Acc>(score_sum), nullptr}, {data<int64_t>(counts), data<int64_t>(firsts)}, false};
    launch_gshard_gate<kCheckIndices>(args, num_tokens, plan, workspace.data_ptr(), totals, device.stream());
  });
  return {weights, idx, counts, score_sum, firsts};
}

Tensor gshard_gate_backward_cuda(
    OptionalTensor grad_weights,   // [T, 2]
    OptionalTensor grad_score_sum, // [E]
    Tensor logits,                 // [T, E]
    Tensor topk_idx,               // [T, 2]
    double scale) {
  check_gshard_gate_backward(grad_weights, grad_score_sum, logits, topk_idx, scale);
  const DeviceScope device(logits);
  const int64_t num_tokens = logits.size(0), n = logits.size(1);
  const Tensor x = contiguous(logits), idx = contiguous(topk_idx);
  const OptionalTensor dw = optional_contiguous(grad_weights), ds = optional_contiguous(grad_score_sum);
  const Tensor grad = new_empty(x, {num_tokens, n});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const GatePlan plan = checked_plan<acc_t<T>>("_gshard_gate_backward", num_tokens, n, 2);
    const GShardGradArgs<T> args{
        data<T>(grad), data<T>(x), data<int64_t>(idx), data_or_null<acc_t<T>>(dw), data_or_null<acc_t<T>>(ds), n,
        scale};
    launch_gshard_gate_backward(args, num_tokens, plan, device.stream());
  });
  return grad;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> noisy_topk_gate_cuda(
    Tensor clean_logits,         // [T, E]
    OptionalTensor noise_logits, // [T, E]
    OptionalTensor rng_state,    // [4]
    int64_t top_k, double noise_epsilon, double scale,
    OptionalTensor token_mask,  // [T]
    OptionalTensor token_idx) { // [T]
  const NoisyOptions options =
      check_noisy_topk_gate(clean_logits, noise_logits, rng_state, top_k, noise_epsilon, scale, token_mask, token_idx);
  const DeviceScope device(clean_logits);
  const ScalarType acc = acc_dtype(clean_logits.scalar_type());
  const int64_t num_tokens = clean_logits.size(0), n = options.num_experts;
  const Tensor x = contiguous(clean_logits);
  const OptionalTensor noise = optional_contiguous(noise_logits), mask = optional_contiguous(token_mask);
  const OptionalTensor state = optional_contiguous(rng_state), token = optional_contiguous(token_idx);
  const Tensor weights = new_empty(x, {num_tokens, top_k}, acc);
  const Tensor idx = new_empty(x, {num_tokens, top_k}, ScalarType::Long), counts = new_empty(x, {n}, ScalarType::Long);
  const Tensor importance = new_empty(x, {n}, acc), load = new_empty(x, {n}, acc);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const GatePlan plan = checked_plan<Acc>("noisy_topk_gate", num_tokens, n, options.num_ranked());
    const Tensor workspace = new_empty(x, {noisy_workspace_bytes<Acc>(plan, n)}, ScalarType::Byte);
    const NoisyArgs<T> args{
        data<T>(x), data_or_null<T>(noise),  data_or_null<bool>(mask), data<Acc>(weights), data<int64_t>(idx),
        options,    rng_source(state, token)};
    const Totals<Acc> totals{
        {data<Acc>(importance), data<Acc>(load)}, {data<int64_t>(counts), nullptr}, !noise.has_value()};
    launch_noisy_topk_gate<kCheckIndices>(args, num_tokens, plan, workspace.data_ptr(), totals, device.stream());
  });
  return {weights, idx, counts, importance, load};
}

std::tuple<Tensor, Tensor> noisy_topk_gate_backward_cuda(
    OptionalTensor grad_weights,    // [T, K]
    OptionalTensor grad_importance, // [E]
    OptionalTensor grad_load,       // [E]
    Tensor clean_logits,            // [T, E]
    OptionalTensor noise_logits,    // [T, E]
    OptionalTensor rng_state,       // [4]
    Tensor topk_idx,                // [T, K]
    double noise_epsilon, double scale,
    OptionalTensor token_idx) { // [T]
  const char* op = "_noisy_topk_gate_backward";
  const NoisyOptions options = check_noisy_topk_gate_backward(
      grad_weights, grad_importance, grad_load, clean_logits, noise_logits, rng_state, topk_idx, noise_epsilon, scale,
      token_idx);
  const DeviceScope device(clean_logits);
  const int64_t num_tokens = clean_logits.size(0), n = options.num_experts;
  const Tensor x = contiguous(clean_logits), idx = contiguous(topk_idx);
  const OptionalTensor noise = optional_contiguous(noise_logits), dw = optional_contiguous(grad_weights);
  const OptionalTensor di = optional_contiguous(grad_importance), dl = optional_contiguous(grad_load);
  const OptionalTensor state = optional_contiguous(rng_state), token = optional_contiguous(token_idx);
  const Tensor grad_clean = new_empty(x, {num_tokens, n}), grad_noise = new_empty(x, {noise ? num_tokens : 0, n});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const GatePlan plan = checked_plan<Acc>(op, num_tokens, n, options.num_ranked());
    const NoisyGradArgs<T> args{
        data<T>(grad_clean),
        noise ? data<T>(grad_noise) : nullptr,
        data<T>(x),
        data_or_null<T>(noise),
        data<int64_t>(idx),
        data_or_null<Acc>(dw),
        data_or_null<Acc>(di),
        data_or_null<Acc>(dl),
        options,
        rng_source(state, token)};
    launch_noisy_topk_gate_backward(args, num_tokens, plan, device.stream());
  });
  return {grad_clean, grad_noise};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("routing_uniform", TORCH_BOX(&routing_uniform_cuda));
  m.impl("routing_jitter", TORCH_BOX(&routing_jitter_cuda));
  m.impl("gshard_gate", TORCH_BOX(&gshard_gate_cuda));
  m.impl("_gshard_gate_backward", TORCH_BOX(&gshard_gate_backward_cuda));
  m.impl("noisy_topk_gate", TORCH_BOX(&noisy_topk_gate_cuda));
  m.impl("_noisy_topk_gate_backward", TORCH_BOX(&noisy_topk_gate_backward_cuda));
}

} // namespace moe_ext::noisy_gating
