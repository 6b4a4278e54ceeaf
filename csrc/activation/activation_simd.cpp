// Activation loops of float32 and float64: plain loops for the vectoriser. activation_16bit_simd.cpp has those of
// 16-bit types.
#include "activation/activation_loops.h"
#include "activation/activation_math.h"

namespace moe_ext::activation::MOE_ISA {
namespace {

// Backward loops recompute everything from x in one pass. A value and its slope share one exponential and one division.
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

  // Prefetches the same columns of the next row. Gates and ups of short rows are two streams that break off at the end
  // of each row, where the hardware cannot predict the next address.
  static MOE_INLINE void ask_ahead(const T* gate, int64_t dim, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kLine) {
      __builtin_prefetch(gate + i + 2 * dim);
      __builtin_prefetch(gate + i + 3 * dim);
    }
  }

  template <Kind kKind>
  static void concatenated(
      T* __restrict__ out, const T* __restrict__ gate, const T* __restrict__ up, Acc weight, int64_t dim, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      ask_ahead(gate, dim, begin, end);
      for (int64_t i = begin; i < end; ++i) {
        out[i] = from_acc<T>(Function<kKind>::value(to_acc(gate[i])) * to_acc(up[i]) * weight);
      }
    }
  }

  template <Kind kKind>
  static void interleaved(T* __restrict__ out, const T* __restrict__ x, Acc weight, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = from_acc<T>(Function<kKind>::value(to_acc(x[2 * i])) * to_acc(x[2 * i + 1]) * weight);
    }
  }

  // Computes the gradients of one output's inputs. Returns its term of the weight's gradient.
  template <Kind kKind>
  static MOE_INLINE Acc one_backward(T grad, Acc weight, T gate, T up, T& grad_gate, T& grad_up) {
    const Acc g = to_acc(grad) * weight;
    Acc result;
    const Acc value = Function<kKind>::value_and_grad(to_acc(gate), g * to_acc(up), result);
    grad_gate = from_acc<T>(result);
    grad_up = from_acc<T>(g * value);
    return to_acc(grad) * (value * to_acc(up));
  }

  // Sums products in the order of `dot` in simd.h, block by block. In one loop with the functions the sum would not be
  // vectorised.
  class Sum {
   public:
    MOE_INLINE void add(const Acc* products, int64_t n) {
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          lanes_[lane] += products[i + lane];
        }
      }
      for (int64_t lane = 0; i + lane < n; ++lane) {
        lanes_[lane] += products[i + lane];
      }
    }
    MOE_INLINE Acc total() const {
      Acc sum = 0;
      for (const Acc lane : lanes_) {
        sum += lane;
      }
      return sum;
    }

   private:
    static constexpr int64_t kLanes = 16;
    Acc lanes_[kLanes] = {};
  };

  template <Kind kKind, bool kWeighted>
  static Acc concatenated_backward(
      T* __restrict__ grad_gate, T* __restrict__ grad_up, const T* __restrict__ grad, const T* __restrict__ gate,
      const T* __restrict__ up, Acc weight, int64_t dim, int64_t n) {
    Sum sum;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      ask_ahead(gate, dim, begin, end);
      Acc products[kBlock];
      for (int64_t i = begin; i < end; ++i) {
        products[i - begin] = one_backward<kKind>(grad[i], weight, gate[i], up[i], grad_gate[i], grad_up[i]);
      }
      if constexpr (kWeighted) {
        sum.add(products, end - begin);
      }
    }
    return sum.total();
  }

  template <Kind kKind, bool kWeighted>
  static Acc interleaved_backward(
      T* __restrict__ grad_x, const T* __restrict__ grad, const T* __restrict__ x, Acc weight, int64_t n) {
    Sum sum;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      Acc products[kBlock];
      for (int64_t i = begin; i < end; ++i) {
        products[i - begin] =
            one_backward<kKind>(grad[i], weight, x[2 * i], x[2 * i + 1], grad_x[2 * i], grad_x[2 * i + 1]);
      }
      if constexpr (kWeighted) {
        sum.add(products, end - begin);
      }
    }
    return sum.total();
  }
};

} // namespace

extern const Loops<BFloat16> bf16_table;
extern const Loops<Half> f16_table;

extern const Kernels kernel_table;
const Kernels kernel_table = {
    LoopsOf<Bodies<float>, float>::kTable, LoopsOf<Bodies<double>, double>::kTable, bf16_table, f16_table};

} // namespace moe_ext::activation::MOE_ISA
