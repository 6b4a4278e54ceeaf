// New tensors on the CPU, without the dispatcher, which takes longer than a small kernel.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "common/check.h"

namespace moe_ext {

inline Tensor new_on_cpu(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i > 1; --i) {
    strides[i - 2] = strides[i - 1] * (sizes[i - 1] > 0 ? sizes[i - 1] : 1);
  }
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype_code, aoti_torch_device_type_cpu(), 0,
      &made));
  return Tensor(made);
}

} // namespace moe_ext
