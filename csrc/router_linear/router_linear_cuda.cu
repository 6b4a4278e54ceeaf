// CUDA side of the router product, all of it the library's. Logits of 16-bit tokens and weights are one product that
// sums in float32 and returns it; what the library has no such product for is upcast by parts of the tokens.
#include <algorithm>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/host_device.h"
#include "common/torch_cuda.cuh"
#include "grouped_gemm/per_expert.h"
#include "router_linear/router_linear.h"

namespace moe_ext::router_linear {
namespace {

using grouped_gemm::mm_out;
using grouped_gemm::rows_of;
using torch::stable::new_empty;
using torch::stable::to;
using torch::stable::transpose;

// Bytes of the upcast tokens of one part: large enough to fill the device, small beside the activations of a layer.
constexpr int64_t kPartBytes = int64_t{32} << 20;

int64_t part_rows(int64_t row_bytes) {
  return std::max<int64_t>(1024, kPartBytes / std::max<int64_t>(1, row_bytes));
}

// Calls f(begin, end) for each part of the tokens.
template <typename F>
void each_part(int64_t num_tokens, int64_t row_bytes, F&& f) {
  const int64_t rows = part_rows(row_bytes);
  for (int64_t begin = 0; begin < num_tokens; begin += rows) {
    f(begin, std::min(num_tokens, begin + rows));
  }
}

Tensor as_dtype(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : to(t, dtype);
}

// A view of all rows. Products with a result that is given refuse operands that require a gradient; views do not.
Tensor all_rows(const Tensor& t) {
  return rows_of(t, 0, t.size(0));
}

// a @ b in float32 from 16-bit operands of one dtype.
Tensor mm_to_float(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack = {from(a), from(b), from(ScalarType::Float)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Only CUDA tensors have the product: in the emulation of the tests they are the CPU's.
bool has_wide_product(const Tensor& x, const Tensor& weight) {
  return x.is_cuda() && x.element_size() == 2 && x.scalar_type() == weight.scalar_type();
}

Tensor router_logits_cuda(
    Tensor x,        // [T, D]
    Tensor weight) { // [E, D]
  check_router_logits(x, weight);
  const DeviceScope device(x);
  if (has_wide_product(x, weight)) {
    return mm_to_float(x, transpose(weight, 0, 1));
  }
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor wide = as_dtype(weight, acc);
  const Tensor right = grouped_gemm::rows_transposed(wide, 0, wide.size(0));
  const Tensor out = new_empty(x, {x.size(0), weight.size(0)}, acc);
  if (x.scalar_type() == acc) {
    mm_out(out, all_rows(x), right);
    return out;
  }
  each_part(x.size(0), x.size(1) * sizeof(float), [&](int64_t begin, int64_t end) {
    mm_out(rows_of(out, begin, end), to(rows_of(x, begin, end), acc), right);
  });
  return out;
}

Tensor backward_x_cuda(
    Tensor grad,        // [T, E]
    Tensor weight,      // [E, D]
    ScalarType dtype) { // of x
  check_backward_x(grad, weight, dtype);
  const DeviceScope device(grad);
  const ScalarType acc = acc_dtype(dtype);
  const Tensor wide = as_dtype(weight, acc), right = all_rows(wide);
  const Tensor out = new_empty(grad, {grad.size(0), weight.size(1)}, dtype);
  if (dtype == acc) {
    mm_out(out, all_rows(grad), right);
    return out;
  }
  const int64_t rows = std::min(grad.size(0), part_rows(weight.size(1) * sizeof(float)));
  const Tensor part = new_empty(grad, {rows, weight.size(1)}, acc);
  each_part(grad.size(0), weight.size(1) * sizeof(float), [&](int64_t begin, int64_t end) {
    const Tensor product = rows_of(part, 0, end - begin);
    mm_out(product, rows_of(grad, begin, end), right);
    Tensor target = rows_of(out, begin, end);
    torch::stable::copy_(target, product);
  });
  return out;
}

// grad^T x: every part's product has a matrix of its own, and those are added in order.
Tensor backward_weight_cuda(
    Tensor grad,        // [T, E]
    Tensor x,           // [T, D]
    ScalarType dtype) { // of the weight
  check_backward_weight(grad, x, dtype);
  const DeviceScope device(grad);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const int64_t num_experts = grad.size(1), dim = x.size(1);
  if (x.scalar_type() == acc) {
    const Tensor out = new_empty(grad, {num_experts, dim});
    mm_out(out, grouped_gemm::rows_transposed(grad, 0, grad.size(0)), all_rows(x));
    return as_dtype(out, dtype);
  }
  const int64_t rows = part_rows(dim * sizeof(float));
  const int64_t num_parts = ceil_div(x.size(0), rows);
  const Tensor parts = new_empty(grad, {num_parts, num_experts, dim});
  each_part(x.size(0), dim * sizeof(float), [&](int64_t begin, int64_t end) {
    mm_out(
        grouped_gemm::matrix_of(parts, begin / rows), grouped_gemm::rows_transposed(grad, begin, end),
        to(rows_of(x, begin, end), acc));
  });
  return as_dtype(torch::stable::sum(parts, {0}), dtype);
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("router_logits", TORCH_BOX(&router_logits_cuda));
  m.impl("_router_logits_backward_x", TORCH_BOX(&backward_x_cuda));
  m.impl("_router_logits_backward_weight", TORCH_BOX(&backward_weight_cuda));
}

} // namespace moe_ext::router_linear
