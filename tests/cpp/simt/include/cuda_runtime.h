// Shadows CUDA's header for the emulation: what a kernel may use, and no more. The list enforces itself, since anything
// else does not compile.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "simt.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SIMT_SITE ::simt::Site site = ::simt::Site::current()

using cudaStream_t = void*;
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using std::max, std::min;

namespace simt {
template <typename To, typename From>
To bits(From from) {
  To to{};
  std::memcpy(&to, &from, std::min(sizeof(to), sizeof(from)));
  return to;
}

// The lanes of the mask that give `wanted`.
template <typename T>
unsigned lanes_with(T wanted, const char* op, unsigned mask, T value, SIMT_SITE) {
  const auto& given = exchange({op, mask, bits<uint64_t>(value), site});
  unsigned lanes = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    lanes |= unsigned{given[i] == bits<uint64_t>(wanted)} << i;
  }
  return lanes & mask;
}

// `source` is relative to the lane's segment of `width` lanes; outside of it a lane reads itself.
template <typename T>
T shuffle(const char* op, unsigned mask, T value, int source, int width, Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const auto& given = exchange({op, mask, bits<uint64_t>(value), site});
  const int from = source < 0 || source >= width ? lane : lane / width * width + source;
  if ((mask >> from & 1u) == 0) {
    fail("a shuffle reads lane " + std::to_string(from) + ", which its mask does not name", site);
  }
  return bits<T>(given[from]);
}
} // namespace simt

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, SIMT_SITE) {
  simt::exchange({"__syncwarp", mask, 0, site});
}
#define __syncthreads() ::simt::exchange({"__syncthreads", {}, 0, ::simt::Site::current()})
#define __trap() ::simt::fail("trap", ::simt::Site::current())
#define __ballot_sync(mask, value) ::simt::lanes_with<bool>(true, "__ballot_sync", mask, value)
#define __match_any_sync(mask, value) ::simt::lanes_with(value, "__match_any_sync", mask, value)
#define __any_sync(mask, value) (__ballot_sync(mask, value) != 0)
#define __all_sync(mask, value) (__ballot_sync(mask, value) == (mask))

// `at` is the lane's place in its segment, `by` the third argument.
#define SIMT_SHUFFLE(name, source)                                    \
  template <typename T>                                               \
  T name(unsigned mask, T value, int by, int width = 32, SIMT_SITE) { \
    [[maybe_unused]] const int at = simt::lane % width;               \
    return simt::shuffle(#name, mask, value, source, width, site);    \
  }
SIMT_SHUFFLE(__shfl_sync, (width - 1) & by)
SIMT_SHUFFLE(__shfl_up_sync, at - by)
SIMT_SHUFFLE(__shfl_down_sync, at + by)
SIMT_SHUFFLE(__shfl_xor_sync, at ^ by)

#define SIMT_REDUCE(name, fold)                                                      \
  inline unsigned name(unsigned mask, unsigned value, SIMT_SITE) {                   \
    const auto& given = simt::exchange({#name, mask, value, site});                  \
    for (int i = 0; i < simt::kWarpSize; ++i) {                                      \
      value = mask >> i & 1u ? fold(value, static_cast<unsigned>(given[i])) : value; \
    }                                                                                \
    return value;                                                                    \
  }
SIMT_REDUCE(__reduce_max_sync, std::max)
SIMT_REDUCE(__reduce_min_sync, std::min)

// A thread that spins on atomics would never give way to the others.
#define SIMT_ATOMIC(name, expression)                                                                     \
  template <typename T>                                                                                   \
  T name(T* place, std::type_identity_t<T> value, SIMT_SITE) {                                            \
    if (++simt::num_atomics > 10'000'000) {                                                               \
      simt::fail("deadlock: a thread spins on atomics and waits for nothing that lets others run", site); \
    }                                                                                                     \
    return std::exchange(*place, expression);                                                             \
  }
SIMT_ATOMIC(atomicAdd, *place + value)
SIMT_ATOMIC(atomicMax, std::max(*place, value))
SIMT_ATOMIC(atomicMin, std::min(*place, value))
SIMT_ATOMIC(atomicExch, value)

// Instructions that name global memory: elsewhere they fault on a device.
#define SIMT_STORE(name)                                                 \
  template <typename T>                                                  \
  void name(T* place, const std::type_identity_t<T>& value, SIMT_SITE) { \
    simt::check_global(#name, place, site);                              \
    *place = value;                                                      \
  }
#define SIMT_LOAD(name)                     \
  template <typename T>                     \
  T name(const T* place, SIMT_SITE) {       \
    simt::check_global(#name, place, site); \
    return *place;                          \
  }
SIMT_STORE(__stwb)
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldcs)

#define __popc(x) __builtin_popcount(x)
#define __clz(x) std::countl_zero(unsigned(x))
#define __ffs(x) __builtin_ffs(x)
#define __float_as_uint(x) ::simt::bits<unsigned>(float{x})
#define __uint_as_float(x) ::simt::bits<float>(unsigned{x})
#define __double_as_longlong(x) ::simt::bits<long long>(double{x})
#define __longlong_as_double(x) ::simt::bits<double>(x)
