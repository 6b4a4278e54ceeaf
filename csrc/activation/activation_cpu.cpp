// CPU side of the activations. The vector body and the scalar tail of a loop may round differently. Therefore work is
// cut into pieces whose bounds do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "activation/activation.h"
#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"

namespace moe_ext::activation {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

constexpr int64_t kPiece = 4096;

// Call f(first, count) for pieces of kPiece elements of [0, n).
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

// Call f(first, gate, count) for runs of `count` outputs: outputs begin at flat index `first`, their gates at flat
// index `gate`. A run may span rows if their layout is interleaved, but not if it is concatenated.
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

// Call f(row, slot) for every row. The slot of a padding row is -1.
template <typename F>
void for_each_row(const char* op, const Tensor& slot_of_row, int64_t num_slots, int64_t bytes_per_row, F&& f) {
  const int64_t* slots = data<int64_t>(slot_of_row);
  const int64_t num_rows = slot_of_row.numel();
  for (int64_t row = 0; row < num_rows; ++row) {
    MOE_CHECK(
        slots[row] >= -1 && slots[row] < num_slots, op, ": expected slot_of_row to be in [0, ", num_slots,
        ") or -1, got ", slots[row], " at position ", row);
  }
  torch::stable::parallel_for(0, num_rows, grain_size(bytes_per_row), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      f(row, slots[row]);
    }
  });
}

Tensor gated_activation_cpu(
    Tensor x, std::string kind_name, std::string layout_name, std::optional<Tensor> slot_weights,
    std::optional<Tensor> slot_of_row) {
  const char* op = "gated_activation";
  const auto [kind, layout] = check_gated(op, x, kind_name, layout_name);
  check_row_weights(op, x, slot_weights, slot_of_row);
  const Tensor in = as_contiguous(x);
  std::vector<int64_t> shape = sizes_of(x);
  const int64_t dim = shape.back() /= 2;
  const Tensor out = new_on_cpu(shape, in.scalar_type());
  dispatch_floating(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    const auto run = [&](int64_t first, int64_t gate, acc_t<T> weight, int64_t n) {
      kernels().of<T>().gated(kind, layout, data<T>(out) + first, data<T>(in) + gate, weight, dim, n);
    };
    if (!slot_weights) {
      for_each_run(layout, out.numel(), dim, 3 * sizeof(T), [&](int64_t first, int64_t gate, int64_t n) {
        run(first, gate, 1, n);
      });
      return;
    }
    const Tensor weights = as_contiguous(*slot_weights);
    const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(T));
    for_each_row(op, as_contiguous(*slot_of_row), weights.numel(), 3 * row_bytes, [&](int64_t row, int64_t slot) {
      if (slot < 0) {
        std::memset(data<T>(out) + row * dim, 0, row_bytes);
      } else {
        run(row * dim, row * 2 * dim, data<acc_t<T>>(weights)[slot], dim);
      }
    });
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

std::tuple<Tensor, Tensor> gated_activation_backward_weighted_cpu(
    Tensor grad, Tensor x, std::string kind_name, std::string layout_name, Tensor slot_weights, Tensor slot_of_row,
    bool x_owned) {
  const char* op = "_gated_activation_backward_weighted";
  const auto [kind, layout] = check_gated(op, x, kind_name, layout_name);
  check_row_weights(op, x, slot_weights, slot_of_row);
  const int64_t dim = x.size(1) / 2;
  check_grad(op, grad, x, dim);
  const Tensor g = as_contiguous(grad), in = as_contiguous(x), weights = as_contiguous(slot_weights);
  // Gradients overwrite x if no one reads x afterwards. The loops cannot work in place, so that each row goes through a
  // buffer.
  const bool over_x = x_owned && in.data_ptr() == x.data_ptr();
  const Tensor grad_x = over_x ? in : new_on_cpu(sizes_of(x), x.scalar_type());
  const Tensor grad_weights = new_on_cpu(sizes_of(weights), weights.scalar_type());
  dispatch_floating(x.scalar_type(), [&, kind = kind, layout = layout]<typename T>() {
    auto* dw = data<acc_t<T>>(grad_weights);
    std::fill_n(dw, weights.numel(), acc_t<T>(0)); // a slot may have no row
    const int64_t row_bytes = 2 * dim * static_cast<int64_t>(sizeof(T));
    for_each_row(op, as_contiguous(slot_of_row), weights.numel(), 5 * row_bytes / 2, [&](int64_t row, int64_t slot) {
      T* const grad_row = data<T>(grad_x) + row * 2 * dim;
      if (slot < 0) {
        std::memset(grad_row, 0, row_bytes);
        return;
      }
      thread_local std::vector<T> buffer;
      if (over_x) {
        buffer.resize(2 * dim);
      }
      T* const to = over_x ? buffer.data() : grad_row;
      dw[slot] = kernels().of<T>().gated_backward_weighted(
          kind, layout, to, data<T>(g) + row * dim, data<T>(in) + row * 2 * dim, data<acc_t<T>>(weights)[slot], dim);
      if (over_x) {
        std::memcpy(grad_row, to, row_bytes);
      }
    });
  });
  return {grad_x, grad_weights};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("activation", TORCH_BOX(&activation_cpu));
  m.impl("_activation_backward", TORCH_BOX(&activation_backward_cpu));
  m.impl("gated_activation", TORCH_BOX(&gated_activation_cpu));
  m.impl("_gated_activation_backward", TORCH_BOX(&gated_activation_backward_cpu));
  m.impl("_gated_activation_backward_weighted", TORCH_BOX(&gated_activation_backward_weighted_cpu));
}

} // namespace moe_ext::activation
