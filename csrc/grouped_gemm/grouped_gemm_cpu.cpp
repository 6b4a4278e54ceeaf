// Grouped matrix product on CPU: library products of the tiles of experts, each written to its slice of the result.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "grouped_gemm/give_back.h"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/grouped_gemm_tables.h"
#include "grouped_gemm/per_expert.h"
#include "grouped_gemm/tiles.h"

namespace moe_ext::grouped_gemm {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::parallel_for;

// Rows of a tile, for small and for large products. Every tile packs the weight again, which costs a tenth of the time
// at 512 rows of bfloat16 and a third at 256.
constexpr int64_t kLeastRows = 256;
constexpr int64_t kMostRows = 512;
// Columns of `grad`, that is rows of the weight's gradient, in a tile. The sum over an expert's rows is never cut.
// Every tile packs all of the expert's rows of x.
constexpr int64_t kLeastColumns = 256;
constexpr int64_t kMostColumns = 2048;
// The library's 16-bit products sum so many rows at a time; remaining rows take a slower path.
constexpr int64_t kRowsPerSum = 32;

// Computes out = a b + bias, rounded once. A direct call, because the stable ABI cannot pass the Scalar arguments of
// addmm to the dispatcher.
void addmm_out(const Tensor& out, const Tensor& bias, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), bias.get(), a.get(), b.get(), 1.0, 1.0));
}

void zero_rows(const Tensor& t, int64_t begin, int64_t end) {
  const int64_t row_bytes = t.size(1) * static_cast<int64_t>(t.element_size());
  if (end > begin && row_bytes > 0) {
    std::memset(static_cast<char*>(t.data_ptr()) + begin * row_bytes, 0, (end - begin) * row_bytes);
  }
}

// Pool of scratch memory for tiles, in pieces of one size. It allocates only as many pieces as are in use at a time.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes) {
  }
  std::unique_ptr<char[]> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      return std::unique_ptr<char[]>(new char[bytes_]);
    }
    auto piece = std::move(free_.back());
    free_.pop_back();
    return piece;
  }
  void put_back(std::unique_ptr<char[]> piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(piece));
  }

 private:
  int64_t bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<char[]>> free_;
};

// Terms and columns of a block of a widened product, small enough for its copies to stay in the caches.
constexpr int64_t kWideTerms = 512;
constexpr int64_t kWideColumns = 512;

// True if products are computed from float32 copies: for 16-bit numbers on processors without AVX-512, where the
// library multiplies such numbers in a slow scalar loop.
bool is_widened(const Tensor& x) {
#if defined(MOE_EXT_X86)
  return x.element_size() == 2 && cpu_isa() != CpuIsa::kAvx512;
#else
  (void)x;
  return false;
#endif
}

// Scratch bytes of a widened product [rows, cols] of `terms` terms: blocks of the sums, of a, of b and the bias.
int64_t wide_bytes(int64_t rows, int64_t cols, int64_t terms) {
  const int64_t width = std::min(cols, kWideColumns);
  const int64_t depth = std::min(terms, kWideTerms);
  return static_cast<int64_t>(sizeof(float)) * (rows * (width + depth) + (depth + 1) * width);
}

// Copies rows [row, row + num_rows) and columns [col, col + num_cols) of m to `memory` in float32, in the layout of m.
template <typename T>
Tensor widened(const Tensor& m, int64_t row, int64_t num_rows, int64_t col, int64_t num_cols, float* memory) {
  const bool by_columns = m.stride(0) == 1 && m.stride(1) != 1;
  const int64_t outer = by_columns ? num_cols : num_rows;
  const int64_t inner = by_columns ? num_rows : num_cols;
  const int64_t outer_stride = m.stride(by_columns ? 1 : 0);
  const int64_t inner_stride = m.stride(by_columns ? 0 : 1);
  const T* const from = data<T>(m) + row * m.stride(0) + col * m.stride(1);
  for (int64_t i = 0; i < outer; ++i) {
    if (inner_stride == 1) {
      kernels().of<T>().widen(memory + i * inner, from + i * outer_stride, inner);
      continue;
    }
    for (int64_t j = 0; j < inner; ++j) {
      memory[i * inner + j] = to_acc(from[i * outer_stride + j * inner_stride]);
    }
  }
  const std::array<int64_t, 2> sizes = {num_rows, num_cols};
  const std::array<int64_t, 2> strides = {by_columns ? 1 : inner, by_columns ? inner : 1};
  return torch::stable::from_blob(memory, sizes, strides, m.device(), torch::headeronly::ScalarType::Float);
}

// Computes out = a b + bias in float32, rounded once. `bias` is [1, M] or null. Rows of `out` must be adjacent.
template <typename T>
void wide_product_of(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* bias, float* memory) {
  const int64_t rows = out.size(0);
  const int64_t terms = a.size(1);
  const int64_t depth = std::min(terms, kWideTerms);
  for (int64_t col = 0; col < out.size(1); col += kWideColumns) {
    const int64_t width = std::min(out.size(1) - col, kWideColumns);
    float* const a_part = memory + rows * width;
    float* const b_part = a_part + rows * depth;
    const Tensor sum =
        torch::stable::from_blob(memory, {rows, width}, {width, 1}, out.device(), torch::headeronly::ScalarType::Float);
    int64_t term = 0;
    do {
      const int64_t part = std::min(terms - term, kWideTerms);
      const Tensor a_wide = widened<T>(a, 0, rows, term, part, a_part);
      const Tensor b_wide = widened<T>(b, term, part, col, width, b_part);
      if (term > 0) {
        addmm_out(sum, sum, a_wide, b_wide);
      } else if (bias != nullptr) {
        addmm_out(sum, widened<T>(*bias, 0, 1, col, width, b_part + depth * width), a_wide, b_wide);
      } else {
        mm_out(sum, a_wide, b_wide);
      }
      term += part;
    } while (term < terms);
    for (int64_t row = 0; row < rows; ++row) {
      kernels().of<T>().narrow(data<T>(out) + row * out.stride(0) + col, memory + row * width, width);
    }
  }
}

void wide_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* bias, Scratch& scratch) {
  auto piece = scratch.take();
  dispatch_floating(out.scalar_type(), [&]<typename T>() {
    if constexpr (sizeof(T) == 2) {
      wide_product_of<T>(out, a, b, bias, reinterpret_cast<float*>(piece.get()));
    }
  });
  scratch.put_back(std::move(piece));
}

int64_t largest(const std::vector<Tile>& tiles) {
  int64_t found = 0;
  for (const Tile& tile : tiles) {
    found = std::max(found, tile.end - tile.begin);
  }
  return found;
}

Tensor grouped_mm_cpu(
    Tensor x,                     // [N, K]
    Tensor weight,                // [E, M, K]
    Tensor expert_offsets,        // [E + 1] or [E]
    std::optional<Tensor> bias) { // [E, M]
  check_grouped_mm(x, weight, expert_offsets, bias);
  const int64_t num_experts = weight.size(0);
  const int64_t dim = weight.size(1);
  const Tensor offsets_tensor = as_offsets(expert_offsets);
  const int64_t* offsets = data<int64_t>(offsets_tensor);
  check_offsets("grouped_mm", offsets, num_experts, x.size(0));
  const Tensor out = new_on_cpu({x.size(0), dim}, x.scalar_type());
  zero_rows(out, 0, offsets[0]);
  zero_rows(out, offsets[num_experts], x.size(0));
  std::vector<Tile> tiles;
  const int64_t tile_rows = tile_size(offsets[num_experts] - offsets[0], kLeastRows, kMostRows);
  for (int64_t e = 0; dim > 0 && e < num_experts; ++e) {
    cut(tiles, e, offsets[e], offsets[e + 1], tile_rows);
  }
  sort_by_cost(tiles, [](const Tile& tile) { return tile.end - tile.begin; });
  const bool wide = is_widened(x);
  Scratch scratch(wide ? wide_bytes(largest(tiles), dim, x.size(1)) : 0);
  for_each_tile(tiles, [&](const Tile& tile) {
    const Tensor out_e = rows_of(out, tile.begin, tile.end);
    const Tensor x_e = rows_of(x, tile.begin, tile.end);
    const Tensor weight_e = matrix_transposed(weight, tile.expert);
    std::optional<Tensor> bias_e;
    if (bias) {
      bias_e = rows_of(*bias, tile.expert, tile.expert + 1);
    }
    if (wide) {
      wide_product(out_e, x_e, weight_e, bias_e ? &*bias_e : nullptr, scratch);
    } else if (bias_e) {
      addmm_out(out_e, *bias_e, x_e, weight_e);
    } else {
      mm_out(out_e, x_e, weight_e);
    }
  });
  return out;
}

// A copy of a matrix with rows of zeros added. The columns of the matrix must be adjacent; its row stride is arbitrary.
struct Padded {
  std::unique_ptr<char[]> memory;
  Tensor matrix; // a view of the memory
};

Padded padded(const Tensor& m, int64_t num_rows) {
  const int64_t element = static_cast<int64_t>(m.element_size());
  const int64_t row_bytes = m.size(1) * element;
  std::unique_ptr<char[]> memory(new char[num_rows * row_bytes]);
  const char* in = static_cast<const char*>(m.data_ptr());
  for (int64_t row = 0; row < m.size(0); ++row) {
    std::memcpy(memory.get() + row * row_bytes, in + row * m.stride(0) * element, row_bytes);
  }
  std::memset(memory.get() + m.size(0) * row_bytes, 0, (num_rows - m.size(0)) * row_bytes);
  const std::array<int64_t, 2> sizes = {num_rows, m.size(1)};
  const std::array<int64_t, 2> strides = {m.size(1), 1};
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor matrix = torch::stable::from_blob(memory.get(), sizes, strides, cpu, m.scalar_type());
  return {std::move(memory), matrix};
}

// Computes out = grad^T x, and calls `read` when grad and x are no longer read. If the number of rows of 16-bit
// operands is no multiple of kRowsPerSum, they are padded, so that the library also plans fewer different shapes.
template <typename Read>
void sum_of_outer_products(
    const Tensor& out, const Tensor& grad, const Tensor& x, Scratch& wide_memory, const Read& read) {
  const int64_t num_rows = grad.size(0);
  if (is_widened(x)) {
    wide_product(out, rows_transposed(grad, 0, num_rows), x, nullptr, wide_memory);
    read();
    return;
  }
  const bool ragged = num_rows > kRowsPerSum && num_rows % kRowsPerSum != 0;
  if (!ragged || grad.element_size() != 2 || grad.stride(1) != 1 || x.stride(1) != 1) {
    mm_out(out, rows_transposed(grad, 0, num_rows), x);
    read();
    return;
  }
  const int64_t whole = (num_rows + kRowsPerSum - 1) / kRowsPerSum * kRowsPerSum;
  const Padded grad_whole = padded(grad, whole);
  const Padded x_whole = padded(x, whole);
  read();
  mm_out(out, rows_transposed(grad_whole.matrix, 0, whole), x_whole.matrix);
}

// Computes grad_weight[e] = grad_e^T x_e, zeros for an expert without rows; with `add`, adds to grad_weight instead.
void products_of_rows(
    const Tensor& grad_weight, const Tensor& grad, const Tensor& x, const Tensor& expert_offsets, bool add,
    bool grad_owned, bool x_owned) {
  const int64_t num_experts = num_experts_of(expert_offsets);
  const Tensor offsets_tensor = as_offsets(expert_offsets);
  const int64_t* offsets = data<int64_t>(offsets_tensor);
  check_offsets("_grouped_mm_backward_weight", offsets, num_experts, grad.size(0));
  const int64_t matrix_size = grad.size(1) * x.size(1);
  const int64_t bytes = matrix_size * static_cast<int64_t>(grad.element_size());
  int64_t num_busy = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    num_busy += offsets[e] < offsets[e + 1];
  }
  const int64_t tile_columns = tile_size(num_busy * grad.size(1), kLeastColumns, kMostColumns);
  std::vector<Tile> tiles;
  for (int64_t e = 0; bytes > 0 && e < num_experts; ++e) {
    if (offsets[e] == offsets[e + 1]) {
      if (add) {
        continue;
      }
      tiles.push_back({e, 0, 0}); // writes zeros; the cheapest tiles, for threads that are done with products
    } else {
      cut(tiles, e, 0, grad.size(1), tile_columns);
    }
  }
  const auto cost = [&](const Tile& tile) {
    return static_cast<double>((tile.end - tile.begin) * (offsets[tile.expert + 1] - offsets[tile.expert]));
  };
  double total = 1;
  for (const Tile& tile : tiles) {
    total += cost(tile);
  }
  // Costs are compared by powers of two, so that all costs of 0.7 to 1.4 times the mean are equal. Tiles of equal cost
  // stay in the order of memory, so that pages are allocated and given back in that order.
  const double scale = std::sqrt(2.0) * static_cast<double>(tiles.size()) / total;
  sort_by_cost(tiles, [&](const Tile& tile) { return std::ilogb(std::max(cost(tile) * scale, 1e-3)); });
  // Memory is given back only to make room for the result, so that memory in use does not rise. Giving back more would
  // only mean more page faults the next time.
  const int64_t new_bytes = add ? 0 : num_experts * bytes;
  const int64_t grad_bytes = grad.numel() * static_cast<int64_t>(grad.element_size());
  const int64_t x_bytes = x.numel() * static_cast<int64_t>(x.element_size());
  const bool one_is_enough = grad_owned && x_owned && std::max(grad_bytes, x_bytes) >= new_bytes;
  const bool is_grad_larger = grad_bytes >= x_bytes;
  const RowsGivenBack grad_rows(grad, offsets, tiles, grad_owned && !add && (is_grad_larger || !one_is_enough));
  const RowsGivenBack x_rows(x, offsets, tiles, x_owned && !add && (!is_grad_larger || !one_is_enough));
  const int64_t row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  Scratch scratch(add ? 2 * tile_columns * row_bytes : 0);
  Scratch wide_memory(is_widened(x) ? wide_bytes(largest(tiles), x.size(1), grad.size(0)) : 0);
  for_each_tile(tiles, [&](const Tile& tile) {
    const int64_t begin = offsets[tile.expert];
    const int64_t end = offsets[tile.expert + 1];
    if (begin == end) {
      std::memset(static_cast<char*>(grad_weight.data_ptr()) + tile.expert * bytes, 0, bytes);
      return;
    }
    // The tile computes rows [tile.begin, tile.end) of grad_weight[e] from the same columns of grad.
    const Tensor out_e = view_of(
        grad_weight, tile.expert * matrix_size + tile.begin * x.size(1),
        {tile.end - tile.begin, x.size(1), x.size(1), 1});
    const Matrix grad_columns = {end - begin, tile.end - tile.begin, grad.stride(0), grad.stride(1)};
    const Tensor grad_e = view_of(grad, begin * grad.stride(0) + tile.begin * grad.stride(1), grad_columns);
    const auto read = [&] {
      grad_rows.done(tile);
      x_rows.done(tile);
    };
    if (!add) {
      sum_of_outer_products(out_e, grad_e, rows_of(x, begin, end), wide_memory, read);
    } else {
      // The product of a tile stays in the cache until it is added, so that memory traffic is that of the sum alone.
      auto piece = scratch.take();
      const Tensor product = torch::stable::from_blob(
          piece.get(), {tile.end - tile.begin, x.size(1)}, {x.size(1), 1}, x.device(), x.scalar_type());
      sum_of_outer_products(product, grad_e, rows_of(x, begin, end), wide_memory, read);
      dispatch_floating(x.scalar_type(), [&]<typename T>() {
        kernels().of<T>().add(data<T>(out_e), data<T>(product), product.numel());
      });
      scratch.put_back(std::move(piece));
    }
  });
}

Tensor backward_weight_cpu(
    Tensor grad,           // [N, M]
    Tensor x,              // [N, K]
    Tensor expert_offsets, // [E + 1] or [E]
    bool grad_owned, bool x_owned) {
  const Tensor grad_weight = new_on_cpu({num_experts_of(expert_offsets), grad.size(1), x.size(1)}, grad.scalar_type());
  products_of_rows(grad_weight, grad, x, expert_offsets, false, grad_owned, x_owned);
  return grad_weight;
}

// Adds the gradient of the weight to `sum`. The bits are those of backward_weight_cpu followed by an addition.
void backward_weight_add_cpu(
    Tensor sum,            // [E, M, K]; [E, K, M] if transposed
    Tensor grad,           // [N, M]
    Tensor x,              // [N, K]
    Tensor expert_offsets, // [E + 1] or [E]
    bool transposed, bool grad_owned, bool x_owned) {
  check_backward_weight_add(sum, grad, x, expert_offsets, transposed);
  const Tensor& rows = transposed ? x : grad;
  const Tensor& columns = transposed ? grad : x;
  if (transposed) {
    std::swap(grad_owned, x_owned);
  }
  products_of_rows(sum, as_contiguous(rows), columns, expert_offsets, true, grad_owned, x_owned);
}

void set_reuses_memory(bool enabled) {
  reuses_memory = enabled;
}

// Sums `width` columns of one expert's rows: rows within blocks first, then the blocks. Summing by blocks keeps the
// error small for many rows, and the order does not depend on threads.
template <typename T>
void sum_rows(T* out, const T* rows, int64_t num_rows, int64_t dim, int64_t width) {
  constexpr int64_t kRowsPerBlock = 64;
  constexpr int64_t kTile = 64;
  for (int64_t tile = 0; tile < width; tile += kTile) {
    const int64_t cols = std::min(kTile, width - tile);
    acc_t<T> total[kTile] = {};
    for (int64_t first = 0; first < num_rows; first += kRowsPerBlock) {
      acc_t<T> block[kTile] = {};
      for (int64_t row = first; row < std::min(num_rows, first + kRowsPerBlock); ++row) {
        for (int64_t i = 0; i < cols; ++i) {
          block[i] += to_acc(rows[row * dim + tile + i]);
        }
      }
      for (int64_t i = 0; i < cols; ++i) {
        total[i] += block[i];
      }
    }
    for (int64_t i = 0; i < cols; ++i) {
      out[tile + i] = from_acc<T>(total[i]);
    }
  }
}

Tensor backward_bias_cpu(
    Tensor grad,             // [N, M]
    Tensor expert_offsets) { // [E + 1] or [E]
  check_backward_bias(grad, expert_offsets);
  const int64_t num_experts = num_experts_of(expert_offsets);
  const int64_t dim = grad.size(1);
  const Tensor offsets_tensor = as_offsets(expert_offsets);
  const int64_t* offsets = data<int64_t>(offsets_tensor);
  check_offsets("_grouped_mm_backward_bias", offsets, num_experts, grad.size(0));
  const Tensor in = as_contiguous(grad);
  const Tensor grad_bias = new_on_cpu({num_experts, dim}, grad.scalar_type());
  constexpr int64_t kColsPerTask = 256;
  const int64_t tasks = (dim + kColsPerTask - 1) / kColsPerTask;
  dispatch_floating(grad.scalar_type(), [&]<typename T>() {
    parallel_for(0, num_experts * tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t e = task / tasks;
        const int64_t col = task % tasks * kColsPerTask;
        sum_rows(
            data<T>(grad_bias) + e * dim + col, data<T>(in) + offsets[e] * dim + col, offsets[e + 1] - offsets[e], dim,
            std::min(kColsPerTask, dim - col));
      }
    });
  });
  return grad_bias;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm_cpu));
  m.impl("_grouped_mm_backward_weight", TORCH_BOX(&backward_weight_stored<backward_weight_cpu>));
  m.impl("_grouped_mm_backward_weight_add_", TORCH_BOX(&backward_weight_add_cpu));
  m.impl("_grouped_mm_backward_bias", TORCH_BOX(&backward_bias_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CompositeExplicitAutograd, m) {
  m.impl("_set_reuses_memory", TORCH_BOX(&set_reuses_memory));
}

} // namespace moe_ext::grouped_gemm
