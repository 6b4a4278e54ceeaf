// CPU side of the activations. Work is cut into pieces whose bounds do not depend on the number of threads: the vector
// body and the scalar tail of a loop may round differently, so which element falls where must not move.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "activation/activation.h"
#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"

namespace moe_ext::activation {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

constexpr int64_t kPiece = 4096;

// f(first, count) over [0, n) in pieces of kPiece elements.
template <typename F>
void for_each_piece(int64_t n, int64_t bytes_per_element, F&& f) {
  const int64_t num_pieces = (n + kPiece - 1) / kPiece;
  torch::stable::parallel_for(0, num_pieces, grain_size(kPiece * bytes_per_element), [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      f(piece * kPiece, std::min(kPiece, n - piece * kPiece));
    }
  });
}

Tensor activation_cpu(Tensor x, std::string kind_name) {
  const Kind kind = check_activation("activation", x, kind_name);
  const Tensor in = as_contiguous(x);
  const Tensor out = on_huge_pages(torch::stable::empty_like(in));
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    for_each_piece(in.numel(), 2 * sizeof(T), [&](int64_t first, int64_t n) {
      kernels().of<T>().activation(kind, data<T>(out) + first, data<T>(in) + first, n);
    });
  });
  return out;
}

Tensor activation_backward_cpu(Tensor grad, Tensor x, std::string kind_name) {
  const char* op = "_activation_backward";
  const Kind kind = check_activation(op, x, kind_name);
  check_grad(op, grad, x, x.dim() == 0 ? 1 : x.size(x.dim() - 1));
  const Tensor g = as_contiguous(grad);
  const Tensor in = as_contiguous(x);
  const Tensor out = on_huge_pages(torch::stable::empty_like(in));
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    for_each_piece(in.numel(), 3 * sizeof(T), [&](int64_t first, int64_t n) {
      kernels().of<T>().activation_backward(kind, data<T>(out) + first, data<T>(g) + first, data<T>(in) + first, n);
    });
  });
  return out;
}

// f(first, gate, count): `count` outputs from flat index `first`, whose first gate is at flat index `gate`.
// Interleaved rows follow each other without a seam, concatenated ones are taken one by one.
template <typename F>
void for_each_run(Layout layout, int64_t num_outputs, int64_t dim, int64_t bytes_per_output, F&& f) {
  if (layout == Layout::kInterleaved) {
    for_each_piece(num_outputs, bytes_per_output, [&](int64_t first, int64_t n) { f(first, 2 * first, n); });
    return;
  }
  const int64_t num_rows = dim == 0 ? 0 : num_outputs / dim;
  const int64_t pieces_per_row = (dim + kPiece - 1) / kPiece;
  const int64_t bytes_per_piece = std::min(dim, kPiece) * bytes_per_output;
  torch::stable::parallel_for(
      0, num_rows * pieces_per_row, grain_size(bytes_per_piece), [&](int64_t begin, int64_t end) {
        for (int64_t piece = begin; piece < end; ++piece) {
          const int64_t row = piece / pieces_per_row;
          const int64_t col = piece % pieces_per_row * kPiece;
          f(row * dim + col, row * 2 * dim + col, std::min(kPiece, dim - col));
        }
      });
}

Tensor gated_activation_cpu(Tensor x, std::string kind_name, std::string layout_name) {
  const auto [kind, layout] = check_gated("gated_activation", x, kind_name, layout_name);
  const Tensor in = as_contiguous(x);
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < x.dim(); ++i) {
    shape.push_back(x.size(i));
  }
  shape.back() /= 2;
  const Tensor out = new_on_cpu(shape, in.scalar_type());
  dispatch_floating(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    const auto run = [&](int64_t first, int64_t gate, int64_t n) {
      kernels().of<T>().gated(kind, layout, data<T>(out) + first, data<T>(in) + gate, shape.back(), n);
    };
    for_each_run(layout, out.numel(), shape.back(), 3 * sizeof(T), run);
  });
  return out;
}

Tensor gated_activation_backward_cpu(Tensor grad, Tensor x, std::string kind_name, std::string layout_name) {
  const char* op = "_gated_activation_backward";
  const auto [kind, layout] = check_gated(op, x, kind_name, layout_name);
  const int64_t dim = x.size(x.dim() - 1) / 2;
  check_grad(op, grad, x, dim);
  const Tensor g = as_contiguous(grad);
  const Tensor in = as_contiguous(x);
  const Tensor out = on_huge_pages(torch::stable::empty_like(in));
  dispatch_floating(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    const auto run = [&](int64_t first, int64_t gate, int64_t n) {
      kernels().of<T>().gated_backward(
          kind, layout, data<T>(out) + gate, data<T>(g) + first, data<T>(in) + gate, dim, n);
    };
    for_each_run(layout, g.numel(), dim, 5 * sizeof(T), run);
  });
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("activation", TORCH_BOX(&activation_cpu));
  m.impl("_activation_backward", TORCH_BOX(&activation_backward_cpu));
  m.impl("gated_activation", TORCH_BOX(&gated_activation_cpu));
  m.impl("_gated_activation_backward", TORCH_BOX(&gated_activation_backward_cpu));
}

} // namespace moe_ext::activation
