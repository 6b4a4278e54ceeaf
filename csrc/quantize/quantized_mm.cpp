#include "quantize/quantized_mm.h"

#include "common/library.h"

namespace moe_ext::quantized_mm {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "quantized_mm(Tensor x, Tensor codes, Tensor scales, Tensor outliers, Tensor outlier_columns, Tensor "
      "outlier_offsets, SymInt bits, Tensor? expert_offsets=None) -> Tensor");
}

void check_quantized_mm(
    const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& outliers, const Tensor& outlier_columns,
    const Tensor& outlier_offsets, int64_t bits, const std::optional<Tensor>& expert_offsets) {
  const char* op = "quantized_mm";
  MOE_CHECK(bits == 8 || bits == 4, op, ": expected bits to be 8 or 4, got ", bits);
  MOE_CHECK(
      x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16, op,
      ": expected x to be float32 or bfloat16, got ", dtype_string(x));
  check_dtype(op, "codes", codes, ScalarType::Byte);
  check_dtype(op, "scales", scales, ScalarType::Float);
  check_dtype(op, "outliers", outliers, x.scalar_type());
  check_dtype(op, "outlier_columns", outlier_columns, ScalarType::Int);
  check_dtype(op, "outlier_offsets", outlier_offsets, ScalarType::Long);
  check_dim(op, "x", x, 2, "[T, K]");
  check_dim(op, "codes", codes, 2, "[M, K bits / 8]");
  check_dim(op, "scales", scales, 2, "[M, K / block]");
  check_dim(op, "outliers", outliers, 1, "[n]");
  check_dim(op, "outlier_columns", outlier_columns, 1, "[n]");
  check_dim(op, "outlier_offsets", outlier_offsets, 1, "[M + 1]");
  const int64_t dim = x.size(1), num_rows = codes.size(0), num_blocks = scales.size(1);
  MOE_CHECK(
      num_blocks > 0 && dim % num_blocks == 0 && dim / num_blocks % 32 == 0, op,
      ": expected blocks of a multiple of 32 columns, got ", num_blocks, " blocks of ", dim);
  check_size(op, "codes", codes, 1, dim * bits / 8, "the bytes of a row");
  check_size(op, "scales", scales, 0, num_rows, "the rows of codes");
  check_size(op, "outlier_columns", outlier_columns, 0, outliers.size(0), "the number of outliers");
  check_size(op, "outlier_offsets", outlier_offsets, 0, num_rows + 1, "the rows of codes and one");
  check_same_device(op, "codes", codes, "x", x);
  check_same_device(op, "scales", scales, "x", x);
  check_same_device(op, "outliers", outliers, "x", x);
  check_same_device(op, "outlier_columns", outlier_columns, "x", x);
  check_same_device(op, "outlier_offsets", outlier_offsets, "x", x);
  if (expert_offsets) {
    check_stacked(op, "codes", codes, *expert_offsets);
    check_same_device(op, "expert_offsets", *expert_offsets, "x", x);
  }
}

} // namespace moe_ext::quantized_mm
