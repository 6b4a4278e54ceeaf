// Runs a test once for each instruction set that this processor has, by the tables themselves.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "common/cpu_isa.h"

namespace moe_ext::testing {

inline std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    try {
      set_cpu_isa(name);
      names.push_back(name);
    } catch (const std::exception&) {
      // This processor lacks it: the variant is left out, as in the library.
    }
  }
  set_cpu_isa(names.back());
  return names;
}

inline std::vector<float> random_floats(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) {
    value = normal(generator);
  }
  return values;
}

} // namespace moe_ext::testing

// Declares the tables of a family's kernels and `table(isa)` over them.
#if defined(MOE_EXT_X86)
#define MOE_EXT_TABLES(Kernels)                                                                                  \
  namespace portable {                                                                                           \
  extern const Kernels kernel_table;                                                                             \
  }                                                                                                              \
  namespace avx2 {                                                                                               \
  extern const Kernels kernel_table;                                                                             \
  }                                                                                                              \
  namespace avx512 {                                                                                             \
  extern const Kernels kernel_table;                                                                             \
  }                                                                                                              \
  static const Kernels& table(const std::string& isa) {                                                          \
    return isa == "avx512" ? avx512::kernel_table : isa == "avx2" ? avx2::kernel_table : portable::kernel_table; \
  }
#else
#define MOE_EXT_TABLES(Kernels)                     \
  namespace portable {                              \
  extern const Kernels kernel_table;                \
  }                                                 \
  static const Kernels& table(const std::string&) { \
    return portable::kernel_table;                  \
  }
#endif
