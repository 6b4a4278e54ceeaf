// The operators of moe_ext._C, called through torch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace moe_ext::runtime {

// Looked for by name once; a call then looks at nothing but the tensors.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

} // namespace moe_ext::runtime
