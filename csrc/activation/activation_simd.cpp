// Activation loops of all dtypes but bfloat16, whose loops activation_bf16_simd.cpp has.
#include "activation/activation_loops.h"
#include "activation/activation_math.h"

namespace moe_ext::activation::MOE_ISA {

extern const Loops<BFloat16> bf16_table;

extern const Kernels kernel_table;
const Kernels kernel_table = {
    LoopsOf<Function, float>::kTable, LoopsOf<Function, double>::kTable, bf16_table, LoopsOf<Function, Half>::kTable};

} // namespace moe_ext::activation::MOE_ISA
