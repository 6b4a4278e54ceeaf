// CUDA side of block attention: allocates and launches, and never waits for the device.
#include <limits>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_kernels.cuh"
#include "attention/backward_kernels.cuh"
#include "attention/merge_kernels.cuh"
#include "attention/tensor_kernels.cuh"
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"

namespace moe_ext::attention {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

Tensor dense_as(const Tensor& t, ScalarType dtype) {
  return contiguous(t.scalar_type() == dtype ? t : torch::stable::to(t, dtype));
}

// Return t with adjacent columns, copied only if needed.
Tensor as_rows(const Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : contiguous(t);
}

template <typename T>
Heads<T> heads_of(const char* op, const char* name, const Tensor& t) {
  bool aligned = is_aligned(t.data_ptr(), std::min<int64_t>(kAccessBytes, 4 * sizeof(T)));
  for (int64_t i = 0; i < 3; ++i) {
    aligned = aligned && (t.stride(i) % 4 == 0 || t.size(i) == 1);
  }
  const int cols = check_int32(op, name, t.size(3));
  return {data<const T>(t), t.stride(0), t.stride(1), t.stride(2), t.size(2), cols, aligned};
}

// Return true if the rows of a 16-bit tensor suit asynchronous copies and tensor cores.
bool has_rows_of_16_bytes(const Tensor& t) {
  bool aligned = is_aligned(t.data_ptr(), kAccessBytes);
  for (int64_t i = 0; i < 3; ++i) {
    aligned = aligned && (t.stride(i) % 8 == 0 || t.size(i) == 1);
  }
  return aligned;
}

TokenTiles token_tiles(const Tensor& workspace, int64_t num_tiles, int64_t num_sequences) {
  return {static_cast<TokenTile*>(workspace.data_ptr()), static_cast<int>(num_tiles), num_sequences};
}

Tensor token_workspace(const Tensor& like, int64_t num_tiles) {
  return new_empty(like, {num_tiles * static_cast<int64_t>(sizeof(TokenTile))}, ScalarType::Byte);
}

// A block's arguments in the form of the kernels, and the tensors that own the memory they point to.
template <typename T>
struct __attribute__((visibility("hidden"))) Block {
  Tensor q, k, v, q_tiles, k_tiles;
  OptionalTensor slopes, bias, seed;
  BlockParams<T> params;
  bool tensor_cores; // tensor cores may be used if a pass accepts the head dims

  Block(const char* op, const BlockArgs& args, cudaStream_t stream)
      : q(as_rows(args.q)), k(as_rows(args.k)), v(as_rows(args.v)), seed(optional_contiguous(args.seed)) {
    if (args.alibi_slopes) {
      slopes = dense_as(*args.alibi_slopes, acc_dtype(q.scalar_type()));
    }
    Bias<acc_t<T>> of_bias = {};
    if (args.bias) {
      const ScalarType acc = acc_dtype(q.scalar_type());
      bias = as_rows(args.bias->scalar_type() == acc ? *args.bias : torch::stable::to(*args.bias, acc));
      // A dimension of size 1 is broadcast by stride 0.
      const auto stride = [&](int64_t dim) { return bias->size(dim) > 1 ? bias->stride(dim) : int64_t{0}; };
      of_bias = {data<const acc_t<T>>(*bias), stride(0), stride(1), bias->stride(2)};
    }
    const int64_t batch = q.size(0), heads = q.size(1);
    const bool drops = args.dropout_p > 0;
    const Dropout dropout = drops ? dropout_of(args.dropout_p, 0) : Dropout{0, 0, 1.0};
    params = {
        heads_of<T>(op, "the head dim of q", q),
        heads_of<T>(op, "the head dim of k", k),
        heads_of<T>(op, "the head dim of v", v),
        {},
        {},
        data_or_null<acc_t<T>>(slopes),
        data_or_null<int64_t>(seed),
        static_cast<acc_t<T>>(args.scale),
        static_cast<acc_t<T>>(args.softcap),
        effective_window(args.causal, args.window_left, args.window_right),
        dropout.threshold,
        static_cast<acc_t<T>>(dropout.inv_keep),
        batch,
        heads,
        k.size(1),
        args.batch_offset,
        args.head_offset,
        of_bias};
    tensor_cores = has_rows_of_16_bytes(q) && has_rows_of_16_bytes(k) && has_rows_of_16_bytes(v) &&
                   device_properties().compute_capability >= 8;
    describe(op, args, stream);
  }

  void describe(const char* op, const BlockArgs& args, cudaStream_t stream) {
    const int64_t query_tiles = ceil_div(q.size(2), int64_t{kTile}), key_tiles = ceil_div(k.size(2), int64_t{kTile});
    const int64_t sequences = args.key_mask ? params.batch : 1;
    // An upper bound for every grid, because a chunk has at least 64 columns.
    const int64_t chunks = std::max<int64_t>(1, ceil_div(std::max(k.size(3), v.size(3)), int64_t{kGroupCols}));
    const int64_t matrices = params.batch * std::max<int64_t>(1, params.heads);
    check_int32(op, "the tiles of queries and keys", (query_tiles + key_tiles) * matrices * chunks);
    q_tiles = token_workspace(q, query_tiles);
    k_tiles = token_workspace(q, key_tiles * sequences);
    params.queries = token_tiles(q_tiles, query_tiles, 1);
    params.keys = token_tiles(k_tiles, key_tiles, sequences);
    const Tensor q_at = contiguous(args.q_positions), k_at = contiguous(args.k_positions);
    const OptionalTensor q_in = optional_contiguous(args.q_documents), k_in = optional_contiguous(args.k_documents);
    const OptionalTensor mask = optional_contiguous(args.key_mask);
    launch_describe_tokens<kCheckIndices>(
        {data<const int64_t>(q_at), data_or_null<int64_t>(q_in), nullptr, q.size(2)}, params.queries,
        {data<const int64_t>(k_at), data_or_null<int64_t>(k_in), data_or_null<bool>(mask), k.size(2)}, params.keys,
        stream);
  }
};

// Add the block to a state (out, lse). If `fresh`, start a state, whose memory may be uninitialised.
void attend(const char* op, const BlockArgs& args, const Tensor& out, const Tensor& lse, bool fresh) {
  const DeviceScope device(args.q);
  dispatch_floating_cuda(args.q.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const Block<T> block(op, args, device.stream());
    const int cols = block.params.v.cols;
    // Thread blocks for other columns of the same rows must read the old LSE, which the block of the first columns
    // overwrites.
    const Tensor before = fresh || cols <= kGroupCols ? lse : torch::stable::clone(lse);
    const bool aligned = cols % 4 == 0 && is_aligned(out.data_ptr(), kAccessBytes);
    const ForwardState<Acc> state{
        data<Acc>(out), data<Acc>(lse), fresh ? nullptr : data<const Acc>(before), cols, aligned};
    if constexpr (kHasTensorCores<T>) {
      if (block.tensor_cores && aligned && tensor_forward_takes(block.params)) {
        return launch_tensor_forward(block.params, state, device.stream());
      }
    }
    launch_forward(block.params, state, device.stream());
  });
}

#define MOE_EXT_BLOCK_PARAMETERS                                                                                 \
  Tensor q, Tensor k, Tensor v, Tensor q_positions, Tensor k_positions, OptionalTensor q_documents,              \
      OptionalTensor k_documents, OptionalTensor key_mask, OptionalTensor alibi_slopes, OptionalTensor bias,     \
      OptionalTensor seed, double scale, bool causal, int64_t window_left, int64_t window_right, double softcap, \
      double dropout_p, int64_t batch_offset, int64_t head_offset
#define MOE_EXT_BLOCK_VALUES                                                                                   \
  {q,    k,     v,      q_positions, k_positions,  q_documents, k_documents, key_mask,     alibi_slopes, bias, \
   seed, scale, causal, window_left, window_right, softcap,     dropout_p,   batch_offset, head_offset}

std::tuple<Tensor, Tensor> attention_block_cuda(MOE_EXT_BLOCK_PARAMETERS) {
  const BlockArgs args = MOE_EXT_BLOCK_VALUES;
  check_block("attention_block", args);
  const ScalarType acc = acc_dtype(q.scalar_type());
  const Tensor out = new_empty(q, {q.size(0), q.size(1), q.size(2), v.size(3)}, acc);
  const Tensor lse = new_empty(q, {q.size(0), q.size(1), q.size(2)}, acc);
  attend("attention_block", args, out, lse, true);
  return {out, lse};
}

void attention_block_inplace_cuda(Tensor out, Tensor lse, MOE_EXT_BLOCK_PARAMETERS) {
  const BlockArgs args = MOE_EXT_BLOCK_VALUES;
  check_block("attention_block_", args);
  check_state("attention_block_", args, out, lse);
  attend("attention_block_", args, out, lse, false);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_block_backward_cuda(
    Tensor grad_out, Tensor lse, Tensor delta, MOE_EXT_BLOCK_PARAMETERS, bool needs_grad_bias) {
  const char* op = "attention_block_backward";
  const BlockArgs args = MOE_EXT_BLOCK_VALUES;
  check_block_backward(args, grad_out, lse, delta);
  const DeviceScope device(q);
  const ScalarType acc = acc_dtype(q.scalar_type());
  const Tensor grad_q = new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)}, acc);
  const Tensor grad_k = new_empty(q, {k.size(0), k.size(1), k.size(2), k.size(3)}, acc);
  const Tensor grad_v = new_empty(q, {v.size(0), v.size(1), v.size(2), v.size(3)}, acc);
  const bool wanted_bias = bias && needs_grad_bias;
  Tensor grad_bias =
      wanted_bias ? new_empty(q, {q.size(0), q.size(1), q.size(2), k.size(2)}, acc) : new_empty(q, {0}, acc);
  torch::stable::zero_(grad_bias);
  const Tensor grad = as_rows(grad_out), of_lse = contiguous(lse), of_delta = contiguous(delta);
  dispatch_floating_cuda(q.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const Block<T> block(op, args, device.stream());
    const BackwardArrays<Acc> arrays{
        heads_of<Acc>(op, "the head dim of grad_out", grad),
        data<const Acc>(of_lse),
        data<const Acc>(of_delta),
        data<Acc>(grad_q),
        data<Acc>(grad_k),
        data<Acc>(grad_v),
        wanted_bias ? data<Acc>(grad_bias) : nullptr};
    if constexpr (kHasTensorGradients<T>) {
      if (block.tensor_cores && arrays.grad_out.aligned && tensor_backward_takes(block.params)) {
        return launch_tensor_backward(block.params, arrays, device.stream());
      }
    }
    launch_backward(block.params, arrays, device.stream());
  });
  return {grad_q, grad_k, grad_v, grad_bias};
}

Tensor attention_delta_cuda(
    Tensor grad_out,           // [B, H, S, D]
    Tensor out,                // [B, H, S, D]
    OptionalTensor grad_lse) { // [B, H, S]
  check_delta(grad_out, out, grad_lse);
  const DeviceScope device(grad_out);
  const Tensor grad = contiguous(grad_out), o = contiguous(out);
  const OptionalTensor of_lse = optional_contiguous(grad_lse);
  const Tensor delta = new_empty(grad, {out.size(0), out.size(1), out.size(2)});
  const auto launch_for = [&]<typename Acc>(Acc) {
    launch_delta(
        data<const Acc>(grad), data<const Acc>(o), data_or_null<Acc>(of_lse), delta.numel(), out.size(3),
        data<Acc>(delta), device.stream());
  };
  grad.scalar_type() == ScalarType::Double ? launch_for(double{}) : launch_for(float{});
  return delta;
}

// Both results with outputs in a common dtype, contiguous.
struct __attribute__((visibility("hidden"))) MergeTensors {
  Tensor out_a, lse_a, lse_b;
  OptionalTensor out_b;
  ScalarType dtype;

  MergeTensors(const Tensor& a, const Tensor& lse_a_in, const OptionalTensor& b, const Tensor& lse_b_in)
      : lse_a(contiguous(lse_a_in)),
        lse_b(contiguous(lse_b_in)),
        dtype(b && b->scalar_type() != a.scalar_type() ? acc_dtype(a.scalar_type()) : a.scalar_type()) {
    out_a = dense_as(a, dtype);
    if (b) {
      out_b = dense_as(*b, dtype);
    }
  }

  template <typename T>
  MergeArgs<T> args() const {
    return {
        data<const T>(out_a), data_or_null<T>(out_b), data<const acc_t<T>>(lse_a), data<const acc_t<T>>(lse_b),
        out_a.size(out_a.dim() - 1)};
  }
};

std::tuple<Tensor, Tensor> merge_attention_cuda(Tensor out_a, Tensor lse_a, OptionalTensor out_b, Tensor lse_b) {
  check_merge("merge_attention", out_a, lse_a, out_b, lse_b);
  const DeviceScope device(out_a);
  const MergeTensors in(out_a, lse_a, out_b, lse_b);
  const Tensor out = new_empty(out_a, sizes_of(out_a), lse_a.scalar_type());
  const Tensor lse = new_empty(lse_a, sizes_of(lse_a));
  dispatch_floating_cuda(in.dtype, [&]<typename T>() {
    launch_merge(in.args<T>(), lse.numel(), data<acc_t<T>>(out), data<acc_t<T>>(lse), device.stream());
  });
  return {out, lse};
}

void merge_attention_inplace_cuda(Tensor out, Tensor lse, Tensor out_b, Tensor lse_b) {
  check_merge_into(out, lse, out_b, lse_b);
  const DeviceScope device(out);
  const Tensor other = as_rows(out_b);
  const auto strides = [](const Tensor& t) { return RowStrides{t.stride(0), t.stride(1), t.stride(2)}; };
  dispatch_floating_cuda(other.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const MergeIntoArgs<T> args = {data<Acc>(out), data<Acc>(lse), data<const T>(other), data<const Acc>(lse_b),
                                   strides(out),   strides(lse),   strides(other),       strides(lse_b),
                                   out.size(0),    out.size(1),    out.size(2),          out.size(3)};
    launch_merge_into(args, device.stream());
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_backward_cuda(
    Tensor grad_out, Tensor grad_lse, Tensor out_a, Tensor lse_a, OptionalTensor out_b, Tensor lse_b) {
  check_merge_backward(grad_out, grad_lse, out_a, lse_a, out_b, lse_b);
  const DeviceScope device(out_a);
  const MergeTensors in(out_a, lse_a, out_b, lse_b);
  const Tensor grad = contiguous(grad_out), of_lse = contiguous(grad_lse);
  const std::vector<int64_t> sizes = sizes_of(out_a), rows = sizes_of(lse_a);
  const Tensor grad_a = new_empty(out_a, sizes, in.dtype);
  const Tensor grad_b = out_b ? new_empty(out_a, sizes, in.dtype) : new_empty(out_a, {0}, in.dtype);
  const Tensor grad_lse_a = new_empty(lse_a, rows), grad_lse_b = new_empty(lse_a, rows);
  dispatch_floating_cuda(in.dtype, [&]<typename T>() {
    using Acc = acc_t<T>;
    const MergeGrads<T> grads = {data<Acc>(grad),       data<Acc>(of_lse),
                                 data<T>(grad_a),       out_b ? data<T>(grad_b) : nullptr,
                                 data<Acc>(grad_lse_a), data<Acc>(grad_lse_b)};
    launch_merge_backward(grads, in.args<T>(), lse_a.numel(), device.stream());
  });
  const auto as = [](const Tensor& t, const Tensor& like) {
    return t.scalar_type() == like.scalar_type() ? t : torch::stable::to(t, like.scalar_type());
  };
  return {as(grad_a, out_a), grad_lse_a, out_b ? as(grad_b, *out_b) : grad_b, grad_lse_b};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("attention_block", TORCH_BOX(&attention_block_cuda));
  m.impl("attention_block_", TORCH_BOX(&attention_block_inplace_cuda));
  m.impl("attention_block_backward", TORCH_BOX(&attention_block_backward_cuda));
  m.impl("attention_delta", TORCH_BOX(&attention_delta_cuda));
  m.impl("merge_attention", TORCH_BOX(&merge_attention_cuda));
  m.impl("merge_attention_", TORCH_BOX(&merge_attention_inplace_cuda));
  m.impl("_merge_attention_backward", TORCH_BOX(&merge_backward_cuda));
}

} // namespace moe_ext::attention
