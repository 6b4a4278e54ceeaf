#include "common/cpu_isa.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "common/check.h"

namespace moe_ext {
namespace {

bool supported(CpuIsa isa) {
#if defined(MOE_EXT_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return isa == CpuIsa::kPortable || (isa == CpuIsa::kAvx2 && avx2) || (isa == CpuIsa::kAvx512 && avx512);
#else
  return isa == CpuIsa::kPortable;
#endif
}

CpuIsa parse(const std::string& name) {
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (name == to_string(isa)) {
      MOE_CHECK(supported(isa), "cpu_isa: expected MOE_EXT_CPU_ISA to be one that this processor runs, got ", name);
      return isa;
    }
  }
  fail("cpu_isa: expected MOE_EXT_CPU_ISA to be portable, avx2 or avx512, got ", name);
}

CpuIsa initial() {
  const char* forced = std::getenv("MOE_EXT_CPU_ISA");
  if (forced != nullptr && *forced != '\0') {
    return parse(forced);
  }
  return supported(CpuIsa::kAvx512) ? CpuIsa::kAvx512 : supported(CpuIsa::kAvx2) ? CpuIsa::kAvx2 : CpuIsa::kPortable;
}

std::atomic<CpuIsa>& current() {
  static std::atomic<CpuIsa> isa{initial()};
  return isa;
}

} // namespace

const char* to_string(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx2:
      return "avx2";
    default:
      return "portable";
  }
}

CpuIsa cpu_isa() {
  return current().load(std::memory_order_relaxed);
}

void set_cpu_isa(const std::string& name) {
  current().store(parse(name), std::memory_order_relaxed);
}

namespace {

std::string cpu_isa_op() {
  return to_string(cpu_isa());
}

void set_cpu_isa_op(std::string name) {
  set_cpu_isa(name);
}

bool cpu_isa_supported_op(std::string name) {
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (name == to_string(isa)) {
      return supported(isa);
    }
  }
  return false;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ext, m) {
  m.def("_cpu_isa() -> str");
  m.def("_set_cpu_isa(str name) -> ()");
  m.def("_cpu_isa_supported(str name) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  m.impl("_cpu_isa", TORCH_BOX(&cpu_isa_op));
  m.impl("_set_cpu_isa", TORCH_BOX(&set_cpu_isa_op));
  m.impl("_cpu_isa_supported", TORCH_BOX(&cpu_isa_supported_op));
}

} // namespace moe_ext
