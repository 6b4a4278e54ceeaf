// Prints the compiler and the names of the cases, then runs each through count_case, which callgrind collects and after
// which it dumps: the n-th dump belongs to the n-th name.
#include <cstdio>

#include "count.h"

extern "C" __attribute__((noinline)) void count_case(const std::function<void()>& run) {
  run();
}

int main() {
  std::vector<moe_ext::count::Case> cases;
  for (auto* family :
       {moe_ext::count::activation_cases, moe_ext::count::gating_cases, moe_ext::count::permutation_cases}) {
    for (auto& entry : family()) {
      cases.push_back(std::move(entry));
    }
  }
#if defined(NDEBUG)
  const char* mode = "release";
#else
  const char* mode = "debug";
#endif
#if defined(__clang__)
  std::printf("compiler: %s, %s\n", __VERSION__, mode);
#else
  std::printf("compiler: g++ %s, %s\n", __VERSION__, mode);
#endif
  for (const auto& [name, run] : cases) {
    std::printf("case: %s\n", name.c_str());
    // The first call also pays for the dynamic linker, which looks up what it meets for the first time.
    run();
    count_case(run);
  }
  return 0;
}
