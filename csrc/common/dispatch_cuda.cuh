// Dispatch from a tensor's dtype to the scalar type of the kernels, and the checks that only CUDA needs.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/expert_bounds.cuh"
#include "common/expert_offsets.h"

namespace moe_ext {

// Builds with MOE_EXT_CUDA_CHECKS trap on an index out of range, which CPU operators refuse with an error. Off by
// default: a trap leaves the process's CUDA context unusable, and an error message would need a synchronisation.
#if defined(MOE_EXT_CUDA_CHECKS)
constexpr bool kCheckIndices = true;
#else
constexpr bool kCheckIndices = false;
#endif

// Calls f.operator()<T>() with T the kernels' type of a floating dtype; check_floating has refused every other.
template <typename F>
decltype(auto) dispatch_floating_cuda(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Double:
      return f.template operator()<double>();
    case ScalarType::BFloat16:
      return f.template operator()<c10::BFloat16>();
    case ScalarType::Half:
      return f.template operator()<c10::Half>();
    default:
      return f.template operator()<float>();
  }
}

// Throw if a size exceeds 32 bits, in which kernels count slots.
inline int check_int32(const char* op, const char* name, int64_t value) {
  MOE_CHECK(value <= INT32_MAX, op, ": expected ", name, " to be at most 2^31 - 1 on CUDA, got ", value);
  return static_cast<int>(value);
}

// Bounds from contiguous offsets or ends.
inline ExpertBounds bounds_of(const char* op, const Tensor& expert_offsets) {
  const bool is_long = expert_offsets.scalar_type() == ScalarType::Long;
  return {
      is_long ? data<const int64_t>(expert_offsets) : nullptr, is_long ? nullptr : data<const int32_t>(expert_offsets),
      check_int32(op, "the number of experts", num_experts_of(expert_offsets))};
}

} // namespace moe_ext
