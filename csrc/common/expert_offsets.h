// Bounds of each expert's rows: int64 offsets [E + 1], or int32 ends [E] if the experts' rows start at 0.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"

namespace moe_ext {

inline int64_t num_experts_of(const Tensor& expert_offsets) {
  return expert_offsets.size(0) - (expert_offsets.scalar_type() == ScalarType::Long ? 1 : 0);
}

// Check everything that can be checked without reading the data, which may be on a device.
inline void check_offsets_tensor(const char* op, const Tensor& expert_offsets) {
  check_index(op, "expert_offsets", expert_offsets);
  check_dim(
      op, "expert_offsets", expert_offsets, 1, expert_offsets.scalar_type() == ScalarType::Long ? "[E + 1]" : "[E]");
  MOE_CHECK(
      num_experts_of(expert_offsets) >= 0, op, ": expected expert_offsets to have E + 1 entries, got shape ",
      shape_string(expert_offsets));
}

// Throw unless 0 <= offsets[0] <= ... <= offsets[num_experts] <= num_rows. Reads host memory.
inline void check_offsets(const char* op, const int64_t* offsets, int64_t num_experts, int64_t num_rows) {
  MOE_CHECK(offsets[0] >= 0, op, ": expected expert_offsets to start at 0 or later, got ", offsets[0]);
  for (int64_t e = 0; e < num_experts; ++e) {
    MOE_CHECK(
        offsets[e] <= offsets[e + 1], op, ": expected expert_offsets to be non-decreasing, got ", offsets[e], " then ",
        offsets[e + 1], " at expert ", e);
  }
  MOE_CHECK(
      offsets[num_experts] <= num_rows, op, ": expected expert_offsets to end within the ", num_rows, " rows, got ",
      offsets[num_experts]);
}

// Return int64 offsets [E + 1] from offsets or ends in host memory.
inline Tensor as_offsets(const Tensor& expert_offsets) {
  const Tensor given = as_contiguous(expert_offsets);
  if (given.scalar_type() == ScalarType::Long) {
    return given;
  }
  Tensor offsets = new_on_cpu({given.size(0) + 1}, ScalarType::Long);
  data<int64_t>(offsets)[0] = 0;
  std::copy_n(data<int32_t>(given), given.size(0), data<int64_t>(offsets) + 1);
  return offsets;
}

// Throw unless the rows of a stacked weight divide evenly among the experts.
inline void check_stacked(const char* op, const char* name, const Tensor& stacked, const Tensor& expert_offsets) {
  check_offsets_tensor(op, expert_offsets);
  const int64_t experts = num_experts_of(expert_offsets);
  MOE_CHECK(
      experts > 0 && stacked.size(0) % experts == 0, op, ": expected ", name, " to have as many rows for each of the ",
      experts, " experts, got shape ", shape_string(stacked));
}

} // namespace moe_ext
