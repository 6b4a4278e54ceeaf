// CUDA side of the grouped matrix product. bfloat16 on devices for which torch has a kernel over all experts goes
// there, everything else to ours. Neither needs the offsets on the host.
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

constexpr int64_t kMostGroups = 1023; // of one call of torch's kernel

// MOE_EXT_GROUPED_MM, whose values moe_ext/ops/grouped_providers.py lists.
bool wants_own_products() {
  const char* choice = std::getenv("MOE_EXT_GROUPED_MM");
  return choice != nullptr && std::strcmp(choice, "own") == 0;
}

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
                    !wants_own_products() && out_columns > 0 && num_groups <= kMostGroups &&
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

// The tensor itself where the elements of its rows lie side by side.
Tensor rows_of_elements(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.stride(last) == 1 || t.size(last) <= 1 ? t : contiguous(t);
}

// True if our kernel may copy 16 bytes at a time of all rows of all experts.
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

// To `out`, or added to it.
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

// grad_e^T x_e by torch's product; of an expert without rows any values. None where it does not serve.
std::optional<Tensor> torch_backward_weight(const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  const int64_t num_experts = num_experts_of(offsets);
  // By offsets, the first of E + 1 products is over the rows before the first expert's.
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

// grad_weight[e] = grad_e^T x_e; an expert without rows gets zeros.
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

// Ours adds tiles as they leave the product; torch's product is added behind it, in one pass over both.
void backward_weight_add_cuda(
    Tensor sum,            // [E, M, K]; [E, K, M] where transposed
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
