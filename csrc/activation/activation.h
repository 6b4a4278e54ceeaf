// Activations: argument checks, which both backends share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "activation/activation_tables.h"
#include "common/check.h"

namespace moe_ext::activation {

struct GatedOptions {
  Kind kind; // activation of the gate
  Layout layout;
};

Kind check_activation(const char* op, const Tensor& x, const std::string& kind);

// x [..., 2F]
GatedOptions check_gated(const char* op, const Tensor& x, const std::string& kind, const std::string& layout);

// Check weights of any shape, one for each slot, and the slot of each row of x [N, 2F]. Both may be absent.
void check_row_weights(
    const char* op, const Tensor& x, const std::optional<Tensor>& slot_weights,
    const std::optional<Tensor>& slot_of_row);

// Throw unless grad has x's device and dtype, and x's shape with `last_dim` as its last dimension.
void check_grad(const char* op, const Tensor& grad, const Tensor& x, int64_t last_dim);

} // namespace moe_ext::activation
