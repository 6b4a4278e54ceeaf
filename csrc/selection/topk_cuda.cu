// Gradient selection on CUDA: allocation and launches on the current stream. The host never waits for the device.
#include <tuple>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "selection/scopes_kernels.cuh"
#include "selection/topk.h"

namespace moe_ext::topk {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::new_zeros;
using OptionalTensor = std::optional<Tensor>;

// Launches the check for NaN and infinity, if `check` is set, and the selection.
template <bool kVelocity, typename T>
void select(
    const Feedback<T>& args, const Tensor& residual, const Plan& plan, bool check, const Thresholds<T>& thresholds,
    const Selected<T>& out, cudaStream_t stream) {
  State<T> state{args, nullptr, vectors_fit(args, plan.size, plan.num_scopes), kCheckIndices};
  const Tensor refused = new_zeros(residual, {1}, ScalarType::Int);
  if (check && plan.numel > 0) {
    if (args.in_place()) {
      launch_check_finite<kVelocity, kCheckIndices>(state, plan.numel, data<int>(refused), stream);
    }
    state.refused = data<int>(refused);
  }
  const ScratchBytes bytes = plan.size <= kBlockScope ? ScratchBytes{0, 0} : scratch_bytes<T>(plan);
  const Tensor zeroed = new_zeros(residual, {bytes.zeroed}, ScalarType::Byte);
  const Tensor other = new_empty(residual, {bytes.other}, ScalarType::Byte);
  launch_select<kVelocity>(
      state, plan, thresholds, scratch_of<T>(plan, zeroed.data_ptr(), other.data_ptr()), out, stream);
}

template <typename T>
void select(
    const Feedback<T>& args, const Tensor& residual, const Plan& plan, bool check, const Thresholds<T>& thresholds,
    const Selected<T>& out, cudaStream_t stream) {
  const auto run = args.velocity != nullptr ? select<true, T> : select<false, T>;
  run(args, residual, plan, check, thresholds, out, stream);
}

std::tuple<Tensor, Tensor> topk_compress_cuda(
    Tensor grad, Tensor residual, int64_t k, int64_t scope_size, OptionalTensor velocity, double momentum,
    double residual_scale, bool check, OptionalTensor residual_in, OptionalTensor velocity_in) {
  const FeedbackTensors state{grad, residual, velocity, residual_in, velocity_in, momentum, residual_scale};
  const Scopes scopes = check_topk_compress(state, k, scope_size);
  check_int32("topk_compress_", "the number of scopes", scopes.count());
  const DeviceScope device(residual);
  const Tensor g = contiguous(grad);
  Tensor values = new_empty(residual, {scopes.total()});
  Tensor indices = new_empty(residual, {scopes.total()}, ScalarType::Long);
  if (scopes.numel > 0) {
    const Plan plan =
        make_plan(scopes.numel, std::min(scopes.size, scopes.numel), scopes.count(), k, false, device_properties());
    dispatch_floating(g.scalar_type(), [&]<typename T>() {
      select<T>(
          feedback<T>(state, g), residual, plan, check, {}, {data<acc_t<T>>(values), data<int64_t>(indices)},
          device.stream());
    });
  }
  return {values, indices};
}

std::tuple<Tensor, Tensor, Tensor> threshold_compress_cuda(
    Tensor grad, Tensor residual, Tensor threshold, int64_t capacity, int64_t target, OptionalTensor velocity,
    double momentum, double residual_scale, bool check, int64_t scope_size, OptionalTensor residual_in,
    OptionalTensor velocity_in) {
  const FeedbackTensors state{grad, residual, velocity, residual_in, velocity_in, momentum, residual_scale};
  const Scopes scopes = check_threshold_compress(state, threshold, capacity, target, scope_size);
  check_int32("threshold_compress_", "the number of scopes", scopes.count());
  const DeviceScope device(residual);
  const Tensor g = contiguous(grad);
  // An empty gradient still has one scope, so that its threshold adapts.
  const int64_t count = scope_size == 0 ? 1 : scopes.count();
  Tensor values = new_empty(residual, {count * capacity});
  Tensor indices = new_empty(residual, {count * capacity}, ScalarType::Long);
  Tensor filled = new_empty(threshold, sizes_of(threshold), ScalarType::Long);
  if (count > 0) {
    const Plan plan =
        make_plan(scopes.numel, std::min(scopes.size, scopes.numel), count, capacity, true, device_properties());
    dispatch_floating(g.scalar_type(), [&]<typename T>() {
      select<T>(
          feedback<T>(state, g), residual, plan, check, {data<acc_t<T>>(threshold), data<int64_t>(filled), target},
          {data<acc_t<T>>(values), data<int64_t>(indices)}, device.stream());
    });
  }
  return {values, indices, filled};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("topk_compress_", TORCH_BOX(&topk_compress_cuda));
  m.impl("threshold_compress_", TORCH_BOX(&threshold_compress_cuda));
}

} // namespace moe_ext::topk
