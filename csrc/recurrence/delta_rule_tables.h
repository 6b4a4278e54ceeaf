// Tables of the loops that delta_rule_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::recurrence {

// Most positions of a chunk. Within a chunk the computation is matrix products; between chunks it is a recurrence.
// Matrices of pairs of positions have kChunk columns, of which those beyond the chunk's length are unused.
constexpr int64_t kChunk = 64;

// Decays of a chunk.
template <typename Acc>
struct Decays {
  Acc* pairs;   // [kChunk][kChunk], from the position of a column to that of a row; zero above the diagonal
  Acc* carried; // [kChunk], from before the chunk
  Acc* to_end;  // [kChunk], to the end of the chunk
};

template <typename Acc>
struct ChunkKernels {
  void (*decays)(const Decays<Acc>& decays, const Acc* g, int64_t n);
  // out[row] = by[row] * in[row]; [n][cols]
  void (*scale_rows)(Acc* out, const Acc* in, int64_t in_stride, const Acc* by, int64_t n, int64_t cols);
  // out[row] += by[row] * in[row]; [n][cols]
  void (*add_scaled_rows)(Acc* out, const Acc* in, const Acc* by, int64_t n, int64_t cols);
  // dots[row] = a[row] . b[row]; [n][cols]
  void (*row_dots)(Acc* dots, const Acc* a, int64_t a_stride, const Acc* b, int64_t b_stride, int64_t n, int64_t cols);
  // scores = products * pairs
  void (*weigh)(Acc* scores, const Acc* products, const Acc* pairs, int64_t n);
  // The strictly lower triangle of the WY form: system = beta[row] * products * pairs.
  void (*system)(Acc* system, const Acc* products, const Acc* pairs, const Acc* beta, int64_t n);
  // out = beta[row] * (v - carried[row] * read); [n][cols]. `out` may be `read`.
  void (*right_side)(
      Acc* out, const Acc* read, const Acc* v, int64_t v_stride, const Acc* carried, const Acc* beta, int64_t n,
      int64_t cols);
  // rows = (I + system)^-1 rows, and rows = (I + system)^-T rows.
  void (*solve)(Acc* rows, const Acc* system, int64_t n, int64_t cols);
  void (*solve_transposed)(Acc* rows, const Acc* system, int64_t n, int64_t cols);
  // Replaces gradients of scores by those of products. Adds gradients of the logarithms of decays to `decay`.
  void (*of_scores)(Acc* grads, const Acc* products, const Acc* pairs, Acc* decay, int64_t n);
  // Replaces the negated gradients of the system by the gradients of its symmetric products, in both triangles. Adds
  // gradients of the logarithms of decays to `decay`, and those of beta to `grad_beta`.
  void (*of_system)(
      Acc* grads, const Acc* products, const Acc* pairs, const Acc* beta, Acc* decay, Acc* grad_beta, int64_t n);
};

struct Kernels {
  ChunkKernels<float> f32;
  ChunkKernels<double> f64;

  template <typename Acc>
  const ChunkKernels<Acc>& of() const {
    if constexpr (sizeof(Acc) == 8) {
      return f64;
    } else {
      return f32;
    }
  }
};

} // namespace moe_ext::recurrence
