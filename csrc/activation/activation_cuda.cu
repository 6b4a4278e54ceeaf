// CUDA side of the activations: allocates and launches, and never waits for the device.
#include <optional>
#include <tuple>
#include <vector>

#include "activation/activation.h"
#include "activation/activation_kernels.cuh"
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"

namespace moe_ext::activation {
namespace {

using torch::stable::contiguous;
using torch::stable::empty_like;

Tensor activation_cuda(Tensor x, std::string kind_name) {
  const Kind kind = check_activation("activation", x, kind_name);
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  const Tensor out = empty_like(in);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    launch_activation(kind, data<const T>(in), in.numel(), data<T>(out), device.stream());
  });
  return out;
}

Tensor activation_backward_cuda(Tensor grad, Tensor x, std::string kind_name) {
  const char* op = "_activation_backward";
  const Kind kind = check_activation(op, x, kind_name);
  check_grad(op, grad, x, x.dim() == 0 ? 1 : x.size(x.dim() - 1));
  const DeviceScope device(x);
  const Tensor g = contiguous(grad), in = contiguous(x);
  const Tensor out = empty_like(in);
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    launch_activation_backward(kind, data<const T>(g), data<const T>(in), in.numel(), data<T>(out), device.stream());
  });
  return out;
}

Tensor gated_activation_cuda(
    Tensor x, std::string kind_name, std::string layout_name, std::optional<Tensor> slot_weights,
    std::optional<Tensor> slot_of_row) {
  const char* op = "gated_activation";
  const auto [kind, layout] = check_gated(op, x, kind_name, layout_name);
  check_row_weights(op, x, slot_weights, slot_of_row);
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  std::vector<int64_t> shape = sizes_of(x);
  const int64_t dim = shape.back() /= 2;
  const Tensor out = torch::stable::new_empty(in, shape);
  const int64_t num_rows = dim == 0 ? 0 : out.numel() / dim;
  dispatch_floating_cuda(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    if (!slot_weights) {
      launch_gated_activation(kind, layout, data<const T>(in), num_rows, dim, data<T>(out), device.stream());
      return;
    }
    const Tensor weights = contiguous(*slot_weights), slots = contiguous(*slot_of_row);
    launch_gated_activation_weighted<kCheckIndices, T>(
        kind, layout, data<const T>(in), data<const acc_t<T>>(weights), data<const int64_t>(slots), weights.numel(),
        num_rows, dim, data<T>(out), device.stream());
  });
  return out;
}

Tensor gated_activation_backward_cuda(Tensor grad, Tensor x, std::string kind_name, std::string layout_name) {
  const char* op = "_gated_activation_backward";
  const auto [kind, layout] = check_gated(op, x, kind_name, layout_name);
  const int64_t dim = x.size(x.dim() - 1) / 2;
  check_grad(op, grad, x, dim);
  const DeviceScope device(x);
  const Tensor g = contiguous(grad), in = contiguous(x);
  const Tensor out = empty_like(in);
  dispatch_floating_cuda(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    launch_gated_activation_backward(
        kind, layout, data<const T>(g), data<const T>(in), dim == 0 ? 0 : g.numel() / dim, dim, data<T>(out),
        device.stream());
  });
  return out;
}

std::tuple<Tensor, Tensor> gated_activation_backward_weighted_cuda(
    Tensor grad, Tensor x, std::string kind_name, std::string layout_name, Tensor slot_weights, Tensor slot_of_row,
    bool /*x_owned*/) {
  const char* op = "_gated_activation_backward_weighted";
  const auto [kind, layout] = check_gated(op, x, kind_name, layout_name);
  check_row_weights(op, x, slot_weights, slot_of_row);
  const int64_t dim = x.size(1) / 2;
  check_grad(op, grad, x, dim);
  const DeviceScope device(x);
  const Tensor g = contiguous(grad), in = contiguous(x);
  const Tensor weights = contiguous(slot_weights), slots = contiguous(slot_of_row);
  const Tensor grad_x = empty_like(in);
  const Tensor grad_weights = torch::stable::new_zeros(weights, sizes_of(weights)); // a slot may have no row
  dispatch_floating_cuda(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    launch_gated_activation_weighted_backward<kCheckIndices, T>(
        kind, layout, data<const T>(g), data<const T>(in), data<const acc_t<T>>(weights), data<const int64_t>(slots),
        weights.numel(), in.size(0), dim, data<T>(grad_x), data<acc_t<T>>(grad_weights), device.stream());
  });
  return {grad_x, grad_weights};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("activation", TORCH_BOX(&activation_cuda));
  m.impl("_activation_backward", TORCH_BOX(&activation_backward_cuda));
  m.impl("gated_activation", TORCH_BOX(&gated_activation_cuda));
  m.impl("_gated_activation_backward", TORCH_BOX(&gated_activation_backward_cuda));
  m.impl("_gated_activation_backward_weighted", TORCH_BOX(&gated_activation_backward_weighted_cuda));
}

} // namespace moe_ext::activation
