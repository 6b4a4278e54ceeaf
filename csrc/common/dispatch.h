// Dispatch from a tensor's dtype to the storage type of the loops, and access to a tensor's data.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/simd.h"

namespace moe_ext {

// Calls f.operator()<T>() with T the storage type of a floating dtype; check_floating has refused every other.
template <typename F>
decltype(auto) dispatch_floating(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Double:
      return f.template operator()<double>();
    case ScalarType::BFloat16:
      return f.template operator()<BFloat16>();
    case ScalarType::Half:
      return f.template operator()<Half>();
    default:
      return f.template operator()<float>();
  }
}

// Calls f.operator()<Bits>() for elements of 1, 2, 4 or 8 bytes.
template <typename F>
auto dispatch_size(int64_t size, F&& f) {
  switch (size) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

// The dtype of sums and of kept weights: float64 for float64, else float32.
inline ScalarType acc_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// Return the tensor itself if it is contiguous. The dispatcher would take as long as a small kernel to do the same.
inline Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline std::optional<Tensor> optional_contiguous(const std::optional<Tensor>& t) {
  return t ? std::optional(as_contiguous(*t)) : std::nullopt;
}

// Data of an optional tensor; null if it is absent.
template <typename T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t ? data<const T>(*t) : nullptr;
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < t.dim(); ++i) {
    sizes.push_back(t.size(i));
  }
  return sizes;
}

// Least number of items of a task for which a thread pays off: about 32 KiB of memory traffic.
inline int64_t grain_size(int64_t bytes_per_item) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, bytes_per_item));
}

} // namespace moe_ext
