// Conversions of a tile's rows, compiled once per instruction set.
#include "common/convert.h"
#include "router_linear/router_linear_tables.h"

namespace moe_ext::router_linear::MOE_ISA {
namespace {

template <typename T>
constexpr ConvertKernels<T> kConvertKernels = {widen<T>, narrow<T>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {
    kConvertKernels<float>, kConvertKernels<double>, kConvertKernels<BFloat16>, kConvertKernels<Half>};

} // namespace moe_ext::router_linear::MOE_ISA
