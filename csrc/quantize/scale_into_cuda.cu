// Scaled copies on CUDA: allocation and launches on the current stream. The host never waits for the device.
#include "common/dispatch.h"
#include "common/torch_cuda.cuh"
#include "quantize/scale_into.h"
#include "quantize/scale_into_kernels.cuh"

namespace moe_ext::scale_into {
namespace {

Tensor scale_into_cuda(Tensor out, Tensor x, double scale) {
  check_scale_into(out, x);
  const DeviceScope device(x);
  Tensor nonfinite = torch::stable::new_zeros(x, {}, ScalarType::Bool);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    dispatch_floating(out.scalar_type(), [&]<typename U>() {
      launch_scale_into(
          data<const T>(x), static_cast<acc_t<T>>(scale), x.numel(), data<U>(out), data<bool>(nonfinite),
          device.stream());
    });
  });
  return nonfinite;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("scale_into_", TORCH_BOX(&scale_into_cuda));
}

} // namespace moe_ext::scale_into
