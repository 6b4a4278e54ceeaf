// CUDA side of the causal convolution: allocates and launches, and never waits for the device.
#include "recurrence/causal_conv1d.h"

#include <tuple>

#include "common/dispatch.h"
#include "common/torch_cuda.cuh"
#include "recurrence/causal_conv1d_kernels.cuh"
#include "recurrence/checks.h"

namespace moe_ext::recurrence {
namespace {

using torch::stable::empty_like;
using torch::stable::new_empty;

ConvStrides strides_of(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2)};
}

// The arguments, contiguous where kernels need it. The object keeps contiguous copies alive.
struct Arguments {
  Tensor x, weight, halo;
  OptionalTensor bias, documents;
  bool silu;

  Arguments(const char* op, const CausalConvArgs& args, bool silu)
      : x(args.x),
        weight(as_contiguous(args.weight)),
        halo(args.halo),
        bias(optional_contiguous(args.bias)),
        documents(optional_contiguous(args.documents)),
        silu(silu) {
    MOE_CHECK(
        weight.size(1) < 65535, op, ": expected weight to have fewer than 65535 taps on CUDA, got shape ",
        shape_string(weight));
  }

  template <typename Acc>
  ConvInput<Acc> input() const {
    return {
        data<const Acc>(x),
        data<const Acc>(halo),
        strides_of(x),
        strides_of(halo),
        data<const Acc>(weight),
        data_or_null<Acc>(bias),
        data_or_null<int64_t>(documents),
        documents && documents->size(0) > 1 ? documents->size(1) : 0,
        x.size(0),
        x.size(1),
        x.size(2),
        static_cast<int>(weight.size(1)),
        silu};
  }
};

Tensor causal_conv1d_cuda(
    Tensor x, Tensor weight, OptionalTensor bias, Tensor halo, OptionalTensor documents, bool silu) {
  const char* op = "causal_conv1d";
  const CausalConvArgs args = {x, weight, bias, halo, documents};
  check_causal_conv(op, args);
  const DeviceScope device(x);
  const Arguments given(op, args, silu);
  Tensor out = empty_like(x);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    launch_causal_conv<Acc>(given.input<Acc>(), data<Acc>(out), strides_of(out), device.stream());
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward_cuda(
    Tensor grad, Tensor x, Tensor weight, OptionalTensor bias, Tensor halo, OptionalTensor documents, bool silu) {
  const char* op = "_causal_conv1d_backward";
  const CausalConvArgs args = {x, weight, bias, halo, documents};
  check_causal_conv(op, args);
  check_like(op, "grad", grad, "x", x);
  const DeviceScope device(x);
  const Arguments given(op, args, silu);
  Tensor grad_x = empty_like(x), sums = new_empty(x, sizes_of(x));
  Tensor grad_halo = new_empty(x, sizes_of(halo)), grad_weight = new_empty(x, sizes_of(weight));
  Tensor grad_bias = new_empty(x, {bias ? x.size(1) : 0});
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const ConvGradients<Acc> grads = {
        data<const Acc>(grad), strides_of(grad),     data<Acc>(sums),        data<Acc>(grad_x),
        strides_of(grad_x),    data<Acc>(grad_halo), data<Acc>(grad_weight), bias ? data<Acc>(grad_bias) : nullptr};
    launch_causal_conv_backward<Acc>(given.input<Acc>(), grads, device.stream());
  });
  return {grad_x, grad_weight, grad_bias, grad_halo};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d_cuda));
  m.impl("_causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward_cuda));
}

} // namespace moe_ext::recurrence
