// Error feedback for one element, shared by every backend. These files are compiled without contraction: fusing a
// product with the sum that follows it would change bits between instruction sets and devices.
#pragma once

#include "common/simd.h"

namespace moe_ext {

// Unsigned integer with the order of the magnitudes; NaN is above infinity.
template <typename Acc>
using key_t = std::conditional_t<sizeof(Acc) == 8, uint64_t, uint32_t>;

// State that an error-feedback pass reads and writes. Input and output state may be the same memory; otherwise the
// output memory may be uninitialised.
template <typename T>
struct Feedback {
  using Acc = acc_t<T>;

  const T* grad;
  const Acc* residual_in;
  const Acc* velocity_in; // or null
  Acc* residual;
  Acc* velocity; // or null
  Acc residual_scale;
  Acc momentum;
  bool streamed = false; // on the host: writes bypass the caches

  MOE_INLINE bool in_place() const {
    return residual_in == residual;
  }
};

namespace {

template <typename Acc>
constexpr key_t<Acc> kInfinityKey = sizeof(Acc) == 8 ? static_cast<key_t<Acc>>(0x7FF0000000000000) : 0x7F800000u;

MOE_INLINE uint32_t key_of(float x) {
  return bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
}

MOE_INLINE uint64_t key_of(double x) {
  return bit_cast<uint64_t>(x) & 0x7FFFFFFFFFFFFFFFu;
}

// u = momentum u + g; without velocity u = g.
template <bool kVelocity, typename T>
MOE_INLINE acc_t<T> momentum_of(const Feedback<T>& x, int64_t i) {
  const acc_t<T> grad = to_acc(x.grad[i]);
  if constexpr (kVelocity) {
    const acc_t<T> kept = x.momentum * x.velocity_in[i];
    return kept + grad;
  }
  return grad;
}

// The sum that is to be sent: a = residual_scale e + u.
template <typename T>
MOE_INLINE acc_t<T> owed(const Feedback<T>& x, acc_t<T> momentum, int64_t i) {
  const acc_t<T> carried = x.residual_scale * x.residual_in[i];
  return carried + momentum;
}

} // namespace
} // namespace moe_ext
