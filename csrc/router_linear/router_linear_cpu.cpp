// Router product on CPU: library products in float over tiles of a fixed number of rows, which are converted while they
// are in the cache. The last tile is padded with zeros to the same number of rows, because the library orders its sums
// by the shape of a product. A token's logits therefore have the same bits in any batch and for any number of threads.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "grouped_gemm/per_expert.h"
#include "grouped_gemm/tiles.h"
#include "router_linear/router_linear.h"
#include "router_linear/router_linear_tables.h"

namespace moe_ext::router_linear {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using grouped_gemm::mm_out;
using grouped_gemm::rows_of;
using grouped_gemm::Tile;
using grouped_gemm::view_of;

constexpr int64_t kTileRows = 128;
// Rows that a thread takes at a time. All tiles of a span share one scratch matrix.
constexpr int64_t kSpanRows = 512;
// Largest number of parts into which a sum over tokens is cut. Each part has a matrix of its own.
constexpr int64_t kMostParts = 16;

std::vector<Tile> spans(int64_t num_rows, int64_t span_rows) {
  std::vector<Tile> tiles;
  for (int64_t begin = 0; begin < num_rows; begin += span_rows) {
    tiles.push_back({0, begin, std::min(num_rows, begin + span_rows)});
  }
  return tiles;
}

// A matrix of kTileRows rows in Acc, with its memory.
template <typename Acc>
struct Scratch {
  std::unique_ptr<Acc[]> memory;
  Tensor matrix;

  explicit Scratch(int64_t cols, const Tensor& like) : memory(new Acc[kTileRows * cols]) {
    const std::array<int64_t, 2> sizes = {kTileRows, cols}, strides = {cols, 1};
    const ScalarType dtype = sizeof(Acc) == 8 ? ScalarType::Double : ScalarType::Float;
    matrix = torch::stable::from_blob(memory.get(), sizes, strides, like.device(), dtype);
  }
};

Tensor with_dense_rows(const Tensor& t) {
  return t.stride(1) == 1 || t.size(1) <= 1 ? t : as_contiguous(t);
}

Tensor dense(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype || acc_dtype(t.scalar_type()) != dtype) {
    return as_contiguous(t.scalar_type() == dtype ? t : torch::stable::to(t, dtype));
  }
  // Converted by our own loop, because a call of the dispatcher takes longer than the product of few tokens.
  const Tensor in = as_contiguous(t);
  Tensor out = new_on_cpu({t.size(0), t.size(1)}, dtype);
  dispatch_floating(
      t.scalar_type(), [&]<typename T>() { kernels().of<T>().widen(data<acc_t<T>>(out), data<T>(in), in.numel()); });
  return out;
}

// Writes rows [begin, end) of `in`, converted, and then rows of zeros, kTileRows in all.
template <typename T>
void fill(acc_t<T>* out, const Tensor& in, int64_t begin, int64_t end) {
  const int64_t cols = in.size(1);
  for (int64_t row = begin; row < end; ++row) {
    kernels().of<T>().widen(out + (row - begin) * cols, data<T>(in) + row * in.stride(0), cols);
  }
  std::fill(out + (end - begin) * cols, out + kTileRows * cols, acc_t<T>(0));
}

// Computes out = in @ right, [N, K] @ [K, M], by tiles of rows. In and Out may be narrower than Acc, the dtype of the
// product. A whole tile that needs no conversion is used without a copy.
template <typename In, typename Out, typename Acc>
void tiled_product(const Tensor& out, const Tensor& in, const Tensor& right) {
  constexpr bool kConvertIn = !std::is_same_v<In, Acc>, kConvertOut = !std::is_same_v<Out, Acc>;
  const int64_t out_cols = right.size(1);
  grouped_gemm::for_each_tile(spans(in.size(0), kSpanRows), [&](const Tile& span) {
    const bool ragged = (span.end - span.begin) % kTileRows != 0;
    std::optional<Scratch<Acc>> from, to;
    if (kConvertIn || ragged) {
      from.emplace(in.size(1), in);
    }
    if (kConvertOut || ragged) {
      to.emplace(out_cols, in);
    }
    for (int64_t begin = span.begin; begin < span.end; begin += kTileRows) {
      const int64_t end = std::min(span.end, begin + kTileRows);
      const bool whole = end - begin == kTileRows;
      const bool copy_in = kConvertIn || !whole, copy_out = kConvertOut || !whole;
      if (copy_in) {
        fill<In>(from->memory.get(), in, begin, end);
      }
      mm_out(copy_out ? to->matrix : rows_of(out, begin, end), copy_in ? from->matrix : rows_of(in, begin, end), right);
      if (copy_out) {
        kernels().of<Out>().narrow(data<Out>(out) + begin * out_cols, to->memory.get(), (end - begin) * out_cols);
      }
    }
  });
}

Tensor router_logits_cpu(
    Tensor x,        // [T, D]
    Tensor weight) { // [E, D]
  check_router_logits(x, weight);
  const ScalarType acc = acc_dtype(x.scalar_type());
  const Tensor in = with_dense_rows(x), w = dense(weight, acc);
  Tensor out = new_on_cpu({x.size(0), weight.size(0)}, acc);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    tiled_product<T, acc_t<T>, acc_t<T>>(out, in, grouped_gemm::rows_transposed(w, 0, w.size(0)));
  });
  return out;
}

Tensor backward_x_cpu(
    Tensor grad,        // [T, E]
    Tensor weight,      // [E, D]
    ScalarType dtype) { // of x
  check_backward_x(grad, weight, dtype);
  const Tensor in = with_dense_rows(grad), w = dense(weight, acc_dtype(dtype));
  Tensor out = new_on_cpu({grad.size(0), weight.size(1)}, dtype);
  dispatch_floating(
      dtype, [&]<typename T>() { tiled_product<acc_t<T>, T, acc_t<T>>(out, in, rows_of(w, 0, w.size(0))); });
  return out;
}

// Computes sum += left^T right.
void add_outer_products(const Tensor& sum, const Tensor& left, const Tensor& right) {
  const Tensor transposed = grouped_gemm::rows_transposed(left, 0, left.size(0));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(sum.get(), sum.get(), transposed.get(), right.get(), 1.0, 1.0));
}

// Sets parts[p] to the sum over the tokens of part p.
template <typename T>
void sum_parts(const Tensor& parts, const Tensor& grad, const Tensor& x, int64_t part_rows) {
  const int64_t size = parts.size(1) * parts.size(2);
  const std::vector<Tile> tiles = spans(x.size(0), part_rows);
  grouped_gemm::for_each_tile(tiles, [&](const Tile& part) {
    const int64_t p = part.begin / part_rows;
    const Tensor sum = grouped_gemm::matrix_of(parts, p);
    std::fill_n(data<acc_t<T>>(parts) + p * size, size, acc_t<T>(0));
    std::optional<Scratch<acc_t<T>>> converted;
    if constexpr (!std::is_same_v<T, acc_t<T>>) {
      converted.emplace(x.size(1), grad);
    }
    for (int64_t begin = part.begin; begin < part.end; begin += kTileRows) {
      const int64_t end = std::min(part.end, begin + kTileRows);
      if (converted) {
        fill<T>(converted->memory.get(), x, begin, end);
      }
      const Tensor rows = converted ? rows_of(converted->matrix, 0, end - begin) : rows_of(x, begin, end);
      add_outer_products(sum, rows_of(grad, begin, end), rows);
    }
  });
}

Tensor backward_weight_cpu(
    Tensor grad,        // [T, E]
    Tensor x,           // [T, D]
    ScalarType dtype) { // of the weight
  check_backward_weight(grad, x, dtype);
  const int64_t num_tokens = x.size(0), num_experts = grad.size(1), dim = x.size(1);
  const Tensor in = with_dense_rows(x), rows_grad = with_dense_rows(grad);
  // All parts but the last have the same number of whole tiles.
  const int64_t num_tiles = (num_tokens + kTileRows - 1) / kTileRows;
  const int64_t part_rows = std::max<int64_t>(1, (num_tiles + kMostParts - 1) / kMostParts) * kTileRows;
  const int64_t num_parts = (num_tokens + part_rows - 1) / part_rows;
  const Tensor parts = new_on_cpu({num_parts, num_experts, dim}, grad.scalar_type());
  Tensor out = new_on_cpu({num_experts, dim}, dtype);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    sum_parts<T>(parts, rows_grad, in, part_rows);
    const int64_t size = num_experts * dim;
    std::vector<Acc> total(size, 0);
    for (int64_t p = 0; p < num_parts; ++p) {
      const Acc* part = data<Acc>(parts) + p * size;
      for (int64_t i = 0; i < size; ++i) {
        total[i] += part[i];
      }
    }
    dispatch_floating(dtype, [&]<typename W>() {
      for (int64_t i = 0; i < size; ++i) {
        data<W>(out)[i] = from_acc<W>(static_cast<acc_t<W>>(total[i]));
      }
    });
  });
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("router_logits", TORCH_BOX(&router_logits_cpu));
  m.impl("_router_logits_backward_x", TORCH_BOX(&backward_x_cpu));
  m.impl("_router_logits_backward_weight", TORCH_BOX(&backward_weight_cpu));
}

} // namespace moe_ext::router_linear
