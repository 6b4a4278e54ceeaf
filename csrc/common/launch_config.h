// Configuration of a kernel launch, on a device and in the emulation of the tests. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/host_device.h"

namespace moe_ext {

constexpr int kWarpSize = 32;

// CUDA's dim3 in 64 bits, so that check_launch sees a size that no device takes instead of the size modulo 2^32.
struct Dim3 {
  int64_t x, y, z;

  explicit Dim3(int64_t size_x = 1, int64_t size_y = 1, int64_t size_z = 1) : x(size_x), y(size_y), z(size_z) {
  }
  // Call after check_launch, which guarantees that the sizes fit.
  dim3 checked() const {
    return dim3{static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
  }
};

struct Launch {
  Dim3 grid;
  Dim3 block;
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

// Return the number of blocks that fill the device once, or `num_blocks` if that is less. Kernels loop over the
// remaining work with a stride.
inline Dim3 persistent_grid(int64_t num_blocks, int threads_per_block, const DeviceProperties& device) {
  const int64_t resident = int64_t{device.num_sms} * std::max(1, device.max_threads_per_sm / threads_per_block);
  return Dim3(std::clamp<int64_t>(num_blocks, 1, resident));
}

inline void check_launch(const Launch& launch, const DeviceProperties& device) {
  const auto refuse = [](const std::string& rule, auto got) {
    throw std::runtime_error("launch: expected " + rule + ", got " + std::to_string(got));
  };
  int64_t threads = 1;
  for (const int64_t size : {launch.block.x, launch.block.y, launch.block.z}) {
    // The product cannot overflow: a size out of range replaces it, and sizes in range multiply to less than 2^31.
    threads = size < 1 || size > 1024 ? size : threads * size;
    if (threads < 1 || threads > 1024) {
      refuse("the block to have 1 to 1024 threads", threads);
    }
  }
  if (launch.grid.x < 1 || launch.grid.x > INT32_MAX) {
    refuse("grid.x to be in [1, 2^31 - 1]", launch.grid.x);
  }
  for (const int64_t size : {launch.grid.y, launch.grid.z}) {
    if (size < 1 || size > 65535) {
      refuse("grid.y and grid.z to be in [1, 65535]", size);
    }
  }
  if (launch.shared_bytes > static_cast<size_t>(device.shared_bytes_per_block_opt_in)) {
    refuse(
        "at most " + std::to_string(device.shared_bytes_per_block_opt_in) + " bytes of dynamic shared memory",
        launch.shared_bytes);
  }
}

// Throw if dynamic shared memory and `own_bytes`, which the kernel declares statically, together exceed the device's
// limit.
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
