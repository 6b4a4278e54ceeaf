// Blocks: a warp reads or moves a slice of up to 8 KB of a block, 16 bytes at a time if the addresses allow it.
// Rows: the permutation's stable sort orders the rows by index, one byte of the index at a time. A scan numbers the
// groups of equal indices. A thread adds the rows of a group in their order, for as many columns as 16 bytes hold.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/scan.cuh"
#include "common/simd.h"
#include "common/vec.cuh"
#include "permutation/permutation_kernels.cuh"

namespace moe_ext::sparse_blocks {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kSliceBytes = 8192;

inline Launch over_warps(int64_t warps, cudaStream_t stream) {
  return {persistent_grid(ceil_div(warps, int64_t{kWarps}), kThreads, device_properties()), Dim3(kThreads), 0, stream};
}

inline Launch over_threads(int64_t threads, cudaStream_t stream) {
  return {
      persistent_grid(ceil_div(threads, int64_t{kThreads}), kThreads, device_properties()), Dim3(kThreads), 0, stream};
}

__device__ __forceinline__ int64_t global_thread() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t num_threads() {
  return int64_t{gridDim.x} * kThreads;
}

// Division of `total` bytes into blocks of `block` bytes (the last may be shorter), and of blocks into slices of a
// warp.
struct Slices {
  int64_t block;
  int64_t total;
  int64_t per_block;
};

inline Slices make_slices(int64_t block, int64_t total) {
  return {block, total, ceil_div(std::min(block, std::max<int64_t>(total, 1)), kSliceBytes)};
}

// Calls f with the type of access for all blocks: 16 bytes if sizes and addresses allow it, otherwise one element.
template <typename F, typename... Pointers>
void with_access(int64_t element, int64_t block, int64_t total, F&& f, const Pointers*... pointers) {
  if (total % kAccessBytes == 0 && rows_are_aligned(block, pointers...)) {
    f.template operator()<uint4>();
  } else if (element == 8) {
    f.template operator()<uint64_t>();
  } else if (element == 4) {
    f.template operator()<uint32_t>();
  } else {
    f.template operator()<uint16_t>();
  }
}

__device__ __forceinline__ bool any_bit(const uint4& x, uint64_t signs) {
  const uint32_t low = static_cast<uint32_t>(~signs), high = static_cast<uint32_t>(~signs >> 32);
  return (((x.x | x.z) & low) | ((x.y | x.w) & high)) != 0;
}

template <typename Word>
__device__ __forceinline__ bool any_bit(Word x, uint64_t signs) {
  return (x & static_cast<Word>(~signs)) != 0;
}

// Sets flags [blocks] to 1 for blocks with any bit other than a sign bit. `flags` must begin as zeros.
template <typename Word>
__global__ void __launch_bounds__(kThreads) flag_blocks_kernel(
    const Word* __restrict__ x, Slices slices, int64_t num_blocks, uint64_t signs, int* __restrict__ flags) {
  for (int64_t unit = int64_t{blockIdx.x} * kWarps + warp_id(); unit < num_blocks * slices.per_block;
       unit += int64_t{gridDim.x} * kWarps) {
    const int64_t block = unit / slices.per_block, begin = block * slices.block;
    const int64_t first = begin + unit % slices.per_block * kSliceBytes;
    const int64_t end = min(min(begin + slices.block, slices.total), first + kSliceBytes);
    bool any = false;
    for (int64_t at = first / static_cast<int64_t>(sizeof(Word)) + lane_id();
         at < end / static_cast<int64_t>(sizeof(Word)); at += kWarpSize) {
      any = any || any_bit(x[at], signs);
    }
    if (__any_sync(kFullMask, any) && lane_id() == 0) {
      atomicMax(&flags[block], 1);
    }
  }
}

// Packs eight flags into each byte of the bitmap.
static __global__ void __launch_bounds__(kThreads)
    pack_flags_kernel(const int* __restrict__ flags, int64_t num_blocks, uint8_t* __restrict__ bitmap) {
  for (int64_t byte = global_thread(); byte < ceil_div(num_blocks, int64_t{8}); byte += num_threads()) {
    uint32_t bits = 0;
    for (int j = 0; j < 8 && 8 * byte + j < num_blocks; ++j) {
      bits |= static_cast<uint32_t>(flags[8 * byte + j]) << j;
    }
    bitmap[byte] = static_cast<uint8_t>(bits);
  }
}

inline void launch_nonzero_blocks(
    const void* x, int64_t element, int64_t numel, int64_t block, int* flags, uint8_t* bitmap, cudaStream_t stream) {
  const int64_t num_blocks = ceil_div(numel, block);
  const Slices slices = make_slices(std::min(block, numel) * element, numel * element);
  const uint64_t signs = element == 8 ? 0x8000000000000000u : element == 4 ? 0x8000000080000000u : 0x8000800080008000u;
  with_access(
      element, slices.block, slices.total,
      [&]<typename Word>() {
        launch(
            over_warps(num_blocks * slices.per_block, stream), flag_blocks_kernel<Word>, static_cast<const Word*>(x),
            slices, num_blocks, signs, flags);
      },
      static_cast<const uint8_t*>(x));
  launch(over_threads(ceil_div(num_blocks, int64_t{8}), stream), pack_flags_kernel, flags, num_blocks, bitmap);
}

// Copies block idx[i] of `dense` to row i of `packed`, with zeros beyond the end of `dense`, or back. With kCheck, an
// index that is out of range, or not ascending in a scatter, traps. Otherwise one out of range gathers zeros or
// scatters nothing.
template <bool kGather, bool kCheck, typename Word>
__global__ void __launch_bounds__(kThreads) move_blocks_kernel(
    Word* __restrict__ dense, Word* __restrict__ packed, const int64_t* __restrict__ idx, int64_t count,
    int64_t num_blocks, Slices slices) {
  constexpr int64_t kSize = sizeof(Word);
  for (int64_t unit = int64_t{blockIdx.x} * kWarps + warp_id(); unit < count * slices.per_block;
       unit += int64_t{gridDim.x} * kWarps) {
    const int64_t row = unit / slices.per_block, block = idx[row];
    const bool inside = block >= 0 && block < num_blocks;
    if constexpr (kCheck) {
      if (!inside || (!kGather && row > 0 && idx[row - 1] >= block)) {
        __trap();
      }
    }
    const int64_t begin = unit % slices.per_block * (kSliceBytes / kSize);
    const int64_t end = min(slices.block / kSize, begin + kSliceBytes / kSize);
    const int64_t left = inside ? slices.total / kSize - block * (slices.block / kSize) : 0;
    for (int64_t i = begin + lane_id(); i < end; i += kWarpSize) {
      Word* const to = packed + row * (slices.block / kSize) + i;
      Word* const from = dense + block * (slices.block / kSize) + i;
      if constexpr (kGather) {
        *to = i < left ? *from : Word{};
      } else if (i < left) {
        *from = *to;
      }
    }
  }
}

template <bool kGather, bool kCheck>
void launch_move_blocks(
    void* dense, void* packed, const int64_t* idx, int64_t count, int64_t element, int64_t numel, int64_t block,
    cudaStream_t stream) {
  if (count == 0 || block == 0) {
    return;
  }
  // Rows of `packed` are whole blocks even if `dense` is shorter than a block, so make_slices does not fit here.
  const Slices slices{block * element, numel * element, ceil_div(block * element, kSliceBytes)};
  with_access(
      element, slices.block, slices.total,
      [&]<typename Word>() {
        launch(
            over_warps(count * slices.per_block, stream), move_blocks_kernel<kGather, kCheck, Word>,
            static_cast<Word*>(dense), static_cast<Word*>(packed), idx, count, numel / block + (numel % block != 0),
            slices);
      },
      static_cast<const uint8_t*>(dense), static_cast<const uint8_t*>(packed));
}

constexpr int kIndexDigits = 256;

// Writes to digits [N] the byte at `shift` of each row's index, in the order so far, or -1 for a row that is left out.
// An index outside of [-1, num_rows) traps with kCheck; otherwise the row is left out.
template <bool kCheck>
__global__ void __launch_bounds__(kThreads) index_digits_kernel(
    const int64_t* __restrict__ idx, const int64_t* __restrict__ order, int64_t size, int64_t num_rows, int shift,
    int* __restrict__ digits) {
  for (int64_t i = global_thread(); i < size; i += num_threads()) {
    const int64_t row = order == nullptr ? i : order[i], index = row < 0 ? -1 : idx[row];
    if constexpr (kCheck) {
      if (index < -1 || index >= num_rows) {
        __trap();
      }
    }
    const bool inside = index >= 0 && index < num_rows;
    digits[i] = inside ? static_cast<int>(index >> shift & (kIndexDigits - 1)) : -1;
  }
}

// Sets next [N] to order[slot_of_row], or -1 for an empty slot. `next` must not be `order`.
static __global__ void __launch_bounds__(kThreads) compose_order_kernel(
    const int64_t* __restrict__ order, const int64_t* __restrict__ slot_of_row, int64_t size,
    int64_t* __restrict__ next) {
  for (int64_t i = global_thread(); i < size; i += num_threads()) {
    const int64_t slot = slot_of_row[i];
    next[i] = slot < 0 || order == nullptr ? slot : order[slot];
  }
}

// Sets heads [N] to 1 for the first row of each group of equal indices, and to 0 otherwise.
static __global__ void __launch_bounds__(kThreads) mark_heads_kernel(
    const int64_t* __restrict__ idx, const int64_t* __restrict__ order, int64_t size, int64_t* __restrict__ heads) {
  for (int64_t i = global_thread(); i < size; i += num_threads()) {
    heads[i] = order[i] >= 0 && (i == 0 || idx[order[i - 1]] != idx[order[i]]);
  }
}

// Scratch memory of sum_rows for N rows.
struct RowSort {
  int64_t* order;       // [N]
  int64_t* other_order; // [N]
  int64_t* groups;      // [N], number of groups that begin before each row of the order
  int64_t* num_groups;  // []
  int* digits;          // [N]
  permutation::Tables tables;
  void* sort; // workspace of the sort, tables_workspace_bytes(plan_rows(N), false)
};

inline permutation::SortPlan plan_rows(int64_t size) {
  return permutation::plan_sort(static_cast<int>(size), kIndexDigits, device_properties());
}

// Fills `groups` and `num_groups`. Returns the order of the rows by index, in `order` or `other_order`; for rows that
// are left out, its end holds -1.
template <bool kCheck>
const int64_t* launch_sort_rows(
    const int64_t* idx, int64_t size, int64_t num_rows, const RowSort& scratch, cudaStream_t stream) {
  const Launch per_row = over_threads(size, stream);
  const int64_t* order = nullptr;
  int64_t *next = scratch.order, *spare = scratch.other_order;
  for (int shift = 0; shift == 0 || (shift < 64 && (num_rows - 1) >> shift > 0); shift += 8) {
    launch(per_row, index_digits_kernel<kCheck>, idx, order, size, num_rows, shift, scratch.digits);
    permutation::launch_build_tables<false>(
        scratch.digits, static_cast<const float*>(nullptr), plan_rows(size), INT64_MAX, int64_t{1}, scratch.sort,
        scratch.tables, stream);
    launch(per_row, compose_order_kernel, order, scratch.tables.slot_of_row, size, next);
    order = next;
    std::swap(next, spare);
  }
  launch(per_row, mark_heads_kernel, idx, order, size, scratch.groups);
  launch_scan_counts(scratch.groups, 1, size, scratch.num_groups, stream);
  return order;
}

// Writes unique [U] and begins [U + 1], given the scanned heads.
static __global__ void __launch_bounds__(kThreads) place_groups_kernel(
    const int64_t* __restrict__ idx, const int64_t* __restrict__ order, const int64_t* __restrict__ groups,
    int64_t size, int64_t num_groups, int64_t* __restrict__ unique, int64_t* __restrict__ begins) {
  for (int64_t i = global_thread(); i < size; i += num_threads()) {
    const int64_t group = groups[i], after = i + 1 < size ? groups[i + 1] : num_groups;
    if (order[i] >= 0 && after > group) {
      unique[group] = idx[order[i]];
      begins[group] = i;
    }
    // Rows that are left out come last, so the last group ends before the first of them.
    if (order[i] >= 0 && (i + 1 == size || order[i + 1] < 0)) {
      begins[num_groups] = i + 1;
    }
  }
}

// Adds the rows of a group, kSize columns per thread. Eight rows are loaded before they are added, to hide latency.
template <int kSize, typename T>
__global__ void __launch_bounds__(kThreads) sum_groups_kernel(
    const T* __restrict__ rows, const int64_t* __restrict__ order, const int64_t* __restrict__ begins,
    int64_t num_groups, int64_t dim, T* __restrict__ out) {
  constexpr int kAhead = 8;
  const int64_t columns = ceil_div(dim, int64_t{kSize});
  for (int64_t i = global_thread(); i < num_groups * columns; i += num_threads()) {
    const int64_t group = i / columns, column = i % columns * kSize;
    acc_t<T> sum[kSize] = {};
    for (int64_t first = begins[group]; first < begins[group + 1]; first += kAhead) {
      Vec<T, kSize> ahead[kAhead];
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        if (first + r < begins[group + 1]) {
          ahead[r] = load<kSize>(rows + order[first + r] * dim + column);
        }
      }
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        if (first + r < begins[group + 1]) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            sum[j] += to_acc(ahead[r].v[j]);
          }
        }
      }
    }
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      result.v[j] = from_acc<T>(sum[j]);
    }
    store(out + group * dim + column, result);
  }
}

template <typename T>
void launch_sum_groups(
    const T* rows, const int64_t* order, const int64_t* begins, int64_t num_groups, int64_t dim, T* out,
    cudaStream_t stream) {
  constexpr int kSize = kAccessBytes / static_cast<int>(sizeof(T));
  const bool aligned = rows_are_aligned(dim * static_cast<int64_t>(sizeof(T)), rows, out);
  const int64_t columns = aligned ? dim / kSize : dim;
  const auto kernel = aligned ? sum_groups_kernel<kSize, T> : sum_groups_kernel<1, T>;
  if (num_groups * columns > 0) {
    launch(over_threads(num_groups * columns, stream), kernel, rows, order, begins, num_groups, dim, out);
  }
}

} // namespace moe_ext::sparse_blocks
