// Causal depthwise convolution: the argument checks that both backends share.
#pragma once

#include <optional>

#include "common/check.h"

namespace moe_ext::recurrence {

struct CausalConvArgs {
  const Tensor& x;                        // [B, D, L]
  const Tensor& weight;                   // [D, W]
  const std::optional<Tensor>& bias;      // [D]
  const Tensor& halo;                     // [B, D, W - 1], the positions before the first one
  const std::optional<Tensor>& documents; // [B or 1, W - 1 + L]
};

void check_causal_conv(const char* op, const CausalConvArgs& args);

} // namespace moe_ext::recurrence
