// CUDA side of the assignments: allocates and launches, and never waits for the device.
#include <algorithm>
#include <tuple>

#include "assignment/assignment.h"
#include "assignment/assignment_kernels.cuh"
#include "assignment/auction_kernels.cuh"
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"

namespace moe_ext::assignment {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

template <typename Acc>
RowPlan checked_plan(const char* op, int64_t num_tokens, int64_t num_experts) {
  check_int32(op, "the number of experts", num_experts);
  const RowPlan plan = plan_rows<Acc>(num_tokens, num_experts, 2, device_properties());
  MOE_CHECK(
      plan.num_warps > 0, op, ": expected two rows of experts to fit into ",
      device_properties().shared_bytes_per_block_opt_in, " bytes of shared memory, got ", num_experts, " experts");
  return plan;
}

int64_t check_sequences(const char* op, int64_t num_sequences) {
  MOE_CHECK(num_sequences <= 65535, op, ": expected num_sequences to be at most 65535 on CUDA, got ", num_sequences);
  return num_sequences;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> expert_choice_gate_cuda(
    Tensor logits, // [T, E]
    int64_t capacity,
    std::optional<Tensor> token_mask) { // [T]
  check_expert_choice_gate(logits, capacity, token_mask);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t num_tokens = x.size(0), n = x.size(1);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor weights = new_empty(x, {num_tokens, n}, acc), score_sum = new_empty(x, {n}, acc);
  const Tensor idx = new_empty(x, {num_tokens, n}, ScalarType::Long);
  const Tensor counts = new_empty(x, {n}, ScalarType::Long);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const RowPlan plan = checked_plan<Acc>("expert_choice_gate", num_tokens, n);
    const Tensor partials = new_empty(x, {plan.num_blocks * n}, acc);
    const Tensor memory = new_empty(x, {ChoiceScratch<Acc>::bytes(num_tokens, n)}, ScalarType::Byte);
    MOE_CHECK(n <= 65535, "expert_choice_gate: expected logits to have at most 65535 experts on CUDA, got ", n);
    const ScoreArgs<T> args{data<T>(x), data_or_null<bool>(mask), n, gating::ScoreFn::kSoftmax};
    launch_scores<kCheckIndices>(
        args, 1, num_tokens, plan, data<Acc>(weights), data<Acc>(partials), data<Acc>(score_sum), device.stream());
    launch_expert_choice(
        args.token_mask, num_tokens, static_cast<int>(n), capacity,
        ChoiceScratch<Acc>(memory.data_ptr(), num_tokens, n), data<Acc>(weights), data<int64_t>(idx),
        data<int64_t>(counts), device.stream());
  });
  return {weights, idx, counts, score_sum};
}

Tensor expert_choice_gate_backward_cuda(
    std::optional<Tensor> grad_weights,   // [T, E]
    std::optional<Tensor> grad_score_sum, // [E]
    Tensor logits,                        // [T, E]
    Tensor topk_idx,                      // [T, E]
    std::optional<Tensor> token_mask) {   // [T]
  check_expert_choice_gate_backward(grad_weights, grad_score_sum, logits, topk_idx, token_mask);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits), index = contiguous(topk_idx);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const std::optional<Tensor> dw = optional_contiguous(grad_weights), ds = optional_contiguous(grad_score_sum);
  const Tensor grad = new_empty(x, {x.size(0), x.size(1)});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const RowPlan plan = checked_plan<Acc>("_expert_choice_gate_backward", x.size(0), x.size(1));
    const ScoreGradArgs<T> args{
        {data<T>(x), data_or_null<bool>(mask), x.size(1), gating::ScoreFn::kSoftmax},
        data_or_null<Acc>(ds),
        data_or_null<Acc>(dw),
        data<int64_t>(index),
        data<T>(grad)};
    launch_scores_backward<kCheckIndices>(args, 1, x.size(0), plan, device.stream());
  });
  return grad;
}

Tensor sinkhorn_scale_cuda(
    Tensor logits, // [T, E]
    int64_t num_iters, double tolerance,
    std::optional<Tensor> token_mask) { // [T]
  check_sinkhorn_scale(logits, num_iters, tolerance, token_mask);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t n = x.size(1);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor out = new_empty(x, {n}, acc), scale = new_empty(x, {n}, acc);
  const Tensor done = new_empty(x, {}, ScalarType::Int);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const RowPlan plan = checked_plan<Acc>("sinkhorn_gate", x.size(0), n);
    const Tensor partials = new_empty(x, {plan.num_blocks * n}, acc);
    const ScoreArgs<T> args{data<T>(x), data_or_null<bool>(mask), n, gating::ScoreFn::kSoftmax};
    const SinkhornState<Acc> state{data<Acc>(scale), data<Acc>(partials), data<int>(done)};
    launch_sinkhorn_scale<kCheckIndices>(
        args, x.size(0), num_iters, tolerance, plan, state, data<Acc>(out), device.stream());
  });
  return out;
}

Tensor balanced_assignment_cuda(
    Tensor scores,                      // [T, E]
    std::optional<Tensor> token_mask) { // [T]
  const char* op = "balanced_assignment";
  check_balanced_assignment(scores, token_mask);
  check_int32(op, "the number of scores", scores.numel() + scores.size(1));
  const int num_tokens = static_cast<int>(scores.size(0)), n = static_cast<int>(scores.size(1));
  const DeviceScope device(scores);
  const int64_t most = ClassState::most_experts(device_properties());
  MOE_CHECK(n <= most, op, ": expected scores to have at most ", most, " experts on this device, got ", n);
  const Tensor x = contiguous(scores);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const Tensor out = new_empty(x, {num_tokens}, ScalarType::Long);
  const Tensor memory = new_empty(x, {AuctionScratch::bytes(num_tokens, n)}, ScalarType::Byte);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    launch_auction<kCheckIndices>(
        data<const T>(x), data_or_null<bool>(mask), num_tokens, n, memory.data_ptr(), data<int64_t>(out),
        device.stream());
  });
  return out;
}

std::tuple<Tensor, Tensor> sequence_load_cuda(
    Tensor logits,   // [T, E]
    Tensor topk_idx, // [T, K]
    int64_t num_sequences, std::string score_fn,
    std::optional<Tensor> token_mask) { // [T]
  const char* op = "sequence_load";
  const gating::ScoreFn fn = check_sequence_load(logits, topk_idx, num_sequences, score_fn, token_mask);
  check_sequences(op, num_sequences);
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits), index = contiguous(topk_idx);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t n = x.size(1), length = x.size(0) / std::max<int64_t>(1, num_sequences);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor score_sum = new_empty(x, {num_sequences, n}, acc);
  const Tensor counts = torch::stable::new_zeros(x, {num_sequences, n}, ScalarType::Long);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const RowPlan plan = checked_plan<acc_t<T>>(op, length, n);
    const Tensor partials = new_empty(x, {num_sequences * plan.num_blocks * n}, acc);
    const ScoreArgs<T> args{data<T>(x), data_or_null<bool>(mask), n, fn};
    launch_count_choices<kCheckIndices>(
        data<int64_t>(index), args.token_mask, num_sequences, length, static_cast<int>(index.size(1)),
        static_cast<int>(n), data<int64_t>(counts), device.stream());
    launch_scores<kCheckIndices>(
        args, num_sequences, length, plan, static_cast<acc_t<T>*>(nullptr), data<acc_t<T>>(partials),
        data<acc_t<T>>(score_sum), device.stream());
  });
  return {score_sum, counts};
}

Tensor sequence_load_backward_cuda(
    Tensor grad_score_sum, // [B, E]
    Tensor logits,         // [T, E]
    std::string score_fn,
    std::optional<Tensor> token_mask) { // [T]
  const char* op = "_sequence_load_backward";
  const gating::ScoreFn fn = check_sequence_load_backward(grad_score_sum, logits, score_fn, token_mask);
  const int64_t num_sequences = check_sequences(op, grad_score_sum.size(0));
  const DeviceScope device(logits);
  const Tensor x = contiguous(logits), ds = contiguous(grad_score_sum);
  const std::optional<Tensor> mask = optional_contiguous(token_mask);
  const int64_t n = x.size(1), length = x.size(0) / std::max<int64_t>(1, num_sequences);
  const Tensor grad = new_empty(x, {x.size(0), n});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    const RowPlan plan = checked_plan<acc_t<T>>(op, length, n);
    const ScoreGradArgs<T> args{
        {data<T>(x), data_or_null<bool>(mask), n, fn}, data<acc_t<T>>(ds), nullptr, nullptr, data<T>(grad)};
    launch_scores_backward<kCheckIndices>(args, num_sequences, length, plan, device.stream());
  });
  return grad;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("expert_choice_gate", TORCH_BOX(&expert_choice_gate_cuda));
  m.impl("_expert_choice_gate_backward", TORCH_BOX(&expert_choice_gate_backward_cuda));
  m.impl("_sinkhorn_scale", TORCH_BOX(&sinkhorn_scale_cuda));
  m.impl("balanced_assignment", TORCH_BOX(&balanced_assignment_cuda));
  m.impl("sequence_load", TORCH_BOX(&sequence_load_cuda));
  m.impl("_sequence_load_backward", TORCH_BOX(&sequence_load_backward_cuda));
}

} // namespace moe_ext::assignment
