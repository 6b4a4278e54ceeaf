// Configuration of a launch, on a device and in the emulation of the tests. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/host_device.h"

namespace moe_ext {

constexpr int kWarpSize = 32;

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0; // dynamic
  cudaStream_t stream = nullptr;
};

struct DeviceProperties {
  int num_sms;
  int max_threads_per_sm;
  int shared_bytes_per_block;        // without an opt-in
  int shared_bytes_per_block_opt_in; // the most that a launch may ask for
  int compute_capability;            // major
};

// Blocks that fill the device once, or fewer where the work is less: kernels walk over the rest with a stride.
inline dim3 persistent_grid(int64_t num_blocks, int threads_per_block, const DeviceProperties& device) {
  const int64_t resident = int64_t{device.num_sms} * std::max(1, device.max_threads_per_sm / threads_per_block);
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(num_blocks, 1, resident)));
}

inline void check_launch(const Launch& launch, const DeviceProperties& device) {
  const uint64_t threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  const auto refuse = [](const std::string& rule, uint64_t got) {
    throw std::runtime_error("launch: expected " + rule + ", got " + std::to_string(got));
  };
  if (threads < 1 || threads > 1024) {
    refuse("the block to have 1 to 1024 threads", threads);
  }
  if (launch.grid.x < 1 || launch.grid.x > 0x7FFFFFFFu) {
    refuse("grid.x to be in [1, 2^31 - 1]", launch.grid.x);
  }
  if (launch.grid.y < 1 || launch.grid.z < 1 || launch.grid.y > 65535 || launch.grid.z > 65535) {
    refuse("grid.y and grid.z to be in [1, 65535]", std::max(launch.grid.y, launch.grid.z));
  }
  if (launch.shared_bytes > static_cast<size_t>(device.shared_bytes_per_block_opt_in)) {
    refuse(
        "at most " + std::to_string(device.shared_bytes_per_block_opt_in) + " bytes of dynamic shared memory",
        launch.shared_bytes);
  }
}

// own_bytes: what the kernel itself declares, which shares the block's memory with what the launch asks for.
inline void check_shared_memory(const Launch& launch, size_t own_bytes, const DeviceProperties& device) {
  const size_t bytes = launch.shared_bytes + own_bytes;
  if (bytes > static_cast<size_t>(device.shared_bytes_per_block_opt_in)) {
    throw std::runtime_error(
        "launch: expected at most " + std::to_string(device.shared_bytes_per_block_opt_in) +
        " bytes of shared memory, got " + std::to_string(launch.shared_bytes) + " and the kernel's own " +
        std::to_string(own_bytes));
  }
}

} // namespace moe_ext
