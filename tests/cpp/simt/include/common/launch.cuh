// Shadows csrc/common/launch.cuh: the same names, run by the emulation.
#pragma once

#include <cuda_runtime.h>

#include "common/launch_config.h"

namespace moe_ext {

// Small, so that kernels walk over their work with a stride already in small tests.
inline DeviceProperties& device_properties() {
  static DeviceProperties device = {2, 512, 48 * 1024, 99 * 1024, 9};
  return device;
}

template <typename... Params>
int64_t resident_blocks(void (*)(Params...), int threads, size_t) {
  return int64_t{device_properties().num_sms} * std::max(1, device_properties().max_threads_per_sm / threads);
}

template <typename... Params, typename... Args>
void launch(const Launch& launch, void (*kernel)(Params...), Args... args) {
  check_launch(launch, device_properties());
  simt::run_grid(launch.grid.checked(), launch.block.checked(), launch.shared_bytes, [=] {
    kernel(static_cast<Params>(args)...);
  });
  check_shared_memory(launch, simt::own_shared_bytes, device_properties());
}

} // namespace moe_ext

#define MOE_SHARED(T, name, size)                                         \
  static ::simt::SharedArray name##_bytes(sizeof(T) * (size));            \
  static T* const name = reinterpret_cast<T*>(name##_bytes.bytes.data()); \
  name##_bytes.enter()
#define MOE_DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(::simt::dynamic_shared.data())
