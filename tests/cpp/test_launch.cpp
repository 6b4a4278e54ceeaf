// csrc/common/launch.cuh itself, which the emulation replaces elsewhere, over a runtime that refuses what CUDA's does.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxThreadsPerMultiProcessor,
  cudaDevAttrMaxSharedMemoryPerBlock,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace {
constexpr size_t kShared = 48 << 10, kMostShared = 227 << 10;

// A device of compute capability 9.0, and what reached it.
struct Device {
  size_t own_bytes = 0;     // of the kernel
  size_t dynamic_limit = 0; // set by the attribute
  std::optional<cudaLaunchConfig_t> launched;
} device;
} // namespace

inline const char* cudaGetErrorName(cudaError_t) {
  return "cudaErrorInvalidValue";
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "invalid argument";
}
inline cudaError_t cudaGetDevice(int*) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = std::array{132, 2048, int{kShared}, int{kMostShared}, 9}[name];
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->sharedSizeBytes = device.own_bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  device.dynamic_limit = static_cast<size_t>(bytes);
  return device.dynamic_limit + device.own_bytes <= kMostShared ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
template <typename... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*)(Params...), Params...) {
  if (config->dynamicSmemBytes > std::max(kShared - device.own_bytes, device.dynamic_limit)) {
    return cudaErrorInvalidValue;
  }
  device.launched = *config;
  return cudaSuccess;
}

#include "../../csrc/common/launch.cuh"

namespace moe_ext {
namespace {

void no_kernel(int) {
}

// The error of a launch that never came to the device, or "launched".
std::string launched(const Launch& config, size_t own_bytes = 0) {
  device = {own_bytes, 0, std::nullopt};
  try {
    launch(config, no_kernel, 1);
  } catch (const std::runtime_error& error) {
    EXPECT_FALSE(device.launched);
    return error.what();
  }
  EXPECT_TRUE(device.launched);
  return "launched";
}

constexpr int64_t kWraps = int64_t{1} << 32; // is 0 in 32 bits

TEST(Launch, RefusesSizesThatWouldWrap) {
  const std::string along_x = "launch: expected grid.x to be in [1, 2^31 - 1], got ";
  for (const int64_t size : {int64_t{-1}, int64_t{0}, kWraps / 2, kWraps, kWraps + 1, int64_t{INT64_MAX}}) {
    EXPECT_EQ(launched({Dim3(size), Dim3(32)}), along_x + std::to_string(size));
  }
  for (const int64_t size : {int64_t{0}, int64_t{65536}, kWraps + 1}) {
    const std::string expected = "launch: expected grid.y and grid.z to be in [1, 65535], got " + std::to_string(size);
    EXPECT_EQ(launched({Dim3(1, size), Dim3(32)}), expected);
    EXPECT_EQ(launched({Dim3(1, 1, size), Dim3(32)}), expected);
  }
  const std::string of_block = "launch: expected the block to have 1 to 1024 threads, got ";
  EXPECT_EQ(launched({Dim3(1), Dim3(kWraps + 32)}), of_block + std::to_string(kWraps + 32));
  EXPECT_EQ(launched({Dim3(1), Dim3(1, kWraps)}), of_block + std::to_string(kWraps));
  EXPECT_EQ(launched({Dim3(1), Dim3(64, 32)}), of_block + "2048");
}

TEST(Launch, PassesOnTheLargestSizes) {
  EXPECT_EQ(launched({Dim3(INT32_MAX, 65535, 65535), Dim3(1024)}), "launched");
  EXPECT_EQ(device.launched->gridDim.x, unsigned{INT32_MAX});
  EXPECT_EQ(device.launched->gridDim.y, 65535u);
  EXPECT_EQ(device.launched->gridDim.z, 65535u);
  EXPECT_EQ(device.launched->blockDim.x, 1024u);
}

TEST(Launch, FillsTheDeviceOnceForAnyAmountOfWork) {
  for (const int64_t blocks : {kWraps + 1, int64_t{INT64_MAX}}) {
    EXPECT_EQ(persistent_grid(blocks, 256, device_properties()).x, 132 * 8);
  }
}

TEST(Launch, RaisesTheLimitOfSharedMemory) {
  for (const size_t own : {size_t{0}, size_t{4096}}) {
    for (const size_t bytes : {size_t{0}, kShared - own, kShared - own + 1, kMostShared - own}) {
      EXPECT_EQ(launched({Dim3(1), Dim3(32), bytes}, own), "launched") << bytes;
      EXPECT_EQ(device.dynamic_limit, bytes + own > kShared ? kMostShared - own : 0) << bytes;
    }
    const std::string error = launched({Dim3(1), Dim3(32), kMostShared - own + 1}, own);
    EXPECT_NE(error.find("launch: expected at most 232448 bytes of "), std::string::npos) << error;
  }
  device = {};
  EXPECT_EQ(resident_blocks(no_kernel, 32, kMostShared), 2 * 132);
  EXPECT_THROW(resident_blocks(no_kernel, 32, kMostShared + 1), std::runtime_error);
}

// Without it the runtime refuses: this one as CUDA's.
TEST(SeededBug, SharedMemoryWithoutTheAttribute) {
  device = {};
  const cudaLaunchConfig_t config = {{1}, {32}, kShared + 1, nullptr};
  EXPECT_EQ(cudaLaunchKernelEx(&config, no_kernel, 1), cudaErrorInvalidValue);
}

} // namespace
} // namespace moe_ext
