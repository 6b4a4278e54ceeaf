// Values in a device's memory that the host must know before it can go on.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/dispatch.h"

namespace moe_ext {

// NOTE: device-to-host sync. The elements of a contiguous tensor, on the host.
inline Tensor read_back(const Tensor& t) {
  return torch::stable::to(t, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

} // namespace moe_ext
