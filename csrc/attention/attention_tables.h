// The loops that attention_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "attention/attention_math.h"

namespace moe_ext::attention {

// Rows of score tiles are filled up to a multiple of it: sums and maxima are taken in so many lanes, whatever the width
// of the vectors, and no loop has a tail.
constexpr int64_t kLanes = 16;

// Inputs of a tile of scores [rows][cols]. Arrays over columns are filled up with kMaskedKey to a multiple of
// kLanes.
template <typename Acc>
struct TileArgs {
  int64_t rows, cols;
  int64_t row_stride; // of the scores, a multiple of kLanes
  Score<Acc> score;
  Window window;
  bool masked;                // else every row sees every key
  bool consecutive;           // keys at k_dropout[0], k_dropout[0] + 1, ...
  const int32_t* q_positions; // [rows]
  const int32_t* q_documents; // [rows]
  const int32_t* k_positions; // [cols], kMaskedKey where the key's mask is off
  const int32_t* k_documents; // [cols]
  const int32_t* k_dropout;   // [cols] positions, without masks
  Dropout dropout;
  int64_t batch, head;       // of the whole batch and model: they choose the dropped numbers
  const Acc* bias = nullptr; // [rows][cols], added to the scores; null: none
  int64_t bias_stride = 0;
  Acc* grad_bias = nullptr; // [rows][cols] of a backward pass that needs it
  int64_t grad_bias_stride = 0;
};

// Running state of the rows of a query tile.
template <typename Acc>
struct RowState {
  Acc* max; // [rows]
  Acc* sum; // [rows]
  Acc* out; // [rows][dim], not yet divided by the sum
  int64_t dim;
};

template <typename Acc>
struct BlockKernels {
  // Products q.k [rows][cols] to exp(score - max), after the maxima have moved on; dropout applied, the sum is without.
  void (*softmax)(Acc* scores, const TileArgs<Acc>& args, const RowState<Acc>& state);
  // out /= sum, lse = max + log sum; rows without keys: out 0, lse -inf.
  void (*finish)(Acc* lse, const RowState<Acc>& state, int64_t rows);
  // Products q.k and grad_out.v to the softmax with dropout, and to the gradient of q.k.
  void (*backward)(Acc* scores, Acc* grads, const TileArgs<Acc>& args, const Acc* lse, const Acc* delta);
  // delta[row] = grad_out[row] . out[row] - grad_lse[row]; grad_lse may be null.
  void (*delta)(Acc* delta, const Acc* grad_out, const Acc* out, const Acc* grad_lse, int64_t rows, int64_t dim);
};

template <typename T>
struct MergeArgs {
  const T* out_a;
  const T* out_b; // null: zeros
  const acc_t<T>* lse_a;
  const acc_t<T>* lse_b;
  int64_t dim;
};

// Elements between the first ones of neighbouring batches, heads and rows.
struct RowStrides {
  int64_t batch, head, row;

  MOE_INLINE int64_t at(int64_t b, int64_t h, int64_t s) const {
    return b * batch + h * head + s * row;
  }
};

// A result out_b, lse_b that goes into out, lse. [B, H, S, D] and [B, H, S].
template <typename T>
struct MergeIntoArgs {
  acc_t<T>* out;
  acc_t<T>* lse;
  const T* out_b;
  const acc_t<T>* lse_b;
  RowStrides of_out, of_lse, of_out_b, of_lse_b;
  int64_t batch, heads, rows, dim;
};

template <typename T>
struct MergeGrads {
  const acc_t<T>* grad_out;
  const acc_t<T>* grad_lse;
  T* grad_a;
  T* grad_b; // null where out_b is
  acc_t<T>* grad_lse_a;
  acc_t<T>* grad_lse_b;
};

template <typename T>
struct MergeKernels {
  void (*merge)(acc_t<T>* out, acc_t<T>* lse, const MergeArgs<T>& args, int64_t begin, int64_t end);
  // Rows [begin, end) of batch * heads * rows.
  void (*merge_into)(const MergeIntoArgs<T>& args, int64_t begin, int64_t end);
  void (*merge_backward)(const MergeGrads<T>& grads, const MergeArgs<T>& args, int64_t begin, int64_t end);
};

struct Kernels {
  BlockKernels<float> f32;
  BlockKernels<double> f64;
  PerDtype<MergeKernels> merge;

  template <typename Acc>
  const BlockKernels<Acc>& block() const {
    if constexpr (sizeof(Acc) == 8) {
      return f64;
    } else {
      return f32;
    }
  }
};

} // namespace moe_ext::attention
