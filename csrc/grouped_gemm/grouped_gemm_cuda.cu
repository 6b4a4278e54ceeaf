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

constexpr int64_t kMostGroups = 1023; // of one call of torch's kernel

// Rows that torch's kernel takes: dense, apart, and at multiples of 16 bytes.
bool is_row_major(const Tensor& t) {
  const int64_t last = t.dim() - 1, row_bytes = t.stride(last - 1) * static_cast<int64_t>(t.element_size());
  return t.stride(last) == 1 && t.stride(last - 1) >= t.size(last) && row_bytes % kAccessBytes == 0 &&
         is_aligned(t.data_ptr(), kAccessBytes);
}

// The rows for torch's kernel, copied where it would refuse them, or stop the process over columns whose groups start
// at no multiple of 16 bytes; none where it is not for this device, type or width. Its output has padded rows unless
// out_columns are multiples of 16 bytes.
std::optional<Tensor> rows_for_torch(const Tensor& t, int64_t num_groups, int64_t out_columns) {
  const int capability = device_properties().compute_capability;
  const bool fits = t.scalar_type() == ScalarType::BFloat16 && (capability == 9 || capability == 10) && t.numel() > 0 &&
                    out_columns > 0 && num_groups <= kMostGroups &&
                    out_columns * static_cast<int64_t>(t.element_size()) % kAccessBytes == 0;
  if (!fits) {
    return std::nullopt;
  }
  const Tensor rows = is_row_major(t) ? t : contiguous(t);
  return is_row_major(rows) ? std::optional(rows) : std::nullopt;
}

// A weight may be stored either way.
bool has_dense_matrices(const Tensor& weight) {
  return weight.numel() > 0 && (is_row_major(weight) || is_row_major(transpose(weight, 1, 2))) &&
         weight.stride(0) * static_cast<int64_t>(weight.element_size()) % kAccessBytes == 0;
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
  if (const auto rows = has_dense_matrices(weight) ? rows_for_torch(x, num_experts, dim) : std::nullopt) {
    const Tensor ends = torch::stable::to(torch::stable::narrow(offsets, 0, 1, num_experts), ScalarType::Int);
    out = contiguous(torch_grouped_mm(*rows, transpose(weight, 1, 2), ends));
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
  const DeviceScope device(grad);
  const int64_t num_experts = expert_offsets.size(0) - 1;
  const Tensor offsets = contiguous(expert_offsets);
  // The first of E + 1 products is over the rows before the first expert's.
  const auto rows = num_experts > 0 ? rows_for_torch(x, num_experts + 1, x.size(1)) : std::nullopt;
  const auto grad_rows = rows ? rows_for_torch(grad, num_experts + 1, x.size(1)) : std::nullopt;
  if (grad_rows) {
    Tensor with_first =
        torch_grouped_mm(transpose(*grad_rows, 0, 1), *rows, torch::stable::to(offsets, ScalarType::Int));
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
  m.impl("_grouped_mm_backward_weight", TORCH_BOX(&backward_weight_stored<backward_weight_cuda>));
  m.impl("_grouped_mm_backward_bias", TORCH_BOX(&backward_bias_cuda));
}

} // namespace moe_ext::grouped_gemm
