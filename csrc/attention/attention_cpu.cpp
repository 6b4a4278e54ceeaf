// CPU side of block attention: FlashAttention-2 (Dao 2023) over tiles of queries and keys. The products of a tile are
// torch's, on one thread; the softmax between them is in attention_simd.cpp. A tile is cut to the rows and columns that
// see each other. Its products depend on this cut alone, so that bits do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "attention/block_cpu.h"
#include "common/cpu_isa.h"

namespace moe_ext::attention {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::new_empty;

// Wanted number of tasks of a backward pass. Each task sums the gradients of its keys in its own memory.
constexpr int64_t kTasksWanted = 16;

template <typename Acc>
struct ForwardScratch {
  ScoreTile<Acc> scores;
  ColumnScratch columns;
  std::vector<Acc> max = std::vector<Acc>(kTileRows), sum = std::vector<Acc>(kTileRows);
};

// Start the rows of a tile from a finished result (out, lse): sum 1, maximum LSE.
template <typename Acc>
void load_state(Acc* out, const Acc* lse, int64_t rows, int64_t dim, ForwardScratch<Acc>& scratch) {
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  for (int64_t row = 0; row < rows; ++row) {
    const bool empty = std::isinf(lse[row]);
    scratch.max[row] = empty ? kNone : lse[row];
    scratch.sum[row] = empty ? Acc(0) : Acc(1);
    if (empty) {
      std::fill_n(out + row * dim, dim, Acc(0));
    }
  }
}

template <typename Acc>
void forward_tile(
    const Block<Acc>& block, const Tensor& out, const Tensor& lse, int64_t b, int64_t h, int64_t row_tile,
    ForwardScratch<Acc>& scratch) {
  const int64_t dim = out.size(3), key_head = h / block.group();
  const int64_t first = row_tile * kTileRows, rows = std::min(block.num_queries, first + kTileRows) - first;
  const int64_t row0 = (b * block.heads + h) * block.num_queries + first;
  Acc* out_rows = data<Acc>(out) + row0 * dim;
  Acc* lse_rows = data<Acc>(lse) + row0;
  load_state(out_rows, lse_rows, rows, dim, scratch);
  const auto state_from = [&](int64_t row) {
    return RowState<Acc>{scratch.max.data() + row, scratch.sum.data() + row, out_rows + row * dim, dim};
  };
  block.each_visible(b, row_tile, [&](const VisibleTile& tile) {
    const TileArgs<Acc> args = block.tile_args(b, h, tile, scratch.columns);
    const Tensor scores = scratch.scores.view(block.q, args.rows, args.cols);
    mm_out(
        scores, rows_at(block.q, b, h, tile.row_begin, tile.row_end),
        columns_at(block.k, b, key_head, tile.col_begin, tile.col_end));
    kernels().block<Acc>().softmax(scratch.scores.data(), args, state_from(tile.row_begin - first));
    add_mm(
        rows_at(out, b, h, tile.row_begin, tile.row_end), scores,
        rows_at(block.v, b, key_head, tile.col_begin, tile.col_end));
  });
  kernels().block<Acc>().finish(lse_rows, state_from(0), rows);
}

// Add the block to a state (out, lse).
void accumulate(const char* op, const BlockArgs& args, const Tensor& out, const Tensor& lse) {
  dispatch_floating(acc_dtype(args.q.scalar_type()), [&]<typename T>() {
    using Acc = acc_t<T>;
    const Block<Acc> block(op, args);
    const int64_t tiles = block.num_row_tiles(), matrices = block.batch * block.heads;
    for_each_task<ForwardScratch<Acc>>(tiles * matrices, [&](int64_t task, ForwardScratch<Acc>& scratch) {
      // Under a causal mask the last tiles cost most. They come first, so that no thread ends late.
      const int64_t matrix = task % matrices, row_tile = tiles - 1 - task / matrices;
      forward_tile(block, out, lse, matrix / block.heads, matrix % block.heads, row_tile, scratch);
    });
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

std::tuple<Tensor, Tensor> attention_block_cpu(MOE_EXT_BLOCK_PARAMETERS) {
  const char* op = "attention_block";
  const BlockArgs args = MOE_EXT_BLOCK_VALUES;
  check_block(op, args);
  const ScalarType acc = acc_dtype(q.scalar_type());
  Tensor out = new_empty(q, {q.size(0), q.size(1), q.size(2), v.size(3)}, acc);
  Tensor lse = new_empty(q, {q.size(0), q.size(1), q.size(2)}, acc);
  torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  accumulate(op, args, out, lse);
  return {out, lse};
}

void attention_block_inplace_cpu(Tensor out, Tensor lse, MOE_EXT_BLOCK_PARAMETERS) {
  const char* op = "attention_block_";
  const BlockArgs args = MOE_EXT_BLOCK_VALUES;
  check_block(op, args);
  check_state(op, args, out, lse);
  accumulate(op, args, out, lse);
}

template <typename Acc>
struct BackwardScratch {
  ScoreTile<Acc> scores, grads;
  ColumnScratch columns;
};

// Tensors of a backward pass besides the block. grad_k and grad_v are [parts, B * Hkv, Sk, D]; grad_bias is [B, H, Sq,
// Sk] or empty.
struct Gradients {
  Tensor grad_out, lse, delta;
  Tensor grad_q, grad_k, grad_v, grad_bias;
};

// Process one query tile of one head: add its rows of grad_q, and its share of part `part` of grad_k and grad_v.
template <typename Acc>
void backward_tile(
    const Block<Acc>& block, const Gradients& g, int64_t part, int64_t b, int64_t h, int64_t row_tile,
    BackwardScratch<Acc>& scratch) {
  const int64_t key_head = h / block.group(), key_matrix = b * block.key_heads + key_head;
  block.each_visible(b, row_tile, [&](const VisibleTile& tile) {
    const auto [r0, r1, c0, c1, masked] = tile;
    TileArgs<Acc> args = block.tile_args(b, h, tile, scratch.columns);
    const int64_t row = (b * block.heads + h) * block.num_queries + r0;
    if (g.grad_bias.numel() > 0) {
      args.grad_bias_stride = block.num_keys;
      args.grad_bias = data<Acc>(g.grad_bias) + row * block.num_keys + c0;
    }
    const Tensor scores = scratch.scores.view(block.q, args.rows, args.cols);
    const Tensor grads = scratch.grads.view(block.q, args.rows, args.cols);
    const Tensor q_rows = rows_at(block.q, b, h, r0, r1), out_rows = rows_at(g.grad_out, b, h, r0, r1);
    mm_out(scores, q_rows, columns_at(block.k, b, key_head, c0, c1));
    mm_out(grads, out_rows, columns_at(block.v, b, key_head, c0, c1));
    kernels().block<Acc>().backward(
        scratch.scores.data(), scratch.grads.data(), args, data<Acc>(g.lse) + row, data<Acc>(g.delta) + row);
    add_mm(
        rows_at(g.grad_v, part, key_matrix, c0, c1), scratch.scores.transposed(block.q, args.rows, args.cols),
        out_rows);
    add_mm(rows_at(g.grad_q, b, h, r0, r1), grads, rows_at(block.k, b, key_head, c0, c1));
    add_mm(
        rows_at(g.grad_k, part, key_matrix, c0, c1), scratch.grads.transposed(block.q, args.rows, args.cols), q_rows);
  });
}

// sum[i] = parts[0][i] + parts[1][i] + ..., in this order.
template <typename Acc>
void sum_parts(const Tensor& sum, const Tensor& parts) {
  const int64_t size = sum.numel(), num_parts = parts.size(0);
  torch::stable::parallel_for(0, size, 16384, [&](int64_t begin, int64_t end) {
    Acc* __restrict to = data<Acc>(sum);
    std::copy_n(data<Acc>(parts) + begin, end - begin, to + begin);
    for (int64_t part = 1; part < num_parts; ++part) {
      const Acc* __restrict from = data<Acc>(parts) + part * size;
      for (int64_t i = begin; i < end; ++i) {
        to[i] += from[i];
      }
    }
  });
}

// Return memory [parts, B * Hkv, Sk, D] for the partial sums of `grad`; with one part it is the memory of `grad`.
Tensor parts_of(const Tensor& grad, int64_t parts) {
  const int64_t matrices = grad.size(0) * grad.size(1), keys = grad.size(2), dim = grad.size(3);
  const std::array<int64_t, 4> sizes = {parts, matrices, keys, dim};
  const std::array<int64_t, 4> strides = {matrices * keys * dim, keys * dim, dim, 1};
  return parts > 1 ? new_empty(grad, {parts, matrices, keys, dim})
                   : torch::stable::from_blob(grad.data_ptr(), sizes, strides, grad.device(), grad.scalar_type());
}

template <typename Acc>
void backward_block(const Block<Acc>& block, const Gradients& g) {
  const int64_t tiles = block.num_row_tiles(), group = block.group(), parts = g.grad_k.size(0);
  const int64_t key_matrices = block.batch * block.key_heads;
  std::fill_n(data<Acc>(g.grad_q), g.grad_q.numel(), Acc(0));
  for_each_task<BackwardScratch<Acc>>(key_matrices * parts, [&](int64_t task, BackwardScratch<Acc>& scratch) {
    const int64_t part = task / key_matrices, matrix = task % key_matrices;
    const int64_t b = matrix / block.key_heads, first_head = matrix % block.key_heads * group;
    for (const Tensor* grad : {&g.grad_k, &g.grad_v}) {
      const int64_t size = grad->size(2) * grad->size(3);
      std::fill_n(data<Acc>(*grad) + (part * key_matrices + matrix) * size, size, Acc(0));
    }
    // A part takes every parts-th tile, so that cheap and costly tiles are spread evenly under a causal mask.
    for (int64_t item = part; item < group * tiles; item += parts) {
      backward_tile(block, g, part, b, first_head + item / tiles, item % tiles, scratch);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_block_backward_cpu(
    Tensor grad_out, Tensor lse, Tensor delta, MOE_EXT_BLOCK_PARAMETERS, bool needs_grad_bias) {
  const BlockArgs args = MOE_EXT_BLOCK_VALUES;
  check_block_backward(args, grad_out, lse, delta);
  return dispatch_floating(acc_dtype(q.scalar_type()), [&]<typename T>() {
    using Acc = acc_t<T>;
    const Block<Acc> block("attention_block_backward", args);
    const ScalarType acc = acc_dtype(q.scalar_type());
    const int64_t matrices = block.batch * block.key_heads, keys = block.num_keys;
    const int64_t wanted = (kTasksWanted + matrices - 1) / std::max<int64_t>(1, matrices);
    const int64_t parts = std::clamp<int64_t>(block.group() * block.num_row_tiles(), 1, std::max<int64_t>(1, wanted));
    const Tensor grad_q = new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)}, acc);
    const Tensor grad_k = new_empty(q, {block.batch, block.key_heads, keys, k.size(3)}, acc);
    const Tensor grad_v = new_empty(q, {block.batch, block.key_heads, keys, v.size(3)}, acc);
    const bool wanted_bias = bias && needs_grad_bias;
    const Tensor grad_bias =
        wanted_bias ? new_empty(q, {q.size(0), q.size(1), q.size(2), keys}, acc) : new_empty(q, {0}, acc);
    std::fill_n(data<Acc>(grad_bias), grad_bias.numel(), Acc(0));
    Gradients g = {as_rows(grad_out, acc), dense(lse, acc), dense(delta, acc), grad_q, {}, {}, grad_bias};
    g.grad_k = parts_of(grad_k, parts);
    g.grad_v = parts_of(grad_v, parts);
    backward_block(block, g);
    if (parts > 1) {
      sum_parts<Acc>(grad_k, g.grad_k);
      sum_parts<Acc>(grad_v, g.grad_v);
    }
    return std::make_tuple(grad_q, grad_k, grad_v, grad_bias);
  });
}

Tensor attention_delta_cpu(
    Tensor grad_out,           // [B, H, S, D]
    Tensor out,                // [B, H, S, D]
    OptionalTensor grad_lse) { // [B, H, S]
  check_delta(grad_out, out, grad_lse);
  const ScalarType acc = grad_out.scalar_type();
  const Tensor grad = dense(grad_out, acc), o = dense(out, acc);
  const OptionalTensor of_lse = grad_lse ? OptionalTensor(dense(*grad_lse, acc)) : std::nullopt;
  Tensor delta = new_empty(grad_out, {out.size(0), out.size(1), out.size(2)}, acc);
  const int64_t dim = out.size(3);
  dispatch_floating(acc, [&]<typename T>() {
    using Acc = acc_t<T>;
    torch::stable::parallel_for(0, delta.numel(), grain_size(2 * dim * sizeof(Acc)), [&](int64_t begin, int64_t end) {
      kernels().block<Acc>().delta(
          data<Acc>(delta) + begin, data<Acc>(grad) + begin * dim, data<Acc>(o) + begin * dim,
          of_lse ? data<Acc>(*of_lse) + begin : nullptr, end - begin, dim);
    });
  });
  return delta;
}

// Both results with outputs in a common dtype, contiguous.
struct MergeTensors {
  Tensor out_a, lse_a, lse_b;
  OptionalTensor out_b;
  ScalarType dtype;

  MergeTensors(const Tensor& a, const Tensor& lse_a_in, const OptionalTensor& b, const Tensor& lse_b_in)
      : dtype(b && b->scalar_type() != a.scalar_type() ? acc_dtype(a.scalar_type()) : a.scalar_type()) {
    out_a = dense(a, dtype);
    lse_a = torch::stable::contiguous(lse_a_in);
    lse_b = torch::stable::contiguous(lse_b_in);
    if (b) {
      out_b = dense(*b, dtype);
    }
  }

  template <typename T>
  MergeArgs<T> args() const {
    return {
        data<T>(out_a), out_b ? data<T>(*out_b) : nullptr, data<acc_t<T>>(lse_a), data<acc_t<T>>(lse_b),
        out_a.size(out_a.dim() - 1)};
  }
};

std::tuple<Tensor, Tensor> merge_attention_cpu(Tensor out_a, Tensor lse_a, OptionalTensor out_b, Tensor lse_b) {
  check_merge("merge_attention", out_a, lse_a, out_b, lse_b);
  const MergeTensors in(out_a, lse_a, out_b, lse_b);
  Tensor out = new_empty(out_a, sizes_of(out_a), lse_a.scalar_type());
  Tensor lse = new_empty(lse_a, sizes_of(lse_a));
  dispatch_floating(in.dtype, [&]<typename T>() {
    const MergeArgs<T> args = in.args<T>();
    torch::stable::parallel_for(0, lse.numel(), grain_size(12 * args.dim), [&](int64_t begin, int64_t end) {
      kernels().merge.of<T>().merge(data<acc_t<T>>(out), data<acc_t<T>>(lse), args, begin, end);
    });
  });
  return {out, lse};
}

RowStrides row_strides(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2)};
}

void merge_attention_inplace_cpu(Tensor out, Tensor lse, Tensor out_b, Tensor lse_b) {
  check_merge_into(out, lse, out_b, lse_b);
  const Tensor other = out_b.stride(3) == 1 ? out_b : torch::stable::contiguous(out_b);
  dispatch_floating(other.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const MergeIntoArgs<T> args = {data<Acc>(out),   data<Acc>(lse),   data<const T>(other), data<const Acc>(lse_b),
                                   row_strides(out), row_strides(lse), row_strides(other),   row_strides(lse_b),
                                   out.size(0),      out.size(1),      out.size(2),          out.size(3)};
    torch::stable::parallel_for(0, lse.numel(), grain_size(12 * args.dim), [&](int64_t begin, int64_t end) {
      kernels().merge.of<T>().merge_into(args, begin, end);
    });
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_backward_cpu(
    Tensor grad_out, Tensor grad_lse, Tensor out_a, Tensor lse_a, OptionalTensor out_b, Tensor lse_b) {
  check_merge_backward(grad_out, grad_lse, out_a, lse_a, out_b, lse_b);
  const MergeTensors in(out_a, lse_a, out_b, lse_b);
  const Tensor grad = torch::stable::contiguous(grad_out), of_lse = torch::stable::contiguous(grad_lse);
  const std::vector<int64_t> sizes = sizes_of(out_a), rows = sizes_of(lse_a);
  Tensor grad_a = new_empty(out_a, sizes, in.dtype);
  Tensor grad_b = out_b ? new_empty(out_a, sizes, in.dtype) : new_empty(out_a, {0}, in.dtype);
  Tensor grad_lse_a = new_empty(lse_a, rows), grad_lse_b = new_empty(lse_a, rows);
  dispatch_floating(in.dtype, [&]<typename T>() {
    using Acc = acc_t<T>;
    const MergeArgs<T> args = in.args<T>();
    const MergeGrads<T> grads = {data<Acc>(grad),       data<Acc>(of_lse),
                                 data<T>(grad_a),       out_b ? data<T>(grad_b) : nullptr,
                                 data<Acc>(grad_lse_a), data<Acc>(grad_lse_b)};
    torch::stable::parallel_for(0, lse_a.numel(), grain_size(16 * args.dim), [&](int64_t begin, int64_t end) {
      kernels().merge.of<T>().merge_backward(grads, args, begin, end);
    });
  });
  const auto as = [&](const Tensor& t, const Tensor& like) {
    return t.scalar_type() == like.scalar_type() ? t : torch::stable::to(t, like.scalar_type());
  };
  return {as(grad_a, out_a), grad_lse_a, out_b ? as(grad_b, *out_b) : grad_b, grad_lse_b};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("attention_block", TORCH_BOX(&attention_block_cpu));
  m.impl("attention_block_", TORCH_BOX(&attention_block_inplace_cpu));
  m.impl("attention_block_backward", TORCH_BOX(&attention_block_backward_cpu));
  m.impl("attention_delta", TORCH_BOX(&attention_delta_cpu));
  m.impl("merge_attention", TORCH_BOX(&merge_attention_cpu));
  m.impl("merge_attention_", TORCH_BOX(&merge_attention_inplace_cpu));
  m.impl("_merge_attention_backward", TORCH_BOX(&merge_backward_cpu));
}

} // namespace moe_ext::attention
