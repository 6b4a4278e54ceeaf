// Block attention: argument checks, which both backends share. A check throws unless dtypes, shapes, devices and
// numbers fit. None but check_range reads the elements of a tensor, which may be on a device.
#pragma once

#include <optional>

#include "common/check.h"

namespace moe_ext::attention {

using OptionalTensor = std::optional<Tensor>;

// Arguments that the forward and backward pass of a block have in common. Hidden, as torch's stable tensors are.
struct __attribute__((visibility("hidden"))) BlockArgs {
  Tensor q;                    // [B, H, Sq, Dk]
  Tensor k;                    // [B, Hkv, Sk, Dk]
  Tensor v;                    // [B, Hkv, Sk, Dv]
  Tensor q_positions;          // [Sq] int64
  Tensor k_positions;          // [Sk] int64
  OptionalTensor q_documents;  // [Sq] int64
  OptionalTensor k_documents;  // [Sk] int64
  OptionalTensor key_mask;     // [B, Sk] bool; true: the key counts
  OptionalTensor alibi_slopes; // [H]
  OptionalTensor bias;         // [B or 1, H or 1, Sq, Sk]
  OptionalTensor seed;         // [1] int64
  double scale;
  bool causal;
  int64_t window_left, window_right; // -1: no limit
  double softcap;                    // 0: none
  double dropout_p;
  int64_t batch_offset, head_offset; // of this block's first sequence and head, in the whole batch and model
};

void check_block(const char* op, const BlockArgs& args);

// Check the state (out, lse) to which attention_block_ adds the block.
void check_state(const char* op, const BlockArgs& args, const Tensor& out, const Tensor& lse);

void check_block_backward(
    const BlockArgs& args,
    const Tensor& grad_out, // [B, H, Sq, Dv]
    const Tensor& lse,      // [B, H, Sq]
    const Tensor& delta);   // [B, H, Sq]

void check_delta(
    const Tensor& grad_out,          // [B, H, S, D]
    const Tensor& out,               // [B, H, S, D]
    const OptionalTensor& grad_lse); // [B, H, S]

void check_merge(
    const char* op,
    const Tensor& out_a,         // [..., D]
    const Tensor& lse_a,         // [...]
    const OptionalTensor& out_b, // [..., D]
    const Tensor& lse_b);        // [...]

// Check the state (out, lse) into which merge_attention_ merges (out_b, lse_b).
void check_merge_into(
    const Tensor& out,    // [B, H, S, D]
    const Tensor& lse,    // [B, H, S]
    const Tensor& out_b,  // [B, H, S, D]
    const Tensor& lse_b); // [B, H, S]

void check_merge_backward(
    const Tensor& grad_out, // [..., D]
    const Tensor& grad_lse, // [...]
    const Tensor& out_a, const Tensor& lse_a, const OptionalTensor& out_b, const Tensor& lse_b);

// Throw unless every value is in [low, high). Reads host memory.
void check_range(
    const char* op, const char* name, const int64_t* values, int64_t n, int64_t low, int64_t high, const char* rule);

} // namespace moe_ext::attention
