// Router product on CUDA, by products of torch's library on the current stream. Logits of 16-bit tokens and weights are
// one product with sums and result in float32. So are gradients of bfloat16 tokens, for which float32 operands are
// split into parts in bfloat16. For all other dtypes, tokens are upcast, a part of them at a time.
#include <algorithm>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/host_device.h"
#include "common/sum_over.h"
#include "common/torch_cuda.cuh"
#include "grouped_gemm/per_expert.h"
#include "router_linear/router_linear.h"
#include "router_linear/router_linear_kernels.cuh"

namespace moe_ext::router_linear {
namespace {

using grouped_gemm::Matrix;
using grouped_gemm::mm_out;
using grouped_gemm::rows_of;
using torch::stable::new_empty;
using torch::stable::to;
using torch::stable::transpose;

// Bytes of upcast tokens per part: large enough to fill the device, but small beside the activations of a layer.
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

// A view of all rows. torch refuses products into a given result if an operand requires a gradient. A view made by
// from_blob does not require one.
Tensor all_rows(const Tensor& t) {
  return rows_of(t, 0, t.size(0));
}

// Returns a @ b in float32, for 16-bit operands of one dtype.
Tensor mm_to_float(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack = {from(a), from(b), from(ScalarType::Float)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void mm_to_float_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack = {from(a), from(b), from(ScalarType::Float), from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype_out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

bool has_wide_product(const Tensor& x, const Tensor& weight) {
  return x.element_size() == 2 && x.scalar_type() == weight.scalar_type();
}

// Most tokens that one product sums. The truncation error of tensor cores grows with the number of terms of a product.
constexpr int64_t kSumTokens = 8192;
// Elements of a result from which on it has a 128 x 128 tile for every SM. The library then does not split its sums
// into parts, which it might add in bfloat16.
constexpr int64_t kWholeSums = int64_t{1} << 22;

// Returns the blocks of t, side by side or one below the other.
Tensor split(const Tensor& t, const Blocks& blocks, bool side_by_side, cudaStream_t stream) {
  const Tensor in = t.stride(1) == 1 ? t : torch::stable::contiguous(t);
  const int64_t rows = in.size(0), cols = in.size(1);
  const Tensor out = side_by_side ? new_empty(in, {rows, blocks.count * cols}, ScalarType::BFloat16)
                                  : new_empty(in, {blocks.count * rows, cols}, ScalarType::BFloat16);
  const auto run = [&]<typename T>() {
    launch_split(
        data<const T>(in), rows, cols, in.stride(0), blocks, side_by_side ? cols : rows * cols, out.stride(0),
        data<c10::BFloat16>(out), stream);
  };
  if (in.scalar_type() == ScalarType::BFloat16) {
    run.template operator()<c10::BFloat16>();
  } else {
    run.template operator()<float>();
  }
  return out;
}

// Computes the tokens' gradient in bfloat16, by products of parts.
void backward_x_by_parts(const Tensor& out, const Tensor& grad, const Tensor& weight, cudaStream_t stream) {
  const bool narrow = weight.scalar_type() == ScalarType::BFloat16;
  const Tensor left = split(grad, narrow ? kThreeParts : kLeftOfSix, true, stream);
  const Tensor right = split(weight, narrow ? kOnePart : kRightOfSix, false, stream);
  if (out.numel() >= kWholeSums) {
    mm_out(out, left, right);
  } else {
    Tensor target = out;
    torch::stable::copy_(target, mm_to_float(left, right));
  }
}

// Returns the weight's gradient [E, D] in float32 for bfloat16 tokens, by products of parts.
Tensor backward_weight_by_parts(const Tensor& grad, const Tensor& x, cudaStream_t stream) {
  const int64_t num_tokens = x.size(0), num_experts = grad.size(1), dim = x.size(1);
  const Tensor left = split(grad, kThreeParts, true, stream);
  const int64_t rows = kThreeParts.count * num_experts, num_sums = ceil_div(num_tokens, kSumTokens);
  const Tensor sums = new_empty(grad, {num_sums * kThreeParts.count, num_experts, dim});
  for (int64_t i = 0; i < num_sums; ++i) {
    const int64_t begin = i * kSumTokens, end = std::min(num_tokens, begin + kSumTokens);
    mm_to_float_out(
        grouped_gemm::view_of(sums, i * rows * dim, Matrix{rows, dim, dim, 1}),
        grouped_gemm::rows_transposed(left, begin, end), rows_of(x, begin, end));
  }
  return sum_over(sums, 0);
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
  const ScalarType acc = acc_dtype(dtype), given = weight.scalar_type();
  const Tensor out = new_empty(grad, {grad.size(0), weight.size(1)}, dtype);
  const bool in_parts = given == ScalarType::BFloat16 || given == ScalarType::Float;
  if (dtype == ScalarType::BFloat16 && in_parts && grad.numel() > 0 && out.numel() > 0) {
    backward_x_by_parts(out, grad, weight, device.stream());
    return out;
  }
  const Tensor wide = as_dtype(weight, acc), right = all_rows(wide);
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

// Returns grad^T x. The product of each part of the tokens has a matrix of its own; these are added in order.
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
  if (x.scalar_type() == ScalarType::BFloat16 && grad.numel() > 0 && dim > 0) {
    return as_dtype(backward_weight_by_parts(grad, x, device.stream()), dtype);
  }
  const int64_t rows = part_rows(dim * sizeof(float));
  const int64_t num_parts = ceil_div(x.size(0), rows);
  const Tensor parts = new_empty(grad, {num_parts, num_experts, dim});
  each_part(x.size(0), dim * sizeof(float), [&](int64_t begin, int64_t end) {
    mm_out(
        grouped_gemm::matrix_of(parts, begin / rows), grouped_gemm::rows_transposed(grad, begin, end),
        to(rows_of(x, begin, end), acc));
  });
  return as_dtype(sum_over(parts, 0), dtype);
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("router_logits", TORCH_BOX(&router_logits_cuda));
  m.impl("_router_logits_backward_x", TORCH_BOX(&backward_x_cuda));
  m.impl("_router_logits_backward_weight", TORCH_BOX(&backward_weight_cuda));
}

} // namespace moe_ext::router_linear
