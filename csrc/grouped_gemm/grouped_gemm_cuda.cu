// Grouped matrix product on CUDA, on the current stream. torch's kernel over all experts computes bfloat16 on devices
// that it supports; our kernel computes everything else. Neither needs the offsets on the host.
#include <cstdlib>
#include <cstring>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/grouped_gemm_kernels.cuh"
#include "grouped_gemm/products_kernels.cuh"

namespace moe_ext::grouped_gemm {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::transpose;

constexpr int64_t kMostGroups = 1023; // most groups in one call of torch's kernel

// True if MOE_EXT_GROUPED_MM is "own". moe_ext/ops/grouped_providers.py lists its values.
bool wants_own_products() {
  const char* choice = std::getenv("MOE_EXT_GROUPED_MM");
  return choice != nullptr && std::strcmp(choice, "own") == 0;
}

// True if torch's kernel takes these rows: dense, not overlapping, and at multiples of 16 bytes.
bool is_row_major(const Tensor& t) {
  const int64_t last = t.dim() - 1, row_bytes = t.stride(last - 1) * static_cast<int64_t>(t.element_size());
  return t.stride(last) == 1 && t.stride(last - 1) >= t.size(last) && row_bytes % kAccessBytes == 0 &&
         is_aligned(t.data_ptr(), kAccessBytes);
}

// Returns the rows for torch's kernel, or nullopt if the kernel does not support this device, dtype or width. Rows are
// copied if the kernel would refuse them. It would even abort the process if groups of columns did not start at
// multiples of 16 bytes. If `out_columns` were no multiple of 16 bytes, the kernel would pad the rows of its output.
std::optional<Tensor> rows_for_torch(const Tensor& t, int64_t num_groups, int64_t out_columns) {
  const int capability = device_properties().compute_capability;
  const bool fits = t.scalar_type() == ScalarType::BFloat16 && (capability == 9 || capability == 10) && t.numel() > 0 &&
                    !wants_own_products() && out_columns > 0 && num_groups <= kMostGroups &&
                    out_columns * static_cast<int64_t>(t.element_size()) % kAccessBytes == 0;
  if (!fits) {
    return std::nullopt;
  }
  const Tensor rows = is_row_major(t) ? t : contiguous(t);
  return is_row_major(rows) ? std::optional(rows) : std::nullopt;
}

// True if torch's kernel takes the weight, which may be stored as [E, M, K] or transposed.
bool has_dense_matrices(const Tensor& weight) {
  return weight.numel() > 0 && (is_row_major(weight) || is_row_major(transpose(weight, 1, 2))) &&
         weight.stride(0) * static_cast<int64_t>(weight.element_size()) % kAccessBytes == 0;
}

// Calls torch's kernel. `ends` is int32 and holds the end of each expert's rows.
Tensor torch_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& ends) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack = {
      from(a), from(b), from(std::optional<Tensor>(ends)), from(std::optional<Tensor>()),
      from(std::optional<ScalarType>())};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_grouped_mm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Returns the tensor if the elements of its rows are adjacent, otherwise a contiguous copy.
Tensor rows_of_elements(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.stride(last) == 1 || t.size(last) <= 1 ? t : contiguous(t);
}

// True if our kernel may copy 16 bytes at a time from every row of every expert.
bool rows_are_copyable(const Tensor& t) {
  const auto whole = [&](int64_t elements) {
    return elements * static_cast<int64_t>(t.element_size()) % kAccessBytes == 0;
  };
  const int64_t last = t.dim() - 1;
  return is_aligned(t.data_ptr(), kAccessBytes) && whole(t.size(last)) && whole(t.stride(last - 1)) &&
         (last == 1 || whole(t.stride(0)));
}

template <typename T>
GroupedProduct<T> product_of(
    const char* op, const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& out) {
  GroupedProduct<T> p = {};
  p.experts = bounds_of(op, offsets);
  p.num_rows = check_int32(op, "the number of rows", a.size(0));
  p.a = data<const T>(a);
  p.b = data<const T>(b);
  p.a_stride = a.stride(0);
  p.b_stride = b.stride(b.dim() - 2);
  p.out = data<T>(out);
  p.cols = check_int32(op, "the output's columns", out.size(out.dim() - 1));
  p.aligned = rows_are_copyable(a) && rows_are_copyable(b);
  p.checked = kCheckIndices;
  return p;
}

Tensor own_grouped_mm(
    const Tensor& x, const Tensor& weight, const Tensor& offsets, const std::optional<Tensor>& bias,
    const DeviceScope& device) {
  const char* op = "grouped_mm";
  const Tensor rows = rows_of_elements(x);
  const bool is_transposed = weight.stride(2) != 1 && weight.stride(1) == 1;
  const Tensor stored = is_transposed ? transpose(weight, 1, 2) : rows_of_elements(weight);
  const Tensor out = new_empty(x, {x.size(0), weight.size(1)});
  dispatch_floating_cuda(x.scalar_type(), [&]<typename T>() {
    GroupedProduct<T> p = product_of<T>(op, rows, stored, offsets, out);
    p.b_expert_stride = stored.stride(0);
    p.bias = bias ? data<const T>(*bias) : nullptr;
    p.depth = check_int32(op, "the columns of x", x.size(1));
    if (is_transposed) {
      launch_grouped_product<T, true, false>(p, device.stream());
    } else {
      launch_grouped_product<T, true, true>(p, device.stream());
    }
  });
  return out;
}

// Writes the gradient of the weight to `out`, or adds it with kAdd, by our kernel.
template <bool kAdd>
void own_backward_weight(
    const Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets, const DeviceScope& device) {
  const char* op = "_grouped_mm_backward_weight";
  const Tensor grad_rows = rows_of_elements(grad), rows = rows_of_elements(x);
  dispatch_floating_cuda(grad.scalar_type(), [&]<typename T>() {
    GroupedProduct<T> p = product_of<T>(op, grad_rows, rows, offsets, out);
    p.rows = check_int32(op, "the columns of grad", grad.size(1));
    launch_grouped_product<T, false, false, kAdd>(p, device.stream());
  });
}

Tensor grouped_mm_cuda(
    Tensor x,                     // [N, K]
    Tensor weight,                // [E, M, K]
    Tensor expert_offsets,        // [E + 1] or [E]
    std::optional<Tensor> bias) { // [E, M]
  check_grouped_mm(x, weight, expert_offsets, bias);
  const DeviceScope device(x);
  const int64_t num_experts = weight.size(0), dim = weight.size(1);
  Tensor offsets = contiguous(expert_offsets);
  const std::optional<Tensor> add = bias ? std::optional(contiguous(*bias)) : std::nullopt;
  const auto rows = has_dense_matrices(weight) ? rows_for_torch(x, num_experts, dim) : std::nullopt;
  if (!rows) {
    return own_grouped_mm(x, weight, offsets, add, device);
  }
  const bool is_long = offsets.scalar_type() == ScalarType::Long;
  const Tensor ends =
      is_long ? torch::stable::to(torch::stable::narrow(offsets, 0, 1, num_experts), ScalarType::Int) : offsets;
  const Tensor out = contiguous(torch_grouped_mm(*rows, transpose(weight, 1, 2), ends));
  if (is_long || add) {
    launch_finish_rows(
        bounds_of("grouped_mm", offsets), add ? data<const c10::BFloat16>(*add) : nullptr, x.size(0), dim,
        data<c10::BFloat16>(out), device.stream());
  }
  return out;
}

// Returns grad_e^T x_e by torch's kernel, with arbitrary values for experts without rows; nullopt if the kernel does
// not support the arguments.
std::optional<Tensor> torch_backward_weight(const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  const int64_t num_experts = num_experts_of(offsets);
  // Offsets serve as ends of E + 1 groups, of which the first holds the rows before the first expert.
  const int64_t num_products = offsets.size(0);
  const auto rows = num_experts > 0 ? rows_for_torch(x, num_products, x.size(1)) : std::nullopt;
  const auto grad_rows = rows ? rows_for_torch(grad, num_products, x.size(1)) : std::nullopt;
  if (!grad_rows) {
    return std::nullopt;
  }
  const bool is_long = offsets.scalar_type() == ScalarType::Long;
  Tensor products = torch_grouped_mm(
      transpose(*grad_rows, 0, 1), *rows, is_long ? torch::stable::to(offsets, ScalarType::Int) : offsets);
  return contiguous(torch::stable::narrow(products, 0, num_products - num_experts, num_experts));
}

// Returns grad_weight[e] = grad_e^T x_e, zeros for an expert without rows.
Tensor backward_weight_cuda(
    Tensor grad,           // [N, M]
    Tensor x,              // [N, K]
    Tensor expert_offsets, // [E + 1] or [E]
    bool /*grad_owned*/, bool /*x_owned*/) {
  const DeviceScope device(grad);
  const Tensor offsets = contiguous(expert_offsets);
  if (const auto found = torch_backward_weight(grad, x, offsets)) {
    launch_zero_empty_experts(
        bounds_of("_grouped_mm_backward_weight", offsets), grad.size(1) * x.size(1), data<c10::BFloat16>(*found),
        device.stream());
    return *found;
  }
  const Tensor out = new_empty(grad, {num_experts_of(offsets), grad.size(1), x.size(1)});
  own_backward_weight<false>(out, grad, x, offsets, device);
  return out;
}

// Adds the gradient of the weight to `sum`. Our kernel adds each tile after computing it; the result of torch's kernel
// is added by one more pass.
void backward_weight_add_cuda(
    Tensor sum,            // [E, M, K]; [E, K, M] if transposed
    Tensor grad,           // [N, M]
    Tensor x,              // [N, K]
    Tensor expert_offsets, // [E + 1] or [E]
    bool transposed, bool /*grad_owned*/, bool /*x_owned*/) {
  check_backward_weight_add(sum, grad, x, expert_offsets, transposed);
  const DeviceScope device(grad);
  const Tensor offsets = contiguous(expert_offsets);
  const Tensor rows = transposed ? contiguous(x) : grad, columns = transposed ? grad : x;
  if (const auto found = torch_backward_weight(rows, columns, offsets)) {
    launch_add_experts(
        bounds_of("_grouped_mm_backward_weight_add_", offsets), data<const c10::BFloat16>(*found),
        sum.size(1) * sum.size(2), data<c10::BFloat16>(sum), device.stream());
  } else {
    own_backward_weight<true>(sum, rows, columns, offsets, device);
  }
}

Tensor backward_bias_cuda(
    Tensor grad,             // [N, M]
    Tensor expert_offsets) { // [E + 1] or [E]
  check_backward_bias(grad, expert_offsets);
  const DeviceScope device(grad);
  const Tensor in = contiguous(grad), offsets = contiguous(expert_offsets);
  const ExpertBounds experts = bounds_of("_grouped_mm_backward_bias", offsets);
  const Tensor out = new_empty(in, {experts.num_experts, in.size(1)});
  dispatch_floating_cuda(in.scalar_type(), [&]<typename T>() {
    launch_sum_rows(experts, data<const T>(in), in.size(1), data<T>(out), device.stream());
  });
  return out;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm_cuda));
  m.impl("_grouped_mm_backward_weight", TORCH_BOX(&backward_weight_stored<backward_weight_cuda>));
  m.impl("_grouped_mm_backward_weight_add_", TORCH_BOX(&backward_weight_add_cuda));
  m.impl("_grouped_mm_backward_bias", TORCH_BOX(&backward_bias_cuda));
}

} // namespace moe_ext::grouped_gemm
