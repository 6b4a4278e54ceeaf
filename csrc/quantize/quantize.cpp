#include "quantize/quantize.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::quantize {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "quantize_blockwise(Tensor x, str format, SymInt block, Tensor(a!)? residual=None, Tensor? rng_state=None, "
      "bool check_finite=True, *, Tensor? residual_in=None, SymInt element_offset=0) -> (Tensor codes, Tensor scales)");
  m.def(
      "dequantize_blockwise(Tensor codes, Tensor scales, SymInt numel, str format, SymInt block, "
      "ScalarType dtype=float) -> Tensor");
  m.def(
      "dequantize_add_(Tensor(a!) out, Tensor codes, Tensor scales, str format, SymInt block, bool accumulate=True) -> "
      "()");
  m.def("quantize_rows(Tensor x, str format) -> Tensor");
  m.def("dequantize_rows(Tensor rows, SymInt dim, str format, ScalarType dtype=float) -> Tensor");
}

namespace {

Format parse_format(const char* op, const std::string& format) {
  const int64_t found = find_format(format, kFormatNames);
  MOE_CHECK(found < kNumFormats, op, ": expected format to be int8, int6, int4, int3, int2, fp8 or sign, got ", format);
  return static_cast<Format>(found);
}

void check_block(const char* op, int64_t block, Format format) {
  MOE_CHECK(
      block == 0 || (block >= kLeastBlock && block <= kLargestBlock && (block & (block - 1)) == 0), op,
      ": expected block to be a power of two from ", kLeastBlock, " to ", kLargestBlock,
      ", or None (0) for one scale of all, got ", block);
  MOE_CHECK(
      block != 0 || format != Format::kSign, op,
      ": expected block to be above 0 for signs, whose scale is the mean of a block, got 0");
}

void check_residual(const char* op, const char* name, const Tensor& residual, const Tensor& x) {
  check_same_device(op, name, residual, "x", x);
  check_dtype(op, name, residual, ScalarType::Float);
  MOE_CHECK(
      shape_string(residual) == shape_string(x), op, ": expected ", name, " to be of shape ", shape_string(x),
      ", that of x, got shape ", shape_string(residual));
  MOE_CHECK(
      residual.is_contiguous(), op, ": expected ", name, " to be contiguous, got a strided tensor of shape ",
      shape_string(residual));
}

} // namespace

void check_short_floating(const char* op, const char* name, ScalarType dtype) {
  MOE_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op, ": expected ", name,
      " to be float32, bfloat16 or float16, got ", torch::headeronly::toString(dtype));
}

Format check_quantize(
    const Tensor& x, const std::string& format, int64_t block, const std::optional<Tensor>& residual,
    const std::optional<Tensor>& rng_state, const std::optional<Tensor>& residual_in, int64_t element_offset) {
  const char* op = "quantize_blockwise";
  check_short_floating(op, "x", x.scalar_type());
  const Format parsed = parse_format(op, format);
  check_block(op, block, parsed);
  if (residual) {
    check_residual(op, "residual", *residual, x);
    check_apart(op, "residual", *residual, "x", x);
  }
  if (residual_in) {
    MOE_CHECK(
        residual.has_value(), op, ": expected residual to be given with residual_in, which is only read, got none");
    check_residual(op, "residual_in", *residual_in, x);
    check_apart(op, "residual_in", *residual_in, "residual", *residual);
  }
  const int64_t step = block == 0 ? kSharedBlock : block;
  MOE_CHECK(
      element_offset >= 0 && element_offset % step == 0, op, ": expected element_offset to be a multiple of ",
      block == 0 ? "" : "block (", step, block == 0 ? "" : ")", ", got ", element_offset);
  if (rng_state) {
    check_same_device(op, "rng_state", *rng_state, "x", x);
    check_dtype(op, "rng_state", *rng_state, ScalarType::Long);
    check_dim(op, "rng_state", *rng_state, 1, "[4]");
    check_size(op, "rng_state", *rng_state, 0, 4, "seed, tensor, step, rank");
    if (residual) {
      check_apart(op, "rng_state", *rng_state, "residual", *residual);
    }
    MOE_CHECK(
        parsed != Format::kSign, op, ": expected rng_state to be absent for signs, which are not rounded, got one");
  }
  return parsed;
}

Format check_dequantize(
    const char* op, const Tensor& codes, const Tensor& scales, int64_t numel, const std::string& format,
    int64_t block) {
  const Format parsed = parse_format(op, format);
  check_block(op, block, parsed);
  MOE_CHECK(numel >= 0, op, ": expected numel to be at least 0, got ", numel);
  check_same_device(op, "scales", scales, "codes", codes);
  check_dtype(op, "codes", codes, ScalarType::Byte);
  check_dtype(op, "scales", scales, ScalarType::Float);
  check_dim(op, "codes", codes, 1, "of bytes");
  check_dim(op, "scales", scales, 1, "of blocks");
  check_size(op, "codes", codes, 0, code_bytes(numel, parsed), "the bytes of that many elements");
  check_size(op, "scales", scales, 0, num_scales(numel, block), "the blocks of that many elements");
  return parsed;
}

Format check_dequantize_add(
    const Tensor& out, const Tensor& codes, const Tensor& scales, const std::string& format, int64_t block) {
  const char* op = "dequantize_add_";
  check_short_floating(op, "out", out.scalar_type());
  check_same_device(op, "out", out, "codes", codes);
  MOE_CHECK(
      out.is_contiguous(), op, ": expected out to be contiguous, got a strided tensor of shape ", shape_string(out));
  const Format parsed = check_dequantize(op, codes, scales, out.numel(), format, block);
  check_apart(op, "codes", codes, "out", out);
  check_apart(op, "scales", scales, "out", out);
  return parsed;
}

namespace {

RowFormat parse_row_format(const char* op, const std::string& format) {
  const int64_t found = find_format(format, kRowFormatNames);
  MOE_CHECK(found < kNumRowFormats, op, ": expected format to be int8, fp8 or mx, got ", format);
  return static_cast<RowFormat>(found);
}

} // namespace

RowFormat check_quantize_rows(const Tensor& x, const std::string& format) {
  const char* op = "quantize_rows";
  check_short_floating(op, "x", x.scalar_type());
  check_dim(op, "x", x, 2, "[N, D]");
  return parse_row_format(op, format);
}

RowFormat check_dequantize_rows(const Tensor& rows, int64_t dim, const std::string& format, ScalarType dtype) {
  const char* op = "dequantize_rows";
  check_short_floating(op, "dtype", dtype);
  check_dtype(op, "rows", rows, ScalarType::Byte);
  check_dim(op, "rows", rows, 2, "[N, B]");
  const RowFormat parsed = parse_row_format(op, format);
  MOE_CHECK(dim >= 0, op, ": expected dim to be at least 0, got ", dim);
  check_size(op, "rows", rows, 1, row_bytes(dim, parsed), "the bytes of a row of that many elements");
  return parsed;
}

} // namespace moe_ext::quantize
