// The only place that launches kernels. `<<<>>>` is the one piece of CUDA syntax that a C++ compiler cannot parse, and
// the tests replace this file by an emulation (tests/cpp/simt).
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <stdexcept>
#include <string>

#include "common/launch_config.h"

namespace moe_ext {

inline void cuda_check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string(call) + ": " + cudaGetErrorName(error) + " (" + std::to_string(static_cast<int>(error)) + "), " +
        cudaGetErrorString(error));
  }
}

#define MOE_CUDA_CHECK(call) ::moe_ext::cuda_check((call), #call)

// Properties of the current device. Attributes are cheap enough not to be cached, unlike cudaGetDeviceProperties, and
// may be read during graph capture.
inline DeviceProperties device_properties() {
  int device = 0;
  MOE_CUDA_CHECK(cudaGetDevice(&device));
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    MOE_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  return {
      attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxThreadsPerMultiProcessor),
      attribute(cudaDevAttrMaxSharedMemoryPerBlock), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
      attribute(cudaDevAttrComputeCapabilityMajor)};
}

// Raise the kernel's limit to all shared memory that the device offers. The limit is equal for every launch, so that no
// thread lowers it under another thread's launch.
inline void raise_shared_limit(const void* kernel, const Launch& launch, const DeviceProperties& device) {
  cudaFuncAttributes attributes = {};
  MOE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  check_shared_memory(launch, attributes.sharedSizeBytes, device);
  if (launch.shared_bytes + attributes.sharedSizeBytes > static_cast<size_t>(device.shared_bytes_per_block)) {
    MOE_CUDA_CHECK(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
        device.shared_bytes_per_block_opt_in - static_cast<int>(attributes.sharedSizeBytes)));
  }
}

// Number of blocks of the kernel that run on the device at the same time, given its registers and shared memory.
template <typename... Params>
int64_t resident_blocks(void (*kernel)(Params...), int threads, size_t shared_bytes) {
  const DeviceProperties device = device_properties();
  raise_shared_limit(reinterpret_cast<const void*>(kernel), {Dim3(), Dim3(), shared_bytes}, device);
  int blocks = 0;
  MOE_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
  return int64_t{device.num_sms} * std::max(1, blocks);
}

// Run kernel(args...) on the stream of `launch`. Throws if the launch is refused.
template <typename... Params, typename... Args>
void launch(const Launch& launch, void (*kernel)(Params...), Args... args) {
  const DeviceProperties device = device_properties();
  check_launch(launch, device);
  // Up to half of the default limit, kernels' static memory fits beside the dynamic memory, and small launches skip the
  // query.
  if (launch.shared_bytes > static_cast<size_t>(device.shared_bytes_per_block / 2)) {
    raise_shared_limit(reinterpret_cast<const void*>(kernel), launch, device);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid.checked();
  config.blockDim = launch.block.checked();
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  MOE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

} // namespace moe_ext

// Shared memory is declared by these two macros only, so that the emulation can poison it between blocks.
#define MOE_SHARED(T, name, size) __shared__ T name[size]
#define MOE_DYNAMIC_SHARED(T, name)                               \
  extern __shared__ __align__(16) unsigned char moe_ext_shared[]; \
  T* const name = reinterpret_cast<T*>(moe_ext_shared)
