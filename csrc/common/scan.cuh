// Exclusive sums of long arrays of counts. One block walks over one array.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/block.cuh"

namespace moe_ext {

constexpr int kScanThreads = 512;
constexpr int kScanItems = 8; // neighbouring counts that a thread sums

// counts [arrays, n], in place; totals [arrays] or null. One block for each array.
template <typename T>
__global__ void __launch_bounds__(kScanThreads)
    scan_counts_kernel(T* __restrict__ counts, int64_t n, T* __restrict__ totals) {
  T* const array = counts + int64_t{blockIdx.x} * n;
  T carry = 0;
  for (int64_t base = 0; base < n; base += int64_t{kScanThreads} * kScanItems) {
    const int64_t first = base + int64_t{threadIdx.x} * kScanItems;
    T items[kScanItems];
    T sum = 0;
    for (int j = 0; j < kScanItems; ++j) {
      items[j] = first + j < n ? array[first + j] : 0;
      sum += items[j];
    }
    T total = 0;
    T below = carry + block_exclusive_scan<kScanThreads>(sum, total);
    for (int j = 0; j < kScanItems; ++j) {
      if (first + j < n) {
        array[first + j] = below;
      }
      below += items[j];
    }
    carry += total;
  }
  if (totals != nullptr && threadIdx.x == 0) {
    totals[blockIdx.x] = carry;
  }
}

template <typename T>
void launch_scan_counts(T* counts, int64_t arrays, int64_t n, std::type_identity_t<T>* totals, cudaStream_t stream) {
  if (arrays > 0) {
    launch({Dim3(arrays), Dim3(kScanThreads), 0, stream}, scan_counts_kernel<T>, counts, n, totals);
  }
}

} // namespace moe_ext
