// Vector accesses: 16 bytes if the addresses and the width of a row allow it, else one element.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace moe_ext {

constexpr int kAccessBytes = 16;

// The machine's type for an access of kBytes: a struct of small members would be moved member by member.
template <int kBytes>
struct AccessOf;
template <>
struct AccessOf<16> {
  using type = uint4;
};
template <>
struct AccessOf<8> {
  using type = uint2;
};
template <>
struct AccessOf<4> {
  using type = uint32_t;
};
template <>
struct AccessOf<2> {
  using type = uint16_t;
};
template <>
struct AccessOf<1> {
  using type = uint8_t;
};
template <int kBytes>
using access_t = typename AccessOf<kBytes>::type;

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vec {
  T v[kSize];
};

template <int kSize, typename T>
__device__ __forceinline__ Vec<T, kSize> load(const T* from) {
  const auto raw = *reinterpret_cast<const access_t<sizeof(T) * kSize>*>(from);
  Vec<T, kSize> value;
  memcpy(&value, &raw, sizeof(value));
  return value;
}

// Loads from global memory that no thread writes during the kernel. If a pointer has come through shared memory, the
// compiler does not know that it points to global memory, and `load` would be generic.
template <int kSize, typename T>
__device__ __forceinline__ Vec<T, kSize> load_global(const T* from) {
  const auto raw = __ldg(reinterpret_cast<const access_t<sizeof(T) * kSize>*>(from));
  Vec<T, kSize> value;
  memcpy(&value, &raw, sizeof(value));
  return value;
}

// Stores to global memory only. __stwb is one store in any case, while the compiler would store two-byte elements four
// bytes at a time.
template <typename T, int kSize>
__device__ __forceinline__ void store(T* to, const Vec<T, kSize>& value) {
  access_t<sizeof(T) * kSize> raw;
  memcpy(&raw, &value, sizeof(value));
  __stwb(reinterpret_cast<access_t<sizeof(T) * kSize>*>(to), raw);
}

// Stores to shared memory, where __stwb would fault, as it addresses global memory.
template <typename T, int kSize>
__device__ __forceinline__ void store_shared(T* to, const Vec<T, kSize>& value) {
  access_t<sizeof(T) * kSize> raw;
  memcpy(&raw, &value, sizeof(value));
  *reinterpret_cast<access_t<sizeof(T) * kSize>*>(to) = raw;
}

MOE_HD bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// Return true if rows of `row_bytes` at all these addresses start at multiples of 16 bytes.
template <typename... Pointers>
bool rows_are_aligned(int64_t row_bytes, const Pointers*... pointers) {
  return row_bytes % kAccessBytes == 0 && (is_aligned(pointers, kAccessBytes) && ...);
}

} // namespace moe_ext
