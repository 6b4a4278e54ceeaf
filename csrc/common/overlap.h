// Test whether two tensors share memory: an operator that changes one of them would read what it wrote.
#pragma once

#include <cstdint>

#include "common/check.h"

namespace moe_ext {

// By the bounds of their elements: views of one storage that only interleave count as shared.
inline bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) {
      last += (t.size(i) - 1) * t.stride(i);
    }
    return static_cast<const char*>(t.data_ptr()) + (last + 1) * static_cast<int64_t>(t.element_size());
  };
  return static_cast<const char*>(a.data_ptr()) < end(b) && static_cast<const char*>(b.data_ptr()) < end(a);
}

} // namespace moe_ext
