// Products with weights of 8 or 4 bits on CUDA: allocation and launches on the current stream.
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "quantize/quantized_mm.h"
#include "quantize/quantized_mm_kernels.cuh"

namespace moe_ext::quantized_mm {
namespace {

using torch::stable::contiguous;

Tensor quantized_mm_cuda(
    Tensor x,               // [T, K]
    Tensor codes,           // [M, K bits / 8]
    Tensor scales,          // [M, K / block]
    Tensor outliers,        // [n]
    Tensor outlier_columns, // [n]
    Tensor outlier_offsets, // [M + 1]
    int64_t bits, std::optional<Tensor> expert_offsets) {
  check_quantized_mm(x, codes, scales, outliers, outlier_columns, outlier_offsets, bits, expert_offsets);
  const DeviceScope device(x);
  const Tensor tokens = contiguous(x), rows = contiguous(codes), of_blocks = contiguous(scales);
  const Tensor values = contiguous(outliers), columns = contiguous(outlier_columns);
  const Tensor offsets = contiguous(outlier_offsets);
  const int64_t num_rows = codes.size(0), dim = x.size(1);
  const Tensor of_experts = expert_offsets ? contiguous(*expert_offsets) : Tensor();
  const ExpertBounds experts = expert_offsets ? bounds_of("quantized_mm", of_experts) : ExpertBounds{};
  // Tokens outside of all experts get rows of zeros.
  Tensor out = expert_offsets ? torch::stable::new_zeros(tokens, {x.size(0), num_rows / experts.num_experts})
                              : torch::stable::new_empty(tokens, {x.size(0), num_rows});
  const auto run = [&]<typename T>() {
    launch_quantized_mm<kCheckIndices, T>(
        {data<const T>(tokens), data<const uint8_t>(rows), data<const float>(of_blocks), data<const T>(values),
         data<const int32_t>(columns), data<const int64_t>(offsets), data<T>(out), x.size(0), dim, num_rows,
         dim / scales.size(1), outliers.size(0), experts},
        bits, device.stream());
  };
  x.scalar_type() == ScalarType::BFloat16 ? run.template operator()<BFloat16>() : run.template operator()<float>();
  return out;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("quantized_mm", TORCH_BOX(&quantized_mm_cuda));
}

} // namespace moe_ext::quantized_mm
