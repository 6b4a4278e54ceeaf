// Functions by which each file adds its bindings to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace moe_ext::runtime {

void bind_autograd(pybind11::module_& module);
void bind_ring_exchange(pybind11::module_& module);
void bind_routed_experts(pybind11::module_& module);
void bind_shared_memory(pybind11::module_& module);
void bind_worker(pybind11::module_& module);

} // namespace moe_ext::runtime
