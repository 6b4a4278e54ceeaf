// Encoders of the wire format. Indices ascend, so the indices of a word of a bitmap, or of a run, are found by
// bisection. The bytes of gaps are counted by segment, the counts are summed, and the gaps are written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/scan.cuh"
#include "common/threads.cuh"
#include "common/vec.cuh"
#include "sparse/wire_format.h"

namespace moe_ext::wire {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kSegment = 1024; // gaps, or bytes, per warp

__device__ __forceinline__ int64_t global_warp() {
  return int64_t{blockIdx.x} * kWarps + warp_id();
}

__device__ __forceinline__ int64_t num_warps() {
  return int64_t{gridDim.x} * kWarps;
}

inline int64_t num_segments(int64_t size) {
  return ceil_div(size, kSegment);
}

inline Launch over_segments(int64_t size, cudaStream_t stream) {
  return over_threads(num_segments(size) * kWarpSize, stream);
}

// Copies `size` bytes to `to`, whose address is a multiple of 16, and fills up with zeros to `padded` bytes.
static __global__ void __launch_bounds__(kThreads) copy_padded_kernel(
    const uint8_t* __restrict__ from, int64_t size, bool aligned, uint8_t* __restrict__ to, int64_t padded) {
  for (int64_t i = global_thread() * kAccessBytes; i < padded; i += num_threads() * kAccessBytes) {
    Vec<uint8_t, kAccessBytes> bytes = {};
    if (aligned && i + kAccessBytes <= size) {
      bytes = load<kAccessBytes>(from + i);
    } else {
#pragma unroll
      for (int j = 0; j < kAccessBytes; ++j) {
        if (i + j < size) {
          bytes.v[j] = from[i + j];
        }
      }
    }
    if (i + kAccessBytes <= padded) {
      store(to + i, bytes);
    } else {
#pragma unroll
      for (int j = 0; j < kAccessBytes; ++j) {
        if (i + j < padded) {
          to[i + j] = bytes.v[j];
        }
      }
    }
  }
}

inline void launch_copy_padded(const void* from, int64_t size, void* to, int64_t padded, cudaStream_t stream) {
  if (size > 0) {
    launch(
        over_threads(ceil_div(padded, int64_t{kAccessBytes}), stream), copy_padded_kernel,
        static_cast<const uint8_t*>(from), size, is_aligned(from, kAccessBytes), static_cast<uint8_t*>(to), padded);
  }
}

template <typename T>
__global__ void store_kernel(T value, T* __restrict__ out) {
  *out = value;
}

template <typename T>
void launch_store(T value, void* out, cudaStream_t stream) {
  launch({Dim3(1), Dim3(1), 0, stream}, store_kernel<T>, value, static_cast<T*>(out));
}

// Traps on indices that the CPU's encoder refuses. Launched only with MOE_EXT_CUDA_CHECKS.
static __global__ void __launch_bounds__(kThreads)
    check_ascending_kernel(const int64_t* __restrict__ indices, int64_t count, int64_t numel) {
  for (int64_t i = global_thread(); i < count; i += num_threads()) {
    if (indices[i] < 0 || indices[i] >= numel || (i > 0 && indices[i - 1] >= indices[i])) {
      __trap();
    }
  }
}

// Writes the bitmap by words of 32 bits, up to the padded end.
static __global__ void __launch_bounds__(kThreads) encode_bitmap_kernel(
    const int64_t* __restrict__ indices, int64_t count, int64_t num_words, uint32_t* __restrict__ words) {
  for (int64_t word = global_thread(); word < num_words; word += num_threads()) {
    uint32_t bits = 0;
    for (int64_t i = first_from(indices, count, 32 * word); i < count && indices[i] < 32 * (word + 1); ++i) {
      bits |= 1u << (indices[i] & 31);
    }
    words[word] = bits;
  }
}

// Writes counts of the runs, then offsets, then zeros up to `num_shorts` offsets.
static __global__ void __launch_bounds__(kThreads) encode_u16_kernel(
    const int64_t* __restrict__ indices, int64_t count, int64_t runs, int64_t num_shorts, uint8_t* __restrict__ out) {
  uint32_t* const counts = reinterpret_cast<uint32_t*>(out);
  uint16_t* const offsets = reinterpret_cast<uint16_t*>(out + 4 * runs);
  for (int64_t i = global_thread(); i < runs + num_shorts; i += num_threads()) {
    if (i < runs) {
      const int64_t begin = first_from(indices, count, i * kRun), end = first_from(indices, count, (i + 1) * kRun);
      counts[i] = static_cast<uint32_t>(end - begin);
    } else {
      offsets[i - runs] = i - runs < count ? static_cast<uint16_t>(indices[i - runs]) : 0;
    }
  }
}

__device__ __forceinline__ uint64_t gap_before(const int64_t* indices, int64_t i) {
  const uint64_t last = i == 0 ? ~uint64_t{0} : static_cast<uint64_t>(indices[i - 1]);
  return static_cast<uint64_t>(indices[i]) - last - 1;
}

__device__ __forceinline__ int gap_bytes(uint64_t gap) {
  int bytes = 1;
  for (; gap >= 128; gap >>= 7) {
    ++bytes;
  }
  return bytes;
}

// Writes to sizes [segments] the bytes that the gaps of each segment take.
static __global__ void __launch_bounds__(kThreads)
    count_gap_bytes_kernel(const int64_t* __restrict__ indices, int64_t count, int64_t* __restrict__ sizes) {
  for (int64_t s = global_warp(); s * kSegment < count; s += num_warps()) {
    int sum = 0;
    for (int64_t i = s * kSegment + lane_id(); i < min((s + 1) * kSegment, count); i += kWarpSize) {
      sum += gap_bytes(gap_before(indices, i));
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      sizes[s] = sum;
    }
  }
}

static __global__ void __launch_bounds__(kThreads) encode_delta_kernel(
    const int64_t* __restrict__ indices, int64_t count, const int64_t* __restrict__ places,
    uint8_t* __restrict__ bytes) {
  for (int64_t s = global_warp(); s * kSegment < count; s += num_warps()) {
    int64_t place = places[s];
    for (int64_t base = s * kSegment; base < min((s + 1) * kSegment, count); base += kWarpSize) {
      const int64_t i = base + lane_id();
      uint64_t gap = i < count ? gap_before(indices, i) : 0;
      const int size = i < count ? gap_bytes(gap) : 0, through = warp_inclusive_scan(size);
      uint8_t* const to = bytes + place + through - size;
      for (int j = 0; j < size; ++j, gap >>= 7) {
        to[j] = static_cast<uint8_t>((gap & 127u) | (j + 1 < size ? 128u : 0u));
      }
      place += __shfl_sync(kFullMask, through, kWarpSize - 1);
    }
  }
}

// Launches the encoder of a codec whose size does not depend on the data. `out` is at a multiple of 16 bytes.
inline void launch_encode_indices(
    IndexCodec codec, const int64_t* indices, int64_t count, int64_t numel, int64_t index_bytes, uint8_t* out,
    cudaStream_t stream) {
  const int64_t padded = static_cast<int64_t>(aligned(static_cast<uint64_t>(index_bytes)));
  if (padded == 0) {
    return;
  }
  if (codec == IndexCodec::kBitmap) {
    launch(
        over_threads(padded / 4, stream), encode_bitmap_kernel, indices, count, padded / 4,
        reinterpret_cast<uint32_t*>(out));
  } else if (codec == IndexCodec::kU16) {
    const int64_t runs = static_cast<int64_t>(num_runs(static_cast<uint64_t>(numel)));
    const int64_t shorts = (padded - 4 * runs) / 2;
    launch(over_threads(runs + shorts, stream), encode_u16_kernel, indices, count, runs, shorts, out);
  }
}

// Launches the count of gap bytes. Afterwards sizes [segments] holds the place of each segment, total [] the sum.
inline void launch_place_gaps(
    const int64_t* indices, int64_t count, int64_t* sizes, int64_t* total, cudaStream_t stream) {
  launch(over_segments(count, stream), count_gap_bytes_kernel, indices, count, sizes);
  launch_scan_counts(sizes, 1, num_segments(count), total, stream);
}

} // namespace moe_ext::wire
