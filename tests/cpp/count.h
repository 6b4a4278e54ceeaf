// Cases whose instructions are counted under callgrind (tools/count_instructions.py): the AVX2 loops of each family on
// one thread, without torch. A family registers its cases from count_<family>.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/simd.h"

namespace moe_ext::count {

// Called once, with its data prepared before.
using Case = std::pair<std::string, std::function<void()>>;

std::vector<Case> activation_cases();
std::vector<Case> gating_cases();
std::vector<Case> permutation_cases();

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<T> values(n);
  for (T& value : values) {
    // Not a normal_distribution: its numbers are the library's choice.
    value = from_acc<T>(static_cast<acc_t<T>>(generator() * 0x1p-30 - 2.0));
  }
  return values;
}

template <typename T>
const char* dtype_name() {
  return std::is_same_v<T, float> ? "float32" : std::is_same_v<T, BFloat16> ? "bfloat16" : "float16";
}

} // namespace moe_ext::count
