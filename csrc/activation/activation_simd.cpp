// Activation loops of float32 and float64: plain loops for the vectoriser. activation_16bit_simd.cpp has the others.
#include "activation/activation_loops.h"
#include "activation/activation_math.h"

namespace moe_ext::activation::MOE_ISA {
namespace {

// Everything is recomputed from x in one pass; a value and its slope share their exponential and their division.
template <typename T>
struct Bodies {
  using Acc = acc_t<T>;
  static constexpr int64_t kLine = 64 / sizeof(T); // elements of a cache line
  static constexpr int64_t kBlock = 16 * kLine;

  template <Kind kKind>
  static void activation(T* __restrict__ out, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = from_acc<T>(Function<kKind>::value(to_acc(x[i])));
    }
  }

  template <Kind kKind>
  static void activation_backward(
      T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      Acc result;
      Function<kKind>::value_and_grad(to_acc(x[i]), to_acc(grad[i]), result);
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
  static void concatenated(
      T* __restrict__ out, const T* __restrict__ gate, const T* __restrict__ up, int64_t dim, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      ask_ahead(gate, dim, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        out[i] = from_acc<T>(Function<kKind>::value(to_acc(gate[i])) * to_acc(up[i]));
      }
    }
  }

  template <Kind kKind>
  static void interleaved(T* __restrict__ out, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = from_acc<T>(Function<kKind>::value(to_acc(x[2 * i])) * to_acc(x[2 * i + 1]));
    }
  }

  template <Kind kKind>
  static void concatenated_backward(
      T* __restrict__ grad_gate, T* __restrict__ grad_up, const T* __restrict__ grad, const T* __restrict__ gate,
      const T* __restrict__ up, int64_t dim, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      ask_ahead(gate, dim, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        const Acc g = to_acc(grad[i]);
        Acc result;
        const Acc value = Function<kKind>::value_and_grad(to_acc(gate[i]), g * to_acc(up[i]), result);
        grad_gate[i] = from_acc<T>(result);
        grad_up[i] = from_acc<T>(g * value);
      }
    }
  }

  template <Kind kKind>
  static void interleaved_backward(
      T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const Acc g = to_acc(grad[i]);
      Acc result;
      const Acc value = Function<kKind>::value_and_grad(to_acc(x[2 * i]), g * to_acc(x[2 * i + 1]), result);
      grad_x[2 * i] = from_acc<T>(result);
      grad_x[2 * i + 1] = from_acc<T>(g * value);
    }
  }
};

} // namespace

extern const Loops<BFloat16> bf16_table;
extern const Loops<Half> f16_table;

extern const Kernels kernel_table;
const Kernels kernel_table = {
    LoopsOf<Bodies<float>, float>::kTable, LoopsOf<Bodies<double>, double>::kTable, bf16_table, f16_table};

} // namespace moe_ext::activation::MOE_ISA
