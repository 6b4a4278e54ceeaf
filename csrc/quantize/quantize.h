// Block quantisers: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/check.h"
#include "quantize/quantize_tables.h"

namespace moe_ext::quantize {

// The following functions check all arguments, except for the values of elements, and return the format by its name.
Format check_quantize(
    const Tensor& x, const std::string& format, int64_t block, const std::optional<Tensor>& residual,
    const std::optional<Tensor>& rng_state, // [4]
    const std::optional<Tensor>& residual_in, int64_t element_offset);

Format check_dequantize(
    const char* op, const Tensor& codes, const Tensor& scales, int64_t numel, const std::string& format, int64_t block);

Format check_dequantize_add(
    const Tensor& out, const Tensor& codes, const Tensor& scales, const std::string& format, int64_t block);

RowFormat check_quantize_rows(const Tensor& x /* [N, D] */, const std::string& format);

RowFormat check_dequantize_rows(
    const Tensor& rows /* [N, B] */, int64_t dim, const std::string& format, ScalarType dtype);

// Calls f<T>() for float32, bfloat16 or float16. check_short_floating must have refused other dtypes before.
template <typename F>
decltype(auto) dispatch_short_floating(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return f.template operator()<BFloat16>();
    case ScalarType::Half:
      return f.template operator()<Half>();
    default:
      return f.template operator()<float>();
  }
}

// Refuses dtypes other than float32, bfloat16 and float16.
void check_short_floating(const char* op, const char* name, ScalarType dtype);

} // namespace moe_ext::quantize
