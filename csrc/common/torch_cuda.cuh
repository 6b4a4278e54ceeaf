// Torch on a device, for the glue between operators and kernels: the stream, the guard, the registration. No other
// header uses these; ATen's CUDA headers need a torch built with CUDA, and torch's stable headers do not.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "common/check.h"

namespace moe_ext {

// Makes the tensor's device current during its lifetime, and holds the device's current stream for launches.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const {
    return stream_;
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

} // namespace moe_ext

#define MOE_EXT_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(moe_ext, CUDA, m)
