// Activation loops: plain loops for the vectoriser, compiled once per instruction set. Internal linkage, as simd.h.
// Everything is recomputed from x in one pass; a value and its slope share their exponential and their division.
#pragma once

#include "activation/activation_tables.h"
#include "common/simd.h"

namespace moe_ext::activation {
namespace {

// The loops of T, with the functions F<kind>.
template <template <Kind> typename F, typename T>
struct LoopsOf {
  using Acc = acc_t<T>;
  static constexpr int64_t kLine = 64 / sizeof(T); // elements of a cache line
  static constexpr int64_t kBlock = 16 * kLine;

  template <Kind kKind>
  static void activation_loop(T* __restrict__ out, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = from_acc<T>(F<kKind>::value(to_acc(x[i])));
    }
  }

  template <Kind kKind>
  static void activation_backward_loop(
      T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      Acc result;
      F<kKind>::value_and_grad(to_acc(x[i]), to_acc(grad[i]), result);
      grad_x[i] = from_acc<T>(result);
    }
  }

  // Rows are short: gates and ups are two streams that break off at the end of each, and a processor does not foresee
  // where they go on. So a block of a row asks for what the next row has in its place.
  static MOE_INLINE void ask_ahead(const T* gate, int64_t dim, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kLine) {
      __builtin_prefetch(gate + i + 2 * dim);
      __builtin_prefetch(gate + i + 3 * dim);
    }
  }

  template <Kind kKind>
  static void concatenated_loop(
      T* __restrict__ out, const T* __restrict__ gate, const T* __restrict__ up, int64_t dim, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      ask_ahead(gate, dim, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        out[i] = from_acc<T>(F<kKind>::value(to_acc(gate[i])) * to_acc(up[i]));
      }
    }
  }

  template <Kind kKind>
  static void interleaved_loop(T* __restrict__ out, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = from_acc<T>(F<kKind>::value(to_acc(x[2 * i])) * to_acc(x[2 * i + 1]));
    }
  }

  template <Kind kKind>
  static void concatenated_backward_loop(
      T* __restrict__ grad_gate, T* __restrict__ grad_up, const T* __restrict__ grad, const T* __restrict__ gate,
      const T* __restrict__ up, int64_t dim, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      ask_ahead(gate, dim, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        const Acc g = to_acc(grad[i]);
        Acc result;
        const Acc value = F<kKind>::value_and_grad(to_acc(gate[i]), g * to_acc(up[i]), result);
        grad_gate[i] = from_acc<T>(result);
        grad_up[i] = from_acc<T>(g * value);
      }
    }
  }

  template <Kind kKind>
  static void interleaved_backward_loop(
      T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const Acc g = to_acc(grad[i]);
      Acc result;
      const Acc value = F<kKind>::value_and_grad(to_acc(x[2 * i]), g * to_acc(x[2 * i + 1]), result);
      grad_x[2 * i] = from_acc<T>(result);
      grad_x[2 * i + 1] = from_acc<T>(g * value);
    }
  }

  // f.operator()<kind>()
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
    dispatch_kind(kind, [&]<Kind kKind>() { activation_loop<kKind>(out, x, n); });
  }

  static void activation_backward(Kind kind, T* grad_x, const T* grad, const T* x, int64_t n) {
    dispatch_kind(kind, [&]<Kind kKind>() { activation_backward_loop<kKind>(grad_x, grad, x, n); });
  }

  static void gated(Kind kind, Layout layout, T* out, const T* x, int64_t dim, int64_t n) {
    dispatch_kind(kind, [&]<Kind kKind>() {
      if (layout == Layout::kConcatenated) {
        concatenated_loop<kKind>(out, x, x + dim, dim, n);
      } else {
        interleaved_loop<kKind>(out, x, n);
      }
    });
  }

  static void gated_backward(Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, int64_t dim, int64_t n) {
    dispatch_kind(kind, [&]<Kind kKind>() {
      if (layout == Layout::kConcatenated) {
        concatenated_backward_loop<kKind>(grad_x, grad_x + dim, grad, x, x + dim, dim, n);
      } else {
        interleaved_backward_loop<kKind>(grad_x, grad, x, n);
      }
    });
  }

  static constexpr Loops<T> kTable = {activation, activation_backward, gated, gated_backward};
};

} // namespace
} // namespace moe_ext::activation
