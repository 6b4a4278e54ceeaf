// Copies of device values that the host needs before it can continue.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/dispatch.h"

namespace moe_ext {

// NOTE: device-to-host sync. Return the elements of a contiguous tensor in host memory.
inline Tensor read_back(const Tensor& t) {
  return torch::stable::to(t, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

} // namespace moe_ext
