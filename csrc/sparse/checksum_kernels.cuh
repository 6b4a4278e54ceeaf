// CRC-32C on a device. The remainder of a payload is the sum of the remainders of its chunks, each times a power of x,
// so every thread can work on its own chunks. Checksums are meant for debugging, so one bit at a time is fast enough.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"
#include "common/warp.cuh"

namespace moe_ext::wire {

constexpr uint32_t kPolynomial = 0x82F63B78u; // reflected: the highest bit is the coefficient of x^0
constexpr uint32_t kOne = 0x80000000u;
constexpr int64_t kChunk = 1024;
constexpr int kChecksumThreads = 128;

__device__ __forceinline__ uint32_t times_x(uint32_t a) {
  return (a >> 1) ^ ((a & 1u) != 0 ? kPolynomial : 0u);
}

__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    sum ^= (a & bit) != 0 ? b : 0u;
    b = times_x(b);
  }
  return sum;
}

// a x^(8 bytes): the remainder of a message of remainder a followed by `bytes` zero bytes.
__device__ __forceinline__ uint32_t followed_by(uint32_t a, uint64_t bytes) {
  uint32_t power = kOne >> 8;
  for (; bytes != 0; bytes >>= 1) {
    a = (bytes & 1u) != 0 ? product(a, power) : a;
    power = product(power, power);
  }
  return a;
}

__device__ __forceinline__ uint32_t warp_xor(uint32_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value ^= __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// Writes the sum of the chunks of each warp to partial [warps]. The four bytes from `skipped` on count as zeros.
static __global__ void __launch_bounds__(kChecksumThreads) chunk_checksums_kernel(
    const uint8_t* __restrict__ bytes, int64_t size, int64_t skipped, uint32_t* __restrict__ partial) {
  uint32_t sum = 0;
  const int64_t thread = int64_t{blockIdx.x} * kChecksumThreads + threadIdx.x;
  for (int64_t begin = thread * kChunk; begin < size; begin += int64_t{gridDim.x} * kChecksumThreads * kChunk) {
    const int64_t end = min(begin + kChunk, size);
    uint32_t remainder = 0;
    for (int64_t i = begin; i < end; ++i) {
      remainder ^= i >= skipped && i < skipped + 4 ? 0u : bytes[i];
      for (int bit = 0; bit < 8; ++bit) {
        remainder = times_x(remainder);
      }
    }
    sum ^= followed_by(remainder, static_cast<uint64_t>(size - end));
  }
  sum = warp_xor(sum);
  if (lane_id() == 0) {
    partial[int64_t{blockIdx.x} * (kChecksumThreads / kWarpSize) + warp_id()] = sum;
  }
}

// Joins the sums; launched with one warp. CRC-32C inverts all bits of the initial and of the final remainder.
static __global__ void __launch_bounds__(kWarpSize) join_checksums_kernel(
    const uint32_t* __restrict__ partial, int count, int64_t size, uint32_t* __restrict__ checksum) {
  uint32_t sum = lane_id() == 0 ? followed_by(~0u, static_cast<uint64_t>(size)) : 0u;
  for (int i = lane_id(); i < count; i += kWarpSize) {
    sum ^= partial[i];
  }
  sum = warp_xor(sum);
  if (lane_id() == 0) {
    *checksum = ~sum;
  }
}

inline Dim3 checksum_grid(int64_t size) {
  return persistent_grid(ceil_div(size, kChecksumThreads * kChunk), kChecksumThreads, device_properties());
}

// Size of `partial`, the scratch memory of launch_checksum, in words of 32 bits.
inline int64_t num_checksum_words(int64_t size) {
  return checksum_grid(size).x * (kChecksumThreads / kWarpSize);
}

inline void launch_checksum(
    const uint8_t* bytes, int64_t size, int64_t skipped, uint32_t* partial, uint32_t* checksum, cudaStream_t stream) {
  launch(
      {checksum_grid(size), Dim3(kChecksumThreads), 0, stream}, chunk_checksums_kernel, bytes, size, skipped, partial);
  launch(
      {Dim3(1), Dim3(kWarpSize), 0, stream}, join_checksums_kernel, partial, static_cast<int>(num_checksum_words(size)),
      size, checksum);
}

} // namespace moe_ext::wire
