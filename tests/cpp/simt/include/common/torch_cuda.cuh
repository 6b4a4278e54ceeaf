// Shadows csrc/common/torch_cuda.cuh: the glue runs on CPU tensors, registered where no backend of torch is.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include "common/check.h"

namespace moe_ext {

struct DeviceScope {
  Tensor tensor;
  cudaStream_t stream() const {
    return nullptr;
  }
};

} // namespace moe_ext

#define MOE_EXT_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(moe_ext, PrivateUse1, m)
