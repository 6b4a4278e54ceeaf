// Conversions of a tile's rows, compiled once per instruction set.
#include "router_linear/router_linear_tables.h"

namespace moe_ext::router_linear::MOE_ISA {
namespace {

template <typename T>
void widen(acc_t<T>* __restrict out, const T* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = to_acc(in[i]);
  }
}

template <typename T>
void narrow(T* __restrict out, const acc_t<T>* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_acc<T>(in[i]);
  }
}

template <typename T>
constexpr ConvertKernels<T> kConvertKernels = {widen<T>, narrow<T>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    kConvertKernels<float>, kConvertKernels<double>, kConvertKernels<BFloat16>, kConvertKernels<Half>};

} // namespace moe_ext::router_linear::MOE_ISA
