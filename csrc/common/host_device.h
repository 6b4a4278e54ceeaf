// MOE_HD marks functions that both backends compile: kernels call them on the device, CPU loops and tests on the host.
#pragma once

#if defined(__CUDACC__)
#define MOE_HD __host__ __device__ __forceinline__
#else
#define MOE_HD inline
#endif

namespace moe_ext {

template <typename A, typename B>
MOE_HD constexpr A ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

} // namespace moe_ext
