// Gradient selection with error feedback: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "compression/topk_tables.h"

namespace moe_ext::compression::topk {

// How a tensor of `numel` elements is cut: scopes of `size` neighbouring elements (the last may be smaller), of which
// each keeps its own `k`.
struct Scopes {
  int64_t numel;
  int64_t size;
  int64_t k;

  int64_t count() const {
    return numel == 0 ? 0 : (numel + size - 1) / size;
  }
  int64_t length(int64_t scope) const {
    return scope + 1 < count() ? size : numel - scope * size;
  }
  int64_t kept(int64_t scope) const {
    return length(scope) < k ? length(scope) : k;
  }
  // Of all scopes.
  int64_t total() const {
    return count() == 0 ? 0 : (count() - 1) * k + kept(count() - 1);
  }
};

// Both check everything that needs no look at the data.
Scopes check_topk_compress(
    const Tensor& grad, const Tensor& residual, int64_t k, int64_t scope_size, const std::optional<Tensor>& velocity,
    double momentum, double residual_scale);

// The capacity of each scope takes the place of `k`.
Scopes check_threshold_compress(
    const Tensor& grad, const Tensor& residual,
    const Tensor& threshold, // [], or [num_scopes]
    int64_t capacity, int64_t target, const std::optional<Tensor>& velocity, double momentum, double residual_scale,
    int64_t scope_size);

} // namespace moe_ext::compression::topk
