// Allocation of CPU tensors without the dispatcher, which takes longer than a small kernel.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "common/check.h"

namespace moe_ext {

// Advise the system to back a tensor, which the caller is about to write as a whole, with pages of 2 MiB. malloc maps
// large tensors anew, and faults on small fresh pages cost up to ten times as much as the writes. No advised page
// reaches past the tensor, so that no extra memory is used.
inline Tensor on_huge_pages(Tensor tensor) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t end = (begin + tensor.numel() * tensor.element_size()) / kPage * kPage;
  if (end > first) {
    // The result is ignored: a system that does not follow the advice still works.
    (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

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
  return on_huge_pages(Tensor(made));
}

} // namespace moe_ext
