// A plain loop for the vectoriser, compiled once per instruction set.
#include "grouped_gemm/grouped_gemm_tables.h"

namespace moe_ext::grouped_gemm::MOE_ISA {
namespace {

template <typename T>
void add(T* __restrict__ sum, const T* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    sum[i] = from_acc<T>(to_acc(sum[i]) + to_acc(x[i]));
  }
}

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {{add<float>}, {add<double>}, {add<BFloat16>}, {add<Half>}};

} // namespace moe_ext::grouped_gemm::MOE_ISA
