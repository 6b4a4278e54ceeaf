// The pybind11 module moe_ext._runtime, built for one version of torch. Each file binds a class with a lifetime, or
// functions that Python exceptions must pass through. Any other function from tensors to tensors is an operator and
// belongs elsewhere.
#include "runtime/runtime.h"

PYBIND11_MODULE(_runtime, module) {
  // The loader compares the version with the loaded torch, because c10d's classes have no stable layout.
  module.attr("torch_version") = MOE_EXT_TORCH_VERSION;
  moe_ext::runtime::bind_autograd(module);
  moe_ext::runtime::bind_ring_exchange(module);
  moe_ext::runtime::bind_routed_experts(module);
  moe_ext::runtime::bind_shared_memory(module);
  moe_ext::runtime::bind_worker(module);
}
