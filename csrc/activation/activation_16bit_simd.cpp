// Activation loops of bfloat16 and float16, with functions of relative error 2^-16. More accuracy would vanish in the
// final rounding of 2^-8 or 2^-11. Multiply-adds are fused only where the code says so, and a tail is a block padded
// with zeros, so that every instruction set computes the same bits. The loops use explicit vectors: from plain loops
// the compiler would make a branch for each bound of an exponential, with a division in each.
#include "activation/activation_loops.h"
#include "common/vectors.h"

namespace moe_ext::activation::MOE_ISA {
namespace {

constexpr int64_t kBlock = 2 * kLanes;

// a b + c and c - a b, rounded once. A processor without the instructions computes the same bits more slowly.
MOE_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__)
  return bit_cast<Floats>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
  for (int64_t i = 0; i < kLanes; ++i) {
    a[i] = fma_acc(a[i], b[i], c[i]);
  }
  return a;
#endif
}

MOE_INLINE Floats fnma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_fnmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__)
  return bit_cast<Floats>(_mm256_fnmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
  return fma(-a, b, c);
#endif
}

// c + 2^y, y = factor x, for -126 < y < 127. y = n + f, |f| <= 1/2: adding 1.5 * 2^23 + 127 rounds n to an integer and
// leaves n + 127, the exponent of 2^n, in the low bits. 2^f is a minimax fit with relative error 2^-18.4.
MOE_INLINE Floats exp2_plus(Floats c, float factor, Floats x) {
  const float kShift = 12583039.0f;
  const Floats shifted = fma(x, splat(factor), splat(kShift));
  const Floats f = fma(x, splat(factor), kShift - shifted);
  Floats p = fma(f, splat(0.009582853f), splat(0.055906426f));
  p = fma(p, f, splat(0.24024099f));
  p = fma(p, f, splat(0.6931242f));
  p = fma(p, f, splat(1.0f));
  return fma(p, bit_cast<Floats>(bit_cast<Words>(shifted) << 23), c);
}

// 1 / x for 2^-126 < x < 2^126, with relative error 2^-18 and exact at 1. A division of sixteen numbers would take as
// long as the rest of the function. Subtracting the bits of x from a constant negates its logarithm, to 5 %. Two Newton
// steps follow, the first with tuned constants.
MOE_INLINE Floats reciprocal(Floats x) {
  const Floats start = bit_cast<Floats>(0x7EF52000u - bit_cast<Words>(x));
  const Floats close = start * fnma(x, start, splat(2.0018847f));
  return fma(close, fnma(x, close, splat(1.0f)), close);
}

// 1 / (1 + exp(-x)). Results below 2^-125 are zero.
MOE_INLINE Floats logistic(Floats x) {
  const Floats bounded = at_most(86.0f, x);
  const Floats s = reciprocal(exp2_plus(splat(1.0f), -1.44269504f, bounded));
  return bounded > -86.643f ? s : splat(0.0f);
}

struct Cdf {
  Floats value, density;
};

// As normal_cdf of activation_math.h: Phi(-a) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.31 a), a fit with relative error
// 2^-17.7.
MOE_INLINE Cdf normal_cdf(Floats x) {
  const Floats a = at_most(1e30f, x < 0.0f ? -x : x);
  const Floats t = reciprocal(fma(splat(0.31f), a, splat(1.0f)));
  const Floats square = at_most(173.29f, x * x);
  const Floats power = exp2_plus(splat(0.0f), -0.72134752f, square);
  const Floats e = square < 173.28f ? power : splat(0.0f);
  Floats p = fma(splat(-0.07392912f), t, splat(0.1804503f));
  p = fma(p, t, splat(0.015744742f));
  p = fma(p, t, splat(0.13342978f));
  p = fma(p, t, splat(0.12044127f));
  p = fma(p, t, splat(0.1238607f));
  const Floats lower = (e * t) * p;
  return {x < 0.0f ? lower : 1.0f - lower, 0.39894228f * e};
}

// `value` is f(x). `value_and_grad` also sets grad = g f'(x).
template <Kind kKind>
struct Function;

// Uses s' = s (1 - s): the cancellation in 1 - s for a large x is below 2^-18 of the slope f'.
template <>
struct Function<Kind::kSilu> {
  static MOE_INLINE Floats value(Floats x) {
    return x * logistic(x);
  }
  static MOE_INLINE Floats value_and_grad(Floats x, Floats g, Floats& grad) {
    const Floats s = logistic(x);
    grad = g * (s + x * (s * (1.0f - s)));
    return x * s;
  }
};

template <>
struct Function<Kind::kGelu> {
  static MOE_INLINE Floats value(Floats x) {
    return x * normal_cdf(x).value;
  }
  static MOE_INLINE Floats value_and_grad(Floats x, Floats g, Floats& grad) {
    const Cdf cdf = normal_cdf(x);
    grad = g * (cdf.value + x * cdf.density);
    return x * cdf.value;
  }
};

template <>
struct Function<Kind::kGeluTanh> {
  static MOE_INLINE Floats twice_u(Floats x) {
    return 1.59576912f * (x + 0.044715f * x * x * x);
  }
  // Without the bound, the square of a large x would be infinite, and its product with a density of zero NaN.
  static MOE_INLINE Floats twice_slope(Floats x) {
    const Floats square = x * x;
    return 1.59576912f * (1.0f + 0.134145f * (square > 1e30f ? splat(1e30f) : square));
  }
  static MOE_INLINE Floats value(Floats x) {
    return x * logistic(twice_u(x));
  }
  static MOE_INLINE Floats value_and_grad(Floats x, Floats g, Floats& grad) {
    const Floats s = logistic(twice_u(x));
    grad = g * (s + x * (s * (1.0f - s)) * twice_slope(x));
    return x * s;
  }
};

// The comparisons are written so that NaN passes through. At x <= 0 the gradient is zero even if g is infinite.
template <>
struct Function<Kind::kRelu> {
  static MOE_INLINE Floats value(Floats x) {
    return x <= 0.0f ? splat(0.0f) : x;
  }
  static MOE_INLINE Floats value_and_grad(Floats x, Floats g, Floats& grad) {
    grad = x <= 0.0f ? splat(0.0f) : g;
    return value(x);
  }
};

template <>
struct Function<Kind::kReluSquared> {
  static MOE_INLINE Floats value(Floats x) {
    return x <= 0.0f ? splat(0.0f) : x * x;
  }
  static MOE_INLINE Floats value_and_grad(Floats x, Floats g, Floats& grad) {
    grad = x <= 0.0f ? splat(0.0f) : 2.0f * x * g;
    return value(x);
  }
};

// A block of elements as two vectors, in memory order or in another order that load and store share.
struct Block {
  Floats a, b;
};

template <typename T>
struct Codec;

// Splits a block into its even and odd elements, for which a shift and a mask of the 32-bit words suffice.
template <>
struct Codec<BFloat16> {
  static constexpr bool kEvenAndOdd = true; // order of a block in its two vectors
  static MOE_INLINE Floats lower(Words words) {
    return bit_cast<Floats>(words << 16);
  }
  static MOE_INLINE Floats upper(Words words) {
    return bit_cast<Floats>(words & 0xFFFF0000u);
  }
  static MOE_INLINE Words words_of(Floats lower, Floats upper) {
    return (rounded(lower) >> 16) | (rounded(upper) & 0xFFFF0000u);
  }
  static MOE_INLINE Block block(const BFloat16* from) {
    const Words words = load<Words>(from);
    return {lower(words), upper(words)};
  }
  static MOE_INLINE void store_block(BFloat16* to, const Block& block) {
    store(to, words_of(block.a, block.b));
  }
};

template <>
struct Codec<Half> {
  static constexpr bool kEvenAndOdd = false;
  static MOE_INLINE Floats lower(Words words) {
    return floats_of<Half>(narrowed(words & 0xFFFFu));
  }
  static MOE_INLINE Floats upper(Words words) {
    return floats_of<Half>(narrowed(words >> 16));
  }
  static MOE_INLINE Words words_of(Floats lower, Floats upper) {
    return widened(shorts_of<Half>(lower)) | (widened(shorts_of<Half>(upper)) << 16);
  }
  static MOE_INLINE Block block(const Half* from) {
    return {load_floats(from), load_floats(from + kLanes)};
  }
  static MOE_INLINE void store_block(Half* to, const Block& block) {
    store_floats(to, block.a);
    store_floats(to + kLanes, block.b);
  }
};

// An argument of a loop: `step` elements for each output, from `data` on.
template <typename P>
struct Stream {
  P* data;
  int64_t step;
};

template <typename P>
struct Tail {
  using T = std::remove_const_t<P>;

  Tail(Stream<P> stream, int64_t begin, int64_t n) : from(stream.data + stream.step * begin), size(stream.step * n) {
    if constexpr (std::is_const_v<P>) {
      __builtin_memcpy(elements, from, size * sizeof(T));
    }
  }
  void give_back() const {
    if constexpr (!std::is_const_v<P>) {
      __builtin_memcpy(from, elements, size * sizeof(T));
    }
  }

  P* from;
  int64_t size;
  T elements[2 * kBlock] = {};
};

// Calls ask(i) and body(pointers) for each block of n outputs, which begins at output i. The last block is padded with
// zeros.
template <typename Ask, typename Body, typename... P>
MOE_INLINE void for_blocks(int64_t n, const Ask& ask, const Body& body, Stream<P>... streams) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    ask(i);
    body((streams.data + streams.step * i)...);
  }
  if (i < n) {
    [&](Tail<P>... tails) {
      body(tails.elements...);
      (tails.give_back(), ...);
    }(Tail<P>(streams, i, n - i)...);
  }
}

// Sum of the products of a row in 32 lanes, by position in the row, so that it does not depend on the width of vectors.
class Sum {
 public:
  // Adds the products of the next block, in its even and odd elements or in its first and second half.
  template <bool kEvenAndOdd>
  MOE_INLINE void add(const Block& products) {
    float* const a = lanes_ + (kEvenAndOdd ? at_ / 2 : at_);
    float* const b = kEvenAndOdd ? a + kNumLanes / 2 : a + kLanes;
    store(a, load<Floats>(a) + products.a);
    store(b, load<Floats>(b) + products.b);
    at_ = (at_ + kBlock) % kNumLanes;
  }
  MOE_INLINE float total() const {
    float sum = 0;
    for (const float lane : lanes_) {
      sum += lane;
    }
    return sum;
  }

 private:
  static constexpr int64_t kNumLanes = 32;
  float lanes_[kNumLanes] = {};
  int64_t at_ = 0;
};

template <typename T>
struct Bodies {
  using C = Codec<T>;

  template <Kind kKind>
  static void activation(T* out, const T* x, int64_t n) {
    const auto body = [](T* out, const T* x) {
      const Block in = C::block(x);
      C::store_block(out, {Function<kKind>::value(in.a), Function<kKind>::value(in.b)});
    };
    for_blocks(n, ask_nothing, body, Stream<T>{out, 1}, Stream<const T>{x, 1});
  }

  template <Kind kKind>
  static void activation_backward(T* grad_x, const T* grad, const T* x, int64_t n) {
    const auto body = [](T* grad_x, const T* grad, const T* x) {
      const Block in = C::block(x), g = C::block(grad);
      Block out;
      Function<kKind>::value_and_grad(in.a, g.a, out.a);
      Function<kKind>::value_and_grad(in.b, g.b, out.b);
      C::store_block(grad_x, out);
    };
    for_blocks(n, ask_nothing, body, Stream<T>{grad_x, 1}, Stream<const T>{grad, 1}, Stream<const T>{x, 1});
  }

  template <Kind kKind>
  static void concatenated(T* out, const T* gate, const T* up, float weight, int64_t dim, int64_t n) {
    const auto body = [=](T* out, const T* gate, const T* up) {
      const Block x = C::block(gate), u = C::block(up);
      C::store_block(out, {Function<kKind>::value(x.a) * u.a * weight, Function<kKind>::value(x.b) * u.b * weight});
    };
    for_blocks(n, ask_ahead(gate, up, dim), body, Stream<T>{out, 1}, Stream<const T>{gate, 1}, Stream<const T>{up, 1});
  }

  template <Kind kKind>
  static void interleaved(T* out, const T* x, float weight, int64_t n) {
    const auto body = [=](T* out, const T* x) {
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Words words = load<Words>(x + 2 * i);
        store_floats(out + i, Function<kKind>::value(C::lower(words)) * C::upper(words) * weight);
      }
    };
    for_blocks(n, ask_nothing, body, Stream<T>{out, 1}, Stream<const T>{x, 2});
  }

  template <Kind kKind, bool kWeighted>
  static float concatenated_backward(
      T* grad_gate, T* grad_up, const T* grad, const T* gate, const T* up, float weight, int64_t dim, int64_t n) {
    Sum sum;
    const auto body = [&](T* grad_gate, T* grad_up, const T* grad, const T* gate, const T* up) {
      const Block in = C::block(grad), x = C::block(gate), u = C::block(up);
      const Block g = kWeighted ? Block{in.a * weight, in.b * weight} : in;
      Block slope;
      const Floats a = Function<kKind>::value_and_grad(x.a, g.a * u.a, slope.a);
      const Floats b = Function<kKind>::value_and_grad(x.b, g.b * u.b, slope.b);
      C::store_block(grad_gate, slope);
      C::store_block(grad_up, {g.a * a, g.b * b});
      if constexpr (kWeighted) {
        sum.template add<C::kEvenAndOdd>({in.a * (a * u.a), in.b * (b * u.b)});
      }
    };
    for_blocks(
        n, ask_ahead(gate, up, dim), body, Stream<T>{grad_gate, 1}, Stream<T>{grad_up, 1}, Stream<const T>{grad, 1},
        Stream<const T>{gate, 1}, Stream<const T>{up, 1});
    return sum.total();
  }

  template <Kind kKind, bool kWeighted>
  static float interleaved_backward(T* grad_x, const T* grad, const T* x, float weight, int64_t n) {
    Sum sum;
    const auto body = [&](T* grad_x, const T* grad, const T* x) {
      Floats products[2];
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Words words = load<Words>(x + 2 * i);
        const Floats in = load_floats(grad + i);
        const Floats g = kWeighted ? in * weight : in;
        Floats slope;
        const Floats value = Function<kKind>::value_and_grad(C::lower(words), g * C::upper(words), slope);
        store(grad_x + 2 * i, C::words_of(slope, g * value));
        products[i / kLanes] = in * (value * C::upper(words));
      }
      if constexpr (kWeighted) {
        sum.template add<false>({products[0], products[1]});
      }
    };
    for_blocks(n, ask_nothing, body, Stream<T>{grad_x, 2}, Stream<const T>{grad, 1}, Stream<const T>{x, 2});
    return sum.total();
  }

 private:
  static constexpr auto ask_nothing = [](int64_t) {};

  // As `ask_ahead` of activation_simd.cpp: prefetches the same columns of the next row.
  static MOE_INLINE auto ask_ahead(const T* gate, const T* up, int64_t dim) {
    return [=](int64_t i) {
      __builtin_prefetch(gate + i + 2 * dim);
      __builtin_prefetch(up + i + 2 * dim);
    };
  }
};

} // namespace

extern const Loops<BFloat16> bf16_table;
extern const Loops<Half> f16_table;
const Loops<BFloat16> bf16_table = LoopsOf<Bodies<BFloat16>, BFloat16>::kTable;
const Loops<Half> f16_table = LoopsOf<Bodies<Half>, Half>::kTable;

} // namespace moe_ext::activation::MOE_ISA
