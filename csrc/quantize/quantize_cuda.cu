// Block quantisers on CUDA: allocation and launches on the current stream. The host never waits for the device.
#include <tuple>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "quantize/quantize.h"
#include "quantize/quantize_kernels.cuh"

namespace moe_ext::quantize {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::new_zeros;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> quantize_blockwise_cuda(
    Tensor x, std::string format_name, int64_t block, OptionalTensor residual, OptionalTensor rng_state,
    bool check_finite, OptionalTensor residual_in, int64_t element_offset) {
  const Format format = check_quantize(x, format_name, block, residual, rng_state, residual_in, element_offset);
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  const OptionalTensor state = optional_contiguous(rng_state);
  const int64_t numel = in.numel();
  Tensor codes = new_empty(in, {code_bytes(numel, format)}, ScalarType::Byte);
  Tensor scales = new_empty(in, {num_scales(numel, block)}, ScalarType::Float);
  // Element 0 is a flag, set if an element is not finite; element 1 is the largest key, for a shared scale.
  const Tensor found = new_zeros(in, {2}, ScalarType::Int);
  if (numel == 0) {
    return {codes, scales};
  }
  // The check protects a residual that is changed in place; without one there is nothing to protect.
  const bool check = check_finite && ((residual && !residual_in) || kCheckIndices);
  const OptionalTensor& owed = residual_in ? residual_in : residual;
  dispatch_short_floating(in.scalar_type(), [&]<typename T>() {
    QuantizeArgs<T> args{
        data<const T>(in),
        data_or_null<float>(owed),
        residual ? data<float>(*residual) : nullptr,
        data<uint8_t>(codes),
        data<float>(scales),
        numel,
        block == 0 ? kSharedPart : block,
        {data_or_null<int64_t>(state), nullptr},
        element_offset};
    if (check) {
      launch_check_finite<kCheckIndices>(args, data<int>(found), device.stream());
    }
    if (block == 0) {
      args.largest = reinterpret_cast<const uint32_t*>(data<const int>(found) + 1);
      launch_largest(args, data<int>(found) + 1, device.stream());
    }
    launch_quantize(format, args, check ? data<const int>(found) : nullptr, device.stream());
  });
  return {codes, scales};
}

void dequantize_into(
    const Tensor& out, const Tensor& codes, const Tensor& scales, Format format, int64_t block, bool add,
    cudaStream_t stream) {
  if (out.numel() == 0) {
    return;
  }
  dispatch_short_floating(out.scalar_type(), [&]<typename T>() {
    launch_dequantize<T>(
        format,
        {data<T>(out), data<const uint8_t>(codes), data<const float>(scales), out.numel(), block, add, block == 0},
        stream);
  });
}

Tensor dequantize_blockwise_cuda(
    Tensor codes, Tensor scales, int64_t numel, std::string format_name, int64_t block, ScalarType dtype) {
  const char* op = "dequantize_blockwise";
  check_short_floating(op, "dtype", dtype);
  const Format format = check_dequantize(op, codes, scales, numel, format_name, block);
  const DeviceScope device(codes);
  Tensor out = new_empty(codes, {numel}, dtype);
  dequantize_into(out, contiguous(codes), contiguous(scales), format, block, false, device.stream());
  return out;
}

void dequantize_add_cuda(
    Tensor out, Tensor codes, Tensor scales, std::string format_name, int64_t block, bool accumulate) {
  const Format format = check_dequantize_add(out, codes, scales, format_name, block);
  const DeviceScope device(out);
  dequantize_into(out, contiguous(codes), contiguous(scales), format, block, accumulate, device.stream());
}

Tensor quantize_rows_cuda(Tensor x, std::string format_name) {
  const RowFormat format = check_quantize_rows(x, format_name);
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  const int64_t num_rows = in.size(0), dim = in.size(1);
  Tensor rows = new_empty(in, {num_rows, row_bytes(dim, format)}, ScalarType::Byte);
  dispatch_short_floating(in.scalar_type(), [&]<typename T>() {
    launch_quantize_rows<T>(format, {data<const T>(in), data<uint8_t>(rows), dim}, num_rows, device.stream());
  });
  return rows;
}

Tensor dequantize_rows_cuda(Tensor rows, int64_t dim, std::string format_name, ScalarType dtype) {
  const RowFormat format = check_dequantize_rows(rows, dim, format_name, dtype);
  const DeviceScope device(rows);
  const Tensor from = contiguous(rows);
  const int64_t num_rows = from.size(0);
  Tensor out = new_empty(from, {num_rows, dim}, dtype);
  dispatch_short_floating(dtype, [&]<typename T>() {
    launch_dequantize_rows<T>(format, {data<T>(out), data<const uint8_t>(from), dim}, num_rows, device.stream());
  });
  return out;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("quantize_blockwise", TORCH_BOX(&quantize_blockwise_cuda));
  m.impl("dequantize_blockwise", TORCH_BOX(&dequantize_blockwise_cuda));
  m.impl("dequantize_add_", TORCH_BOX(&dequantize_add_cuda));
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows_cuda));
  m.impl("dequantize_rows", TORCH_BOX(&dequantize_rows_cuda));
}

} // namespace moe_ext::quantize
