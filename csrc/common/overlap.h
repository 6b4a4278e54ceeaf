// Test for shared memory of two tensors: an operator that writes one of them would read its own results from the other.
#pragma once

#include <cstdint>

#include "common/check.h"

namespace moe_ext {

// Compare the bounds of the elements. Views of one storage that interleave without sharing elements also count as
// shared.
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

// Refuses two arguments that share memory, of which the call writes at least one.
inline void check_apart(
    const char* op, const char* name, const Tensor& x, const char* other_name, const Tensor& other) {
  MOE_CHECK(
      !overlap(x, other), op, ": expected ", name, " to be in memory of its own, got a part of ", other_name, "'s");
}

} // namespace moe_ext
