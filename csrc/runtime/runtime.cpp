// The pybind11 module moe_ext._runtime: objects with a lifetime, one file each, bound to the torch that they are built
// with. What takes and gives tensors alone is an operator and belongs elsewhere,
// but for what Python must be able to raise through.
#include "runtime/runtime.h"

PYBIND11_MODULE(_runtime, module) {
  // The loader compares it with the torch at hand before it trusts a layout of c10d's classes.
  module.attr("torch_version") = MOE_EXT_TORCH_VERSION;
  moe_ext::runtime::bind_autograd(module);
  moe_ext::runtime::bind_ring_exchange(module);
  moe_ext::runtime::bind_routed_experts(module);
  moe_ext::runtime::bind_shared_memory(module);
  moe_ext::runtime::bind_worker(module);
}
