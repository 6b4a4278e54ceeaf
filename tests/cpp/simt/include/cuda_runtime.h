// Shadows CUDA's header for the emulation: what a kernel may use, and no more. The list enforces itself, since anything
// else does not compile.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

using cudaStream_t = void*;
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using std::max;
using std::min;

#define threadIdx (::simt::here.thread)
#define blockIdx (::simt::here.block)
#define blockDim (::simt::here.block_size)
#define gridDim (::simt::here.grid_size)

// As a default argument these two name the caller's line.
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMT_SITE) {
  simt::sync_threads({file, line});
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, SIMT_SITE) {
  simt::warp_op(simt::WarpOp::kSync, mask, 0, 0, {file, line});
}

[[noreturn]] inline void __trap(SIMT_SITE) {
  simt::fail("trap", {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
  return static_cast<unsigned>(simt::warp_op(simt::WarpOp::kBallot, mask, predicate != 0, 0, {file, line}));
}

inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}

inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
  return __ballot_sync(mask, predicate, file, line) == mask;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_SITE) {
  return static_cast<unsigned>(simt::warp_op(simt::WarpOp::kMatch, mask, simt::bits<uint64_t>(value), 0, {file, line}));
}

namespace simt {

// `source` is relative to the lane's segment of `width` lanes; outside of it a lane reads itself.
template <typename T>
T shuffle(unsigned mask, T value, int source, bool inside, int width, Site site) {
  const int from = inside ? lane() / width * width + source : lane();
  return bits<T>(warp_op(WarpOp::kShuffle, mask, bits<uint64_t>(value), from, site));
}

} // namespace simt

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
  return simt::shuffle(mask, value, source & (width - 1), true, width, {file, line});
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  const int source = simt::lane() % width - static_cast<int>(delta);
  return simt::shuffle(mask, value, source, source >= 0, width, {file, line});
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  const int source = simt::lane() % width + static_cast<int>(delta);
  return simt::shuffle(mask, value, source, source < width, width, {file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_SITE) {
  const int source = (simt::lane() % width) ^ lanes;
  return simt::shuffle(mask, value, source, source < width, width, {file, line});
}

#define SIMT_ATOMIC(name, expression)                          \
  template <typename T>                                        \
  T name(T* place, std::type_identity_t<T> value, SIMT_SITE) { \
    simt::count_atomic({file, line});                          \
    const T before = *place;                                   \
    *place = expression;                                       \
    return before;                                             \
  }
SIMT_ATOMIC(atomicAdd, before + value)
SIMT_ATOMIC(atomicMax, std::max(before, value))
SIMT_ATOMIC(atomicMin, std::min(before, value))
SIMT_ATOMIC(atomicExch, value)
#undef SIMT_ATOMIC

template <typename T>
T atomicCAS(T* place, std::type_identity_t<T> expected, std::type_identity_t<T> value, SIMT_SITE) {
  simt::count_atomic({file, line});
  const T before = *place;
  *place = before == expected ? value : before;
  return before;
}

template <typename T>
T __ldg(const T* place) {
  return *place;
}

template <typename T>
void __stwb(T* place, T value) {
  *place = value;
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline unsigned __float_as_uint(float x) {
  return simt::bits<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return simt::bits<float>(x);
}
inline long long __double_as_longlong(double x) {
  return simt::bits<long long>(x);
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
