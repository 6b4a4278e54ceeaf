// Scaled copies: plain loops for the vectoriser, compiled once per instruction set. The loops are faster than the
// memory. With two tensors they therefore prefetch; with one, in place, the hardware prefetcher is enough.
#include "quantize/scale_into_math.h"
#include "quantize/scale_into_tables.h"

namespace moe_ext::scale_into::MOE_ISA {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kAhead = 8192;
constexpr int64_t kLineBytes = 64;

template <typename T, typename U>
MOE_INLINE bool scale_loop(const T* x, acc_t<T> scale, int64_t n, U* out) {
  using Wide = wide_t<T, U>;
  decltype(nonfinite_bit<U>(Wide())) seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Wide y = static_cast<Wide>(to_acc(x[i]) * scale);
    out[i] = rounded<U>(y);
    seen |= nonfinite_bit<U>(y);
  }
  return has_top_bit(seen);
}

// Prefetches into the L2 cache. A prefetch beyond the end of the tensor has no effect.
template <bool kWrite, typename T>
MOE_INLINE void prefetch_block(const T* from) {
  for (int64_t i = 0; i < kBlock; i += kLineBytes / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(from + i, kWrite, 2);
  }
}

template <typename T, typename U>
bool scale(const T* x, acc_t<T> factor, int64_t n, U* out) {
  if constexpr (std::is_same_v<T, U>) {
    // In place, the loop is inlined with a single pointer. With two, the compiler's run-time check for overlap would
    // choose the scalar loop.
    if (x == out) {
      return scale_loop<T, U>(out, factor, n, out);
    }
  }
  bool nonfinite = false;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    prefetch_block<false>(x + begin + kAhead);
    prefetch_block<true>(out + begin + kAhead);
    nonfinite |= scale_loop<T, U>(x + begin, factor, count, out + begin);
  }
  return nonfinite;
}

template <typename T>
constexpr LoopsFrom<T> kLoops = {{scale<T, float>, scale<T, double>, scale<T, BFloat16>, scale<T, Half>}};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kLoops<float>, kLoops<double>, kLoops<BFloat16>, kLoops<Half>};

} // namespace moe_ext::scale_into::MOE_ISA
