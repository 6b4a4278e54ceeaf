// Selective scan: argument checks, which both backends share. A check throws unless dtypes, shapes and devices fit.
#pragma once

#include "recurrence/checks.h"

namespace moe_ext::recurrence {

// Positions between two states that the forward pass keeps for the backward pass.
constexpr int64_t kScanChunk = 64;

struct SelectiveScanArgs {
  const Tensor& x;                 // [B, H, L]
  const Tensor& dt;                // [B, H, L]
  const Tensor& a;                 // [H, K]
  const Tensor& b;                 // [B, G, L, K]
  const Tensor& c;                 // [B, G, L, K]
  const Tensor& state;             // [B, H, K]
  const OptionalTensor& documents; // [B or 1, L]
};

void check_selective_scan(const char* op, const SelectiveScanArgs& args);

void check_selective_scan_backward(
    const char* op, const SelectiveScanArgs& args,
    const Tensor& grad_out,  // [B, H, L]
    const Tensor& grad_last, // [B, H, K]
    const Tensor& states);   // [B, H, N, K]

} // namespace moe_ext::recurrence
