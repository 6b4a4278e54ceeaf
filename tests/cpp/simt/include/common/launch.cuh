// Shadows csrc/common/launch.cuh: the same names, run by the emulation.
#pragma once

#include <cuda_runtime.h>

#include "common/launch_config.h"

namespace moe_ext {

inline DeviceProperties device_properties() {
  const simt::Device& device = simt::device;
  return {
      device.num_sms, device.max_threads_per_sm, device.shared_bytes_per_block, device.shared_bytes_per_block_opt_in,
      device.compute_capability};
}

template <typename... Params, typename... Args>
void launch(const Launch& launch, void (*kernel)(Params...), Args... args) {
  check_launch(launch, device_properties());
  simt::run_grid(launch.grid, launch.block, launch.shared_bytes, [=] { kernel(static_cast<Params>(args)...); });
}

} // namespace moe_ext

#define MOE_SHARED(T, name, size)                          \
  static ::simt::SharedArray<T, size> name##_of_the_block; \
  T* const name = reinterpret_cast<T*>(name##_of_the_block.bytes)
#define MOE_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::simt::dynamic_shared())
