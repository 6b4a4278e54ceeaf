// Gated delta rule: argument checks, which both backends share. A check throws unless dtypes, shapes and devices fit.
#pragma once

#include "recurrence/checks.h"

namespace moe_ext::recurrence {

struct DeltaRuleArgs {
  const Tensor& q;                 // [B, G, L, K]
  const Tensor& k;                 // [B, G, L, K]
  const Tensor& v;                 // [B, H, L, V], H a multiple of G
  const Tensor& g;                 // [B, H, L]
  const OptionalTensor& beta;      // [B, H, L]
  const Tensor& state;             // [B, H, K, V]
  const OptionalTensor& documents; // [B or 1, L]
};

void check_delta_rule(const char* op, const DeltaRuleArgs& args);

void check_delta_rule_backward(
    const char* op, const DeltaRuleArgs& args,
    const Tensor& grad_out,  // [B, H, L, V]
    const Tensor& grad_last, // [B, H, K, V]
    const Tensor& news);     // [B, H, L, V]; empty without beta

} // namespace moe_ext::recurrence
