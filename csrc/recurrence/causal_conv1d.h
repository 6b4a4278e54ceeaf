// Causal depthwise convolution: argument checks, which both backends share. A check throws unless dtypes, shapes and
// devices fit.
#pragma once

#include "recurrence/checks.h"

namespace moe_ext::recurrence {

struct CausalConvArgs {
  const Tensor& x;                 // [B, D, L]
  const Tensor& weight;            // [D, W]
  const OptionalTensor& bias;      // [D]
  const Tensor& halo;              // [B, D, W - 1], the positions before the first position of x
  const OptionalTensor& documents; // [B or 1, W - 1 + L]
};

void check_causal_conv(const char* op, const CausalConvArgs& args);

} // namespace moe_ext::recurrence
