// CUDA side of the grouped matrix product. bfloat16 on devices for which torch has a kernel over all experts goes
// there, and the offsets stay on the device; everything else is one product per expert, for which the host must know
// them.
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/grouped_gemm_kernels.cuh"
#include "grouped_gemm/per_expert.h"

namespace moe_ext::grouped_gemm {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::transpose;

// torch's kernel wants one dimension of each matrix dense and all else at multiples of 16 bytes.
bool has_aligned_matrices(const Tensor& t) {
  const int64_t last = t.dim() - 1, dense = t.stride(last) == 1 ? last : last - 1;
  bool aligned = t.stride(dense) == 1 && is_aligned(t.data_ptr(), kAccessBytes);
  for (int64_t i = 0; i <= last; ++i) {
    aligned = aligned && (i == dense || t.stride(i) * static_cast<int64_t>(t.element_size()) % kAccessBytes == 0);
  }
  return aligned;
}

// Its output has padded rows unless they too are multiples of 16 bytes.
bool torch_has_kernel(const Tensor& a, const Tensor& b, int64_t out_columns) {
  const int capability = device_properties().compute_capability;
  return a.scalar_type() == ScalarType::BFloat16 && (capability == 9 || capability == 10) && a.numel() > 0 &&
         b.numel() > 0 && out_columns * static_cast<int64_t>(a.element_size()) % kAccessBytes == 0 &&
         has_aligned_matrices(a) && has_aligned_matrices(b);
}

// ends: int32, the end of each expert's rows.
Tensor torch_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& ends) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack = {
      from(a), from(b), from(std::optional<Tensor>(ends)), from(std::optional<Tensor>()),
      from(std::optional<ScalarType>())};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_grouped_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor host_offsets(const char* op, const Tensor& expert_offsets, int64_t num_rows) {
  // NOTE: device-to-host sync: a product per expert is launched with its number of rows.
  const Tensor offsets =
      contiguous(torch::stable::to(expert_offsets, torch::stable::Device(torch::headeronly::DeviceType::CPU)));
  check_offsets(op, data<int64_t>(offsets), offsets.size(0) - 1, num_rows);
  return offsets;
}

Tensor grouped_mm_cuda(
    Tensor x,                     // [N, K]
    Tensor weight,                // [E, M, K]
    Tensor expert_offsets,        // [E + 1]
    std::optional<Tensor> bias) { // [E, M]
  check_grouped_mm(x, weight, expert_offsets, bias);
  const DeviceScope device(x);
  const int64_t num_experts = weight.size(0), dim = weight.size(1);
  Tensor offsets = contiguous(expert_offsets);
  Tensor out;
  if (torch_has_kernel(x, weight, dim)) {
    const Tensor ends = torch::stable::to(torch::stable::narrow(offsets, 0, 1, num_experts), ScalarType::Int);
    out = contiguous(torch_grouped_mm(x, transpose(weight, 1, 2), ends));
  } else {
    const Tensor on_host = host_offsets("grouped_mm", offsets, x.size(0));
    const int64_t* begin = data<int64_t>(on_host);
    out = new_empty(x, {x.size(0), dim});
    for (int64_t e = 0; e < num_experts && dim > 0; ++e) {
      if (begin[e] < begin[e + 1]) {
        mm_out(rows_of(out, begin[e], begin[e + 1]), rows_of(x, begin[e], begin[e + 1]), matrix_transposed(weight, e));
      }
    }
  }
  const std::optional<Tensor> add = bias ? std::optional(contiguous(*bias)) : std::nullopt;
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    launch_finish_rows(
        data<int64_t>(offsets), add ? data<const T>(*add) : nullptr, num_experts, x.size(0), dim, data<T>(out),
        device.stream());
  });
  return out;
}

// grad_weight[e] = grad_e^T x_e; an expert without rows gets zeros.
Tensor backward_weight_cuda(
    Tensor grad,             // [N, M]
    Tensor x,                // [N, K]
    Tensor expert_offsets) { // [E + 1]
  check_backward_weight(grad, x, expert_offsets);
  const DeviceScope device(grad);
  const int64_t num_experts = expert_offsets.size(0) - 1;
  const Tensor offsets = contiguous(expert_offsets);
  if (num_experts > 0 && torch_has_kernel(grad, x, x.size(1))) {
    // The first of E + 1 products is over the rows before the first expert's.
    Tensor with_first = torch_grouped_mm(transpose(grad, 0, 1), x, torch::stable::to(offsets, ScalarType::Int));
    const Tensor out = contiguous(torch::stable::narrow(with_first, 0, 1, num_experts));
    launch_zero_empty_experts(
        data<int64_t>(offsets), num_experts, grad.size(1) * x.size(1), data<c10::BFloat16>(out), device.stream());
    return out;
  }
  const Tensor on_host = host_offsets("_grouped_mm_backward_weight", offsets, grad.size(0));
  const int64_t* begin = data<int64_t>(on_host);
  const Tensor out = torch::stable::new_zeros(grad, {num_experts, grad.size(1), x.size(1)});
  for (int64_t e = 0; out.numel() > 0 && e < num_experts; ++e) {
    if (begin[e] < begin[e + 1]) {
      mm_out(matrix_of(out, e), rows_transposed(grad, begin[e], begin[e + 1]), rows_of(x, begin[e], begin[e + 1]));
    }
  }
  return out;
}

Tensor backward_bias_cuda(
    Tensor grad,             // [N, M]
    Tensor expert_offsets) { // [E + 1]
  check_backward_bias(grad, expert_offsets);
  const DeviceScope device(grad);
  const Tensor in = contiguous(grad), offsets = contiguous(expert_offsets);
  const int64_t num_experts = offsets.size(0) - 1;
  const Tensor out = new_empty(in, {num_experts, in.size(1)});
  dispatch_floating_cuda(in.scalar_type(), [&]<typename T>() {
    launch_sum_rows(data<int64_t>(offsets), data<const T>(in), num_experts, in.size(1), data<T>(out), device.stream());
  });
  return out;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm_cuda));
  m.impl("_grouped_mm_backward_weight", TORCH_BOX(&backward_weight_cuda));
  m.impl("_grouped_mm_backward_bias", TORCH_BOX(&backward_bias_cuda));
}

} // namespace moe_ext::grouped_gemm
