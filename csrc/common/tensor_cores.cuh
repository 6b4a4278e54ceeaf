// Tensor cores from compute capability 8.0 on: products of 16-bit matrices with float32 sums, loads that lay out their
// operands, and asynchronous copies to shared memory. All lanes of a warp must call them together. The tests replace
// this file by an emulation (tests/cpp/simt), because a C++ compiler does not read PTX.
#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace moe_ext {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define MOE_TENSOR_CORES(...) __trap()
#else
#define MOE_TENSOR_CORES(...) asm volatile(__VA_ARGS__)
#endif

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Starts a copy of 16 bytes. If not `real`, fills 16 bytes with zeros and reads nothing.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool real) {
  const int bytes = real ? 16 : 0;
  MOE_TENSOR_CORES(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
      "r"(bytes) : "memory");
}

// Ends this thread's current group of copies.
__device__ __forceinline__ void commit_copies() {
  MOE_TENSOR_CORES("cp.async.commit_group;\n" :: : "memory");
}

// Waits for this thread's groups of copies except the last kPending. Other threads see the copies after a barrier.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  MOE_TENSOR_CORES("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Loads four matrices of 8 x 8 elements. Lane l passes the address of row l % 8 of matrix l / 8. Of each matrix, or of
// its transpose, it gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  if constexpr (kTransposed) {
    MOE_TENSOR_CORES(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(to[0]), "=r"(to[1]),
        "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
  } else {
    MOE_TENSOR_CORES(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]),
        "=r"(to[3]) : "r"(shared_address(row)) : "memory");
  }
}

// c [16, 8] += a [16, 16] b [16, 8]: mma.m16n8k16. Let g = lane / 4 and t = 2 (lane % 4). A thread's registers hold
// a: rows g, g + 8, g, g + 8 at columns t, t, t + 8, t + 8, each with the next column;
// b: rows t, t + 8, each with the next row, of column g;
// c: rows g, g, g + 8, g + 8 at columns t, t + 1, t, t + 1.
template <typename T>
__device__ __forceinline__ void multiply_add(
    float& c0, float& c1, float& c2, float& c3, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>);
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    MOE_TENSOR_CORES(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n" : "+f"(c0),
        "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    MOE_TENSOR_CORES(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n" : "+f"(c0),
        "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

#undef MOE_TENSOR_CORES

} // namespace moe_ext
