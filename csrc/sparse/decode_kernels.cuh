// Decoders of the wire format. Whatever the bytes, nothing is written out of bounds. `wrong` tells the first wrong
// index; the caller must read it before using the indices.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sparse/wire_kernels.cuh"

namespace moe_ext::wire {

// Encoded indices and the results of decoding. Pointers are at multiples of 16 bytes.
struct Encoded {
  const uint8_t* bytes; // [index_bytes]
  int64_t index_bytes;
  int64_t count;
  int64_t numel;
  int64_t* indices;          // [count]
  unsigned long long* wrong; // [], 0 if all are right, otherwise kWrongFrom minus the number of the first wrong index
};

constexpr unsigned long long kWrongFrom = 1ull << 63;

__device__ __forceinline__ void mark_wrong(const Encoded& in, int64_t at) {
  atomicMax(in.wrong, kWrongFrom - static_cast<unsigned long long>(at));
}

// Marks the payload as wrong if it does not hold as many indices as its header says.
static __global__ void check_total_kernel(Encoded in, const uint64_t* __restrict__ total) {
  const int64_t found = static_cast<int64_t>(*total);
  if (found != in.count) {
    mark_wrong(in, min(found, in.count));
  }
}

// Byte i of a bitmap, or 0 beyond its end.
__device__ __forceinline__ uint32_t byte_at(const Encoded& in, int64_t i) {
  return i < in.index_bytes ? in.bytes[i] : 0u;
}

// Writes the number of set bits of each segment to counts [segments].
static __global__ void __launch_bounds__(kThreads) count_bits_kernel(Encoded in, uint64_t* __restrict__ counts) {
  for (int64_t s = global_warp(); s * kSegment < in.index_bytes; s += num_warps()) {
    int sum = 0;
    for (int64_t i = s * kSegment + lane_id(); i < (s + 1) * kSegment; i += kWarpSize) {
      sum += __popc(byte_at(in, i));
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      counts[s] = static_cast<uint64_t>(sum);
    }
  }
}

static __global__ void __launch_bounds__(kThreads)
    decode_bitmap_kernel(Encoded in, const uint64_t* __restrict__ places) {
  for (int64_t s = global_warp(); s * kSegment < in.index_bytes; s += num_warps()) {
    int64_t place = static_cast<int64_t>(places[s]);
    for (int64_t base = s * kSegment; base < (s + 1) * kSegment; base += kWarpSize) {
      uint32_t bits = byte_at(in, base + lane_id());
      const int own = __popc(bits), through = warp_inclusive_scan(own);
      for (int64_t at = place + through - own; bits != 0; bits &= bits - 1, ++at) {
        const int64_t index = 8 * (base + lane_id()) + __ffs(static_cast<int>(bits)) - 1;
        if (at < in.count && index < in.numel) {
          in.indices[at] = index;
        } else {
          mark_wrong(in, at);
        }
      }
      place += __shfl_sync(kFullMask, through, kWarpSize - 1);
    }
  }
}

static __global__ void __launch_bounds__(kThreads)
    load_run_counts_kernel(const uint32_t* __restrict__ counts, int64_t runs, uint64_t* __restrict__ places) {
  for (int64_t run = global_thread(); run < runs; run += num_threads()) {
    places[run] = counts[run];
  }
}

// Decodes codec kU16. places [runs] holds the number of values before each run.
static __global__ void __launch_bounds__(kThreads)
    decode_u16_kernel(Encoded in, int64_t runs, const uint64_t* __restrict__ places) {
  const uint16_t* const offsets = reinterpret_cast<const uint16_t*>(in.bytes + 4 * runs);
  for (int64_t i = global_thread(); i < in.count; i += num_threads()) {
    // The run of value i is the last run that begins at or before i. An empty run begins at the same value as the next.
    const int64_t run = first_from(places, runs, i + 1) - 1;
    const int64_t index = run * kRun + offsets[i];
    const bool first = static_cast<int64_t>(places[run]) == i;
    if (index >= in.numel || (!first && offsets[i] <= offsets[i - 1])) {
      mark_wrong(in, i);
    }
    in.indices[i] = index;
  }
}

__device__ __forceinline__ bool ends_gap(const Encoded& in, int64_t i) {
  return i < in.index_bytes && in.bytes[i] < 128;
}

// Writes the number of gaps that end in each segment to counts [segments].
static __global__ void __launch_bounds__(kThreads) count_gaps_kernel(Encoded in, uint64_t* __restrict__ counts) {
  for (int64_t s = global_warp(); s * kSegment < in.index_bytes; s += num_warps()) {
    int sum = 0;
    for (int64_t i = s * kSegment + lane_id(); i < (s + 1) * kSegment; i += kWarpSize) {
      sum += ends_gap(in, i);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      counts[s] = static_cast<uint64_t>(sum);
    }
    if (s == 0 && lane_id() == 0 && in.bytes[in.index_bytes - 1] >= 128) {
      mark_wrong(in, in.count);
    }
  }
}

// Returns the gap that ends at byte i, or numel if its encoding is wrong.
__device__ __forceinline__ uint64_t read_gap(const Encoded& in, int64_t i) {
  uint64_t gap = in.bytes[i];
  int groups = 1;
  for (int64_t j = i - 1; j >= 0 && in.bytes[j] >= 128; --j) {
    if (++groups > kLongestGap) {
      return static_cast<uint64_t>(in.numel);
    }
    gap = gap << 7 | (in.bytes[j] & 127u);
  }
  // A last group of zero is refused: it would be a second encoding of the same gap.
  return groups > 1 && in.bytes[i] == 0 ? static_cast<uint64_t>(in.numel) : gap;
}

// Writes to indices [count] the step from the previous index to each index: gap + 1.
static __global__ void __launch_bounds__(kThreads) read_gaps_kernel(Encoded in, const uint64_t* __restrict__ places) {
  for (int64_t s = global_warp(); s * kSegment < in.index_bytes; s += num_warps()) {
    int64_t place = static_cast<int64_t>(places[s]);
    for (int64_t base = s * kSegment; base < (s + 1) * kSegment; base += kWarpSize) {
      const int64_t i = base + lane_id();
      const unsigned ends = __ballot_sync(kFullMask, ends_gap(in, i));
      const int64_t at = place + __popc(ends & lanes_below());
      if (ends_gap(in, i) && at < in.count) {
        const uint64_t gap = read_gap(in, i);
        if (gap >= static_cast<uint64_t>(in.numel)) {
          mark_wrong(in, at);
        }
        in.indices[at] = static_cast<int64_t>(gap + 1);
      }
      place += __popc(ends);
    }
  }
}

// Writes the sum of the steps of each segment to sums [segments], modulo 2^64. Wrapping does no harm: the first index
// that leaves the range is far below 2^64, and is marked as wrong.
static __global__ void __launch_bounds__(kThreads) sum_steps_kernel(Encoded in, uint64_t* __restrict__ sums) {
  for (int64_t s = global_warp(); s * kSegment < in.count; s += num_warps()) {
    uint64_t sum = 0;
    for (int64_t i = s * kSegment + lane_id(); i < min((s + 1) * kSegment, in.count); i += kWarpSize) {
      sum += static_cast<uint64_t>(in.indices[i]);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      sums[s] = sum;
    }
  }
}

static __global__ void __launch_bounds__(kThreads)
    sum_to_indices_kernel(Encoded in, const uint64_t* __restrict__ before) {
  for (int64_t s = global_warp(); s * kSegment < in.count; s += num_warps()) {
    uint64_t sum = before[s];
    for (int64_t base = s * kSegment; base < min((s + 1) * kSegment, in.count); base += kWarpSize) {
      const int64_t i = base + lane_id();
      const uint64_t step = i < in.count ? static_cast<uint64_t>(in.indices[i]) : 0;
      const uint64_t through = warp_inclusive_scan(step), index = sum + through - 1;
      if (i < in.count) {
        if (index >= static_cast<uint64_t>(in.numel)) {
          mark_wrong(in, i);
        }
        in.indices[i] = static_cast<int64_t>(index);
      }
      sum += __shfl_sync(kFullMask, through, kWarpSize - 1);
    }
  }
}

// Size of the scratch memory of launch_decode_indices in uint64; it must begin as zeros.
inline int64_t num_decode_longs(IndexCodec codec, int64_t index_bytes, int64_t count, int64_t numel) {
  const int64_t runs = static_cast<int64_t>(num_runs(static_cast<uint64_t>(numel)));
  return 1 + (codec == IndexCodec::kU16 ? runs : num_segments(index_bytes) + num_segments(count));
}

inline void launch_decode_indices(IndexCodec codec, const Encoded& in, uint64_t* scratch, cudaStream_t stream) {
  uint64_t *const total = scratch, *const places = scratch + 1;
  if (codec == IndexCodec::kDense || in.index_bytes == 0) {
    return;
  }
  const Launch per_segment = over_segments(in.index_bytes, stream);
  int64_t parts = num_segments(in.index_bytes);
  if (codec == IndexCodec::kU16) {
    parts = static_cast<int64_t>(num_runs(static_cast<uint64_t>(in.numel)));
    launch(
        over_threads(parts, stream), load_run_counts_kernel, reinterpret_cast<const uint32_t*>(in.bytes), parts,
        places);
  } else {
    launch(per_segment, codec == IndexCodec::kBitmap ? count_bits_kernel : count_gaps_kernel, in, places);
  }
  launch_scan_counts(places, 1, parts, total, stream);
  launch({Dim3(1), Dim3(1), 0, stream}, check_total_kernel, in, total);
  if (codec == IndexCodec::kBitmap) {
    launch(per_segment, decode_bitmap_kernel, in, places);
  } else if (codec == IndexCodec::kU16) {
    launch(over_threads(in.count, stream), decode_u16_kernel, in, parts, places);
  } else {
    launch(per_segment, read_gaps_kernel, in, places);
    uint64_t* const sums = places + parts;
    launch(over_segments(in.count, stream), sum_steps_kernel, in, sums);
    launch_scan_counts(sums, 1, num_segments(in.count), nullptr, stream);
    launch(over_segments(in.count, stream), sum_to_indices_kernel, in, sums);
  }
}

} // namespace moe_ext::wire
