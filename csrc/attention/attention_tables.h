// Tables of the loops that attention_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "attention/attention_math.h"

namespace moe_ext::attention {

// Rows of score tiles are padded to a multiple of kLanes. Sums and maxima use kLanes lanes for any width of the
// vectors, and no loop has a tail.
constexpr int64_t kLanes = 16;

// Inputs of a tile of scores [rows][cols]. Arrays over columns are padded with kMaskedKey to a multiple of kLanes.
template <typename Acc>
struct TileArgs {
  int64_t rows, cols;
  int64_t row_stride; // of the scores, a multiple of kLanes
  Score<Acc> score;
  Window window;
  bool masked;                // if false, every row sees every key
  bool consecutive;           // k_dropout is k_dropout[0], k_dropout[0] + 1, ...
  const int32_t* q_positions; // [rows]
  const int32_t* q_documents; // [rows]
  const int32_t* k_positions; // [cols], kMaskedKey for keys that the mask excludes
  const int32_t* k_documents; // [cols]
  const int32_t* k_dropout;   // [cols] positions, also of masked keys
  Dropout dropout;
  int64_t batch, head;       // in the whole batch and model: they select the random numbers
  const Acc* bias = nullptr; // [rows][cols], added to the scores; null: none
  int64_t bias_stride = 0;
  Acc* grad_bias = nullptr; // [rows][cols], if the backward pass needs it
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
  // Replaces products q.k [rows][cols] by exp(score - max) with dropout, and updates maxima and sums. Sums are without
  // dropout.
  void (*softmax)(Acc* scores, const TileArgs<Acc>& args, const RowState<Acc>& state);
  // out /= sum, lse = max + log(sum). Rows without keys get out 0, lse -inf.
  void (*finish)(Acc* lse, const RowState<Acc>& state, int64_t rows);
  // Replaces products q.k (`scores`) by the softmax with dropout, and grad_out.v (`grads`) by the gradient of q.k.
  void (*backward)(Acc* scores, Acc* grads, const TileArgs<Acc>& args, const Acc* lse, const Acc* delta);
  // delta[row] = grad_out[row] . out[row] - grad_lse[row]; grad_lse may be null.
  void (*delta)(Acc* delta, const Acc* grad_out, const Acc* out, const Acc* grad_lse, int64_t rows, int64_t dim);
};

template <typename T>
struct MergeArgs {
  const T* out_a;
  const T* out_b; // null: all zeros
  const acc_t<T>* lse_a;
  const acc_t<T>* lse_b;
  int64_t dim;
};

// Strides, in elements, of batches, heads and rows.
struct RowStrides {
  int64_t batch, head, row;

  MOE_INLINE int64_t at(int64_t b, int64_t h, int64_t s) const {
    return b * batch + h * head + s * row;
  }
};

// Arguments of the merge of (out_b, lse_b) into (out, lse). Shapes [B, H, S, D] and [B, H, S].
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
  T* grad_b; // null if out_b is null
  acc_t<T>* grad_lse_a;
  acc_t<T>* grad_lse_b;
};

template <typename T>
struct MergeKernels {
  void (*merge)(acc_t<T>* out, acc_t<T>* lse, const MergeArgs<T>& args, int64_t begin, int64_t end);
  // Merges rows [begin, end) of batch * heads * rows.
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
