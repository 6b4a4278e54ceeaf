// Choice of the compiled variant of the SIMD loops that this process runs.
#pragma once

#include <string>

namespace moe_ext {

enum class CpuIsa { kPortable, kAvx2, kAvx512 };

// Return the best variant that this processor runs, or the one that MOE_EXT_CPU_ISA or set_cpu_isa names.
CpuIsa cpu_isa();

// Set the variant. Throws if the name is unknown or the processor cannot run it. For tests and benchmarks; not
// thread-safe.
void set_cpu_isa(const std::string& name);

const char* to_string(CpuIsa isa);

// Pick a family's table of loops: `return select_isa(portable::kernels, avx2::kernels, avx512::kernels)`.
template <typename Kernels>
const Kernels& select_isa(const Kernels& portable, const Kernels& avx2, const Kernels& avx512) {
  switch (cpu_isa()) {
    case CpuIsa::kAvx512:
      return avx512;
    case CpuIsa::kAvx2:
      return avx2;
    default:
      return portable;
  }
}

} // namespace moe_ext

// Declares the tables of a family, and defines `const Kernels& kernels()`, which returns the table of the chosen
// variant.
#if defined(MOE_EXT_X86)
#define MOE_EXT_SELECT_KERNELS(Kernels)                                                             \
  namespace portable {                                                                              \
  extern const Kernels kernel_table;                                                                \
  }                                                                                                 \
  namespace avx2 {                                                                                  \
  extern const Kernels kernel_table;                                                                \
  }                                                                                                 \
  namespace avx512 {                                                                                \
  extern const Kernels kernel_table;                                                                \
  }                                                                                                 \
  static const Kernels& kernels() {                                                                 \
    return ::moe_ext::select_isa(portable::kernel_table, avx2::kernel_table, avx512::kernel_table); \
  }
#else
#define MOE_EXT_SELECT_KERNELS(Kernels) \
  namespace portable {                  \
  extern const Kernels kernel_table;    \
  }                                     \
  static const Kernels& kernels() {     \
    return portable::kernel_table;      \
  }
#endif
