// Table of the activation loops of a dtype, compiled once for each instruction set. Internal linkage, as simd.h.
#pragma once

#include "activation/activation_tables.h"
#include "common/simd.h"

namespace moe_ext::activation {
namespace {

// Makes the table from the function templates of Bodies, whose first parameter is the kind.
template <typename Bodies, typename T>
struct LoopsOf {
  using Acc = acc_t<T>;

  // Calls f.operator()<kind>().
  template <typename Call>
  static MOE_INLINE void dispatch_kind(Kind kind, Call&& call) {
    switch (kind) {
      case Kind::kSilu:
        return call.template operator()<Kind::kSilu>();
      case Kind::kGelu:
        return call.template operator()<Kind::kGelu>();
      case Kind::kGeluTanh:
        return call.template operator()<Kind::kGeluTanh>();
      case Kind::kRelu:
        return call.template operator()<Kind::kRelu>();
      case Kind::kReluSquared:
        return call.template operator()<Kind::kReluSquared>();
    }
  }

  static void activation(Kind kind, T* out, const T* x, int64_t n) {
    dispatch_kind(kind, [&]<Kind kKind>() { Bodies::template activation<kKind>(out, x, n); });
  }

  static void activation_backward(Kind kind, T* grad_x, const T* grad, const T* x, int64_t n) {
    dispatch_kind(kind, [&]<Kind kKind>() { Bodies::template activation_backward<kKind>(grad_x, grad, x, n); });
  }

  static void gated(Kind kind, Layout layout, T* out, const T* x, Acc weight, int64_t dim, int64_t n) {
    dispatch_kind(kind, [&]<Kind kKind>() {
      if (layout == Layout::kConcatenated) {
        Bodies::template concatenated<kKind>(out, x, x + dim, weight, dim, n);
      } else {
        Bodies::template interleaved<kKind>(out, x, weight, n);
      }
    });
  }

  template <bool kWeighted>
  static Acc any_backward(
      Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, Acc weight, int64_t dim, int64_t n) {
    Acc grad_weight = 0;
    dispatch_kind(kind, [&]<Kind kKind>() {
      if (layout == Layout::kConcatenated) {
        grad_weight = Bodies::template concatenated_backward<kKind, kWeighted>(
            grad_x, grad_x + dim, grad, x, x + dim, weight, dim, n);
      } else {
        grad_weight = Bodies::template interleaved_backward<kKind, kWeighted>(grad_x, grad, x, weight, n);
      }
    });
    return grad_weight;
  }

  static void gated_backward(Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, int64_t dim, int64_t n) {
    any_backward<false>(kind, layout, grad_x, grad, x, 1, dim, n);
  }

  static Acc gated_backward_weighted(
      Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, Acc weight, int64_t dim) {
    return any_backward<true>(kind, layout, grad_x, grad, x, weight, dim, dim);
  }

  static constexpr Loops<T> kTable = {activation, activation_backward, gated, gated_backward, gated_backward_weighted};
};

} // namespace
} // namespace moe_ext::activation
