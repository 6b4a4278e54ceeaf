// Plain loops for the vectoriser, compiled once per instruction set.
#include "common/convert.h"
#include "grouped_gemm/grouped_gemm_tables.h"

namespace moe_ext::grouped_gemm::MOE_ISA {
namespace {

template <typename T>
void add(T* __restrict__ sum, const T* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    sum[i] = from_acc<T>(to_acc(sum[i]) + to_acc(x[i]));
  }
}

template <typename T>
constexpr Loops<T> kLoops = {add<T>, widen<T>, narrow<T>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kLoops<float>, kLoops<double>, kLoops<BFloat16>, kLoops<Half>};

} // namespace moe_ext::grouped_gemm::MOE_ISA
