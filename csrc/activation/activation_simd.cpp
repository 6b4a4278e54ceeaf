// Activation loops: plain loops for the vectoriser, compiled once per instruction set.
// Everything is recomputed from x in one pass; a value and its slope share their exponential and their division.
#include "activation/activation_math.h"
#include "activation/activation_tables.h"
#include "common/simd.h"

namespace moe_ext::activation::MOE_ISA {
namespace {

template <Kind kKind, typename T>
void activation_loop(T* __restrict__ out, const T* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_acc<T>(Function<kKind>::value(to_acc(x[i])));
  }
}

template <Kind kKind, typename T>
void activation_backward_loop(T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    acc_t<T> result;
    Function<kKind>::value_and_grad(to_acc(x[i]), to_acc(grad[i]), result);
    grad_x[i] = from_acc<T>(result);
  }
}

template <Kind kKind, typename T>
void concatenated_loop(T* __restrict__ out, const T* __restrict__ gate, const T* __restrict__ up, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_acc<T>(Function<kKind>::value(to_acc(gate[i])) * to_acc(up[i]));
  }
}

template <Kind kKind, typename T>
void interleaved_loop(T* __restrict__ out, const T* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_acc<T>(Function<kKind>::value(to_acc(x[2 * i])) * to_acc(x[2 * i + 1]));
  }
}

template <Kind kKind, typename T>
void concatenated_backward_loop(
    T* __restrict__ grad_gate, T* __restrict__ grad_up, const T* __restrict__ grad, const T* __restrict__ gate,
    const T* __restrict__ up, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> g = to_acc(grad[i]);
    acc_t<T> result;
    const acc_t<T> value = Function<kKind>::value_and_grad(to_acc(gate[i]), g * to_acc(up[i]), result);
    grad_gate[i] = from_acc<T>(result);
    grad_up[i] = from_acc<T>(g * value);
  }
}

template <Kind kKind, typename T>
void interleaved_backward_loop(T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> g = to_acc(grad[i]);
    acc_t<T> result;
    const acc_t<T> value = Function<kKind>::value_and_grad(to_acc(x[2 * i]), g * to_acc(x[2 * i + 1]), result);
    grad_x[2 * i] = from_acc<T>(result);
    grad_x[2 * i + 1] = from_acc<T>(g * value);
  }
}

// f.operator()<kind>()
template <typename F>
MOE_INLINE void dispatch_kind(Kind kind, F&& f) {
  switch (kind) {
    case Kind::kSilu:
      return f.template operator()<Kind::kSilu>();
    case Kind::kGelu:
      return f.template operator()<Kind::kGelu>();
    case Kind::kGeluTanh:
      return f.template operator()<Kind::kGeluTanh>();
    case Kind::kRelu:
      return f.template operator()<Kind::kRelu>();
    case Kind::kReluSquared:
      return f.template operator()<Kind::kReluSquared>();
  }
}

template <typename T>
void activation(Kind kind, T* out, const T* x, int64_t n) {
  dispatch_kind(kind, [&]<Kind kKind>() { activation_loop<kKind>(out, x, n); });
}

template <typename T>
void activation_backward(Kind kind, T* grad_x, const T* grad, const T* x, int64_t n) {
  dispatch_kind(kind, [&]<Kind kKind>() { activation_backward_loop<kKind>(grad_x, grad, x, n); });
}

template <typename T>
void gated(Kind kind, Layout layout, T* out, const T* x, int64_t dim, int64_t n) {
  dispatch_kind(kind, [&]<Kind kKind>() {
    if (layout == Layout::kConcatenated) {
      concatenated_loop<kKind>(out, x, x + dim, n);
    } else {
      interleaved_loop<kKind>(out, x, n);
    }
  });
}

template <typename T>
void gated_backward(Kind kind, Layout layout, T* grad_x, const T* grad, const T* x, int64_t dim, int64_t n) {
  dispatch_kind(kind, [&]<Kind kKind>() {
    if (layout == Layout::kConcatenated) {
      concatenated_backward_loop<kKind>(grad_x, grad_x + dim, grad, x, x + dim, n);
    } else {
      interleaved_backward_loop<kKind>(grad_x, grad, x, n);
    }
  });
}

template <typename T>
constexpr Loops<T> kLoops = {activation<T>, activation_backward<T>, gated<T>, gated_backward<T>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kLoops<float>, kLoops<double>, kLoops<BFloat16>, kLoops<Half>};

} // namespace moe_ext::activation::MOE_ISA
