// Packing by mask. A block handles a tile of 8192 elements, and each thread holds one word of the tile's bitmap. The
// marks of all tiles are counted and summed first, so that a block knows the place of each of its words. A warp moves
// the 32 elements of a word together, so that its accesses are coalesced.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/expert_bounds.cuh"
#include "common/scan.cuh"
#include "common/simd.h"
#include "common/threads.cuh"

namespace moe_ext::mask {

constexpr int64_t kWord = 32;
constexpr int64_t kTile = kThreads * kWord; // elements of a tile

inline int64_t num_tiles(int64_t numel) {
  return ceil_div(numel, kTile);
}

// Marks of the kWord elements of a word; marks past the last element are dropped, or trap with kCheck. The word is read
// by bytes, because a bitmap may begin at any address.
template <bool kCheck>
__device__ __forceinline__ uint32_t word_at(const uint8_t* __restrict__ bitmap, int64_t numel, int64_t word) {
  const int64_t left = numel - word * kWord;
  uint32_t bits = 0;
  for (int64_t byte = 0; byte < 4 && 8 * byte < left; ++byte) {
    bits |= uint32_t{bitmap[4 * word + byte]} << (8 * byte);
  }
  const uint32_t inside = left >= kWord ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
  if constexpr (kCheck) {
    if ((bits & ~inside) != 0) {
      __trap();
    }
  }
  return bits & inside;
}

// Writes the number of marks of each tile to counts [tiles].
template <bool kCheck>
__global__ void __launch_bounds__(kThreads)
    count_marks_kernel(const uint8_t* __restrict__ bitmap, int64_t numel, int64_t* __restrict__ counts) {
  for (int64_t tile = blockIdx.x; tile * kTile < numel; tile += gridDim.x) {
    int total = 0;
    block_exclusive_scan<kThreads>(__popc(word_at<kCheck>(bitmap, numel, tile * kThreads + threadIdx.x)), total);
    if (threadIdx.x == 0) {
      counts[tile] = total;
    }
  }
}

// Copies marked elements from x [numel] to packed [size], or back. counts [tiles + 1] holds the number of marks before
// each tile, and last the number of all marks. If that is not `size`, kCheck traps; otherwise accesses stay within
// `packed`.
template <bool kPack, bool kCheck, typename Bits>
__global__ void __launch_bounds__(kThreads) move_masked_kernel(
    Bits* __restrict__ x, Bits* __restrict__ packed, int64_t size, const uint8_t* __restrict__ bitmap, int64_t numel,
    const int64_t* __restrict__ counts) {
  if constexpr (kCheck) {
    if (counts[ceil_div(numel, kTile)] != size) {
      __trap();
    }
  }
  for (int64_t tile = blockIdx.x; tile * kTile < numel; tile += gridDim.x) {
    const uint32_t own = word_at<false>(bitmap, numel, tile * kThreads + threadIdx.x);
    int total = 0;
    const int below = block_exclusive_scan<kThreads>(__popc(own), total);
    const int64_t start = tile * kTile + int64_t{warp_id()} * kWarpSize * kWord;
#pragma unroll 8
    for (int w = 0; w < kWarpSize; ++w) {
      const uint32_t word = __shfl_sync(kFullMask, own, w);
      const int64_t place = counts[tile] + __shfl_sync(kFullMask, below, w) + __popc(word & lanes_below());
      const int64_t i = start + w * kWord + lane_id();
      const bool marked = (word >> lane_id() & 1u) != 0 && place < size;
      if constexpr (kPack) {
        if (marked) {
          packed[place] = x[i];
        }
      } else if (i < numel) {
        x[i] = marked ? packed[place] : Bits{0};
      }
    }
  }
}

// Sets a bit of `bitmap` if any bit of the element is set.
template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    pack_bits_kernel(const Bits* __restrict__ x, int64_t numel, uint8_t* __restrict__ bitmap) {
  for (int64_t tile = blockIdx.x; tile * kTile < numel; tile += gridDim.x) {
    const int64_t start = tile * kTile + int64_t{warp_id()} * kWarpSize * kWord;
    uint32_t own = 0;
#pragma unroll 8
    for (int w = 0; w < kWarpSize; ++w) {
      const int64_t i = start + w * kWord + lane_id();
      const uint32_t word = __ballot_sync(kFullMask, i < numel && x[i] != 0);
      own = w == lane_id() ? word : own;
    }
    const int64_t first = start + lane_id() * kWord;
    for (int64_t byte = 0; byte < 4 && first + 8 * byte < numel; ++byte) {
      bitmap[first / 8 + byte] = static_cast<uint8_t>(own >> (8 * byte));
    }
  }
}

constexpr int kSums = 16;
constexpr int kTokens = 4; // tokens of half a warp

// Writes the number of marks of each row of `row_bytes` bytes to counts [num_rows]. A warp counts a row.
static __global__ void __launch_bounds__(kThreads) count_rows_kernel(
    const uint8_t* __restrict__ bitmap, int64_t num_rows, int64_t row_bytes, int64_t* __restrict__ counts) {
  for (int64_t row = global_thread() / kWarpSize; row < num_rows; row += num_threads() / kWarpSize) {
    int count = 0;
    for (int64_t byte = lane_id(); byte < row_bytes; byte += kWarpSize) {
      count += __popc(uint32_t{bitmap[row * row_bytes + byte]});
    }
    count = warp_sum(count);
    if (lane_id() == 0) {
      counts[row] = count;
    }
  }
}

template <typename T>
struct MaskedProduct {
  const T* x;            // [num_tokens, dim]
  const T* values;       // [size]
  const uint8_t* bitmap; // [num_rows, dim / 8]
  const int64_t* first;  // [num_rows + 1], the number of marks before each row, and last of all marks
  T* out;                // [num_tokens, num_rows]; with E experts [num_tokens, num_rows / E]
  int64_t num_tokens, dim, num_rows, size;
  ExpertBounds experts = {}; // bounds of the tokens of each expert; if empty, all tokens are multiplied with all rows
};

// A warp multiplies one row with eight tokens, or with the tokens of the row's expert, eight at a time. Each half of
// the warp has four of the tokens; its sixteen lanes correspond to the sixteen sums of the CPU.
template <bool kCheck, typename T>
__global__ void __launch_bounds__(kThreads) masked_mm_kernel(MaskedProduct<T> p) {
  const RowTokens<2 * kTokens> of(p.experts, p.num_rows, p.num_tokens);
  const int64_t row_bytes = p.dim / 8;
  if constexpr (kCheck) {
    if (p.first[p.num_rows] != p.size) {
      __trap();
    }
  }
  for (int64_t unit = global_thread() / kWarpSize; unit < of.num_units(); unit += num_threads() / kWarpSize) {
    const int64_t row = of.row(unit), last = of.template end<kCheck>(unit);
    for (int64_t begin = of.begin(unit); begin < last; begin += 2 * kTokens) {
      const int64_t first_token = begin + lane_id() / kSums * kTokens;
      const int lane = lane_id() % kSums;
      const T* tokens[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        // Tokens beyond the last one read the last one again, and are not written.
        tokens[t] = p.x + min(first_token + t, last - 1) * p.dim;
      }
      float sums[kTokens] = {};
      int64_t place = p.first[row];
      for (int64_t byte = 0; byte < row_bytes; byte += 2) {
        const uint8_t* const at = p.bitmap + row * row_bytes + byte;
        const uint32_t marks = at[0] | (byte + 1 < row_bytes ? uint32_t{at[1]} << 8 : 0u);
        const int64_t own = place + __popc(marks & ((1u << lane) - 1u));
        // Pruned elements are skipped: zero times an infinite element of a token would be NaN.
        if ((marks >> lane & 1u) != 0 && own < p.size) {
          const float value = to_acc(p.values[own]);
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
            sums[t] += value * to_acc(tokens[t][8 * byte + lane]);
          }
        }
        place += __popc(marks);
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float sum = 0;
#pragma unroll
        for (int from = 0; from < kSums; ++from) {
          sum += __shfl_sync(kFullMask, sums[t], from, kSums);
        }
        if (lane == t && first_token + t < last) {
          p.out[(first_token + t) * of.rows_each() + row % of.rows_each()] = from_acc<T>(sum);
        }
      }
    }
  }
}

// Launches the product. counts [num_rows + 1] is scratch memory, to which `p.first` must point.
template <bool kCheck, typename T>
void launch_masked_mm(const MaskedProduct<T>& p, int64_t* counts, cudaStream_t stream) {
  if (p.num_rows > 0 && p.num_tokens > 0) {
    launch(over_threads(p.num_rows * kWarpSize, stream), count_rows_kernel, p.bitmap, p.num_rows, p.dim / 8, counts);
    launch_scan_counts(counts, 1, p.num_rows, counts + p.num_rows, stream);
    const int64_t warps = RowTokens<2 * kTokens>(p.experts, p.num_rows, p.num_tokens).num_units();
    launch(over_threads(warps * kWarpSize, stream), masked_mm_kernel<kCheck, T>, p);
  }
}

inline Launch over_tiles(int64_t numel, cudaStream_t stream) {
  return {persistent_grid(num_tiles(numel), kThreads, device_properties()), Dim3(kThreads), 0, stream};
}

template <typename Bits>
void launch_pack_bits(const Bits* x, int64_t numel, uint8_t* bitmap, cudaStream_t stream) {
  if (numel > 0) {
    launch(over_tiles(numel, stream), pack_bits_kernel<Bits>, x, numel, bitmap);
  }
}

// Launches the copy between x and packed. counts [num_tiles(numel) + 1] is scratch memory.
template <bool kPack, bool kCheck, typename Bits>
void launch_move_masked(
    Bits* x, Bits* packed, int64_t size, const uint8_t* bitmap, int64_t numel, int64_t* counts, cudaStream_t stream) {
  if (numel > 0) {
    const Launch grid = over_tiles(numel, stream);
    launch(grid, count_marks_kernel<kCheck>, bitmap, numel, counts);
    launch_scan_counts(counts, 1, num_tiles(numel), counts + num_tiles(numel), stream);
    launch(grid, move_masked_kernel<kPack, kCheck, Bits>, x, packed, size, bitmap, numel, counts);
  }
}

} // namespace moe_ext::mask
