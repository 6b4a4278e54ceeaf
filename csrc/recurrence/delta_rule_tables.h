// The loops that delta_rule_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::recurrence {

// Positions of a chunk at most: what happens within one is matrices, what happens between them a recurrence. Matrices
// of pairs of positions have so many columns, those beyond the chunk's length unused.
constexpr int64_t kChunk = 64;

// Decays of a chunk. Zero above the diagonal of pairs.
template <typename Acc>
struct Decays {
  Acc* pairs;   // [kChunk][kChunk], from the position of a column to that of a row
  Acc* carried; // [kChunk], from before the chunk
  Acc* to_end;  // [kChunk], to the end of the chunk
};

template <typename Acc>
struct ChunkKernels {
  void (*decays)(const Decays<Acc>& decays, const Acc* g, int64_t n);
  // out = by[row] * in, [n][cols]
  void (*scale_rows)(Acc* out, const Acc* in, int64_t in_stride, const Acc* by, int64_t n, int64_t cols);
  // out += by[row] * in, [n][cols]
  void (*add_scaled_rows)(Acc* out, const Acc* in, const Acc* by, int64_t n, int64_t cols);
  // dots[row] = a . b, [n][cols]
  void (*row_dots)(Acc* dots, const Acc* a, int64_t a_stride, const Acc* b, int64_t b_stride, int64_t n, int64_t cols);
  // scores = products * pairs
  void (*weigh)(Acc* scores, const Acc* products, const Acc* pairs, int64_t n);
  // The strictly lower triangle of the WY form: beta[row] * products * pairs.
  void (*system)(Acc* system, const Acc* products, const Acc* pairs, const Acc* beta, int64_t n);
  // out = beta[row] * (v - carried[row] * read), [n][cols]; out may be read.
  void (*right_side)(
      Acc* out, const Acc* read, const Acc* v, int64_t v_stride, const Acc* carried, const Acc* beta, int64_t n,
      int64_t cols);
  // rows = (I + system)^-1 rows, and (I + system)^-T rows.
  void (*solve)(Acc* rows, const Acc* system, int64_t n, int64_t cols);
  void (*solve_transposed)(Acc* rows, const Acc* system, int64_t n, int64_t cols);
  // Gradients of scores to those of products, in place; decay[i] += those of the logarithms of decays.
  void (*of_scores)(Acc* grads, const Acc* products, const Acc* pairs, Acc* decay, int64_t n);
  // Minus the gradients of the system to those of its symmetric products, in place, both triangles; the same for decay
  // and beta.
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
