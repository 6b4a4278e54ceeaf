// Argument checks, with messages of the form "<op>: expected <arg> to be <rule>, got <value>".
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

// torch 2.11 has the macro under another name.
#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace moe_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw std::runtime_error(message.str());
}

// STD_TORCH_CHECK would put function, file and line before the message. A user's mistake needs the rule alone.
#define MOE_CHECK(condition, ...)            \
  do {                                       \
    if (__builtin_expect(!(condition), 0)) { \
      ::moe_ext::fail(__VA_ARGS__);          \
    }                                        \
  } while (false)

// "[2, 3]"
inline std::string shape_string(const Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < t.dim(); ++i) {
    out << (i ? ", " : "") << t.size(i);
  }
  out << "]";
  return out.str();
}

inline std::string dtype_string(const Tensor& t) {
  return torch::headeronly::toString(t.scalar_type());
}

inline std::string device_string(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device";
}

inline void check_same_device(
    const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  MOE_CHECK(
      device_string(t) == device_string(as), op, ": expected ", name, " to be on ", device_string(as), " as ", as_name,
      ", got ", device_string(t));
}

inline void check_floating(const char* op, const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  MOE_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::BFloat16 ||
          dtype == ScalarType::Half,
      op, ": expected ", name, " to be float32, float64, bfloat16 or float16, got ", dtype_string(t));
}

inline void check_index(const char* op, const char* name, const Tensor& t) {
  MOE_CHECK(
      t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long, op, ": expected ", name,
      " to be int32 or int64, got ", dtype_string(t));
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType dtype) {
  MOE_CHECK(
      t.scalar_type() == dtype, op, ": expected ", name, " to be ", torch::headeronly::toString(dtype), ", got ",
      dtype_string(t));
}

inline void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim, const char* legend) {
  MOE_CHECK(
      t.dim() == dim, op, ": expected ", name, " to be a ", dim, "-D tensor ", legend, ", got shape ", shape_string(t));
}

inline void check_size(const char* op, const char* name, const Tensor& t, int64_t dim, int64_t size, const char* rule) {
  MOE_CHECK(
      t.size(dim) == size, op, ": expected ", name, " to be of size ", size, " in dim ", dim, " (", rule,
      "), got shape ", shape_string(t));
}

} // namespace moe_ext
