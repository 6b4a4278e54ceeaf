// Calls of the operators of moe_ext._C through torch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace moe_ext::runtime {

// Find an operator by name. Callers keep the handle in a static variable, so that a call does no lookup by name.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

} // namespace moe_ext::runtime
