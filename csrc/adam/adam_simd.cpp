// Adam's step in one pass over parameter, gradient and moments: plain loops for the vectoriser, compiled once for each
// instruction set. The loops are bound by memory; prefetching made them no faster.
#include "adam/adam_tables.h"

namespace moe_ext::adam::MOE_ISA {
namespace {

template <typename G, typename C>
void step(
    float* __restrict__ param, const G* __restrict__ grad, float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq,
    C* __restrict__ copy, const Factors& factors, int64_t n) {
  const Factors f = factors; // a local copy, which the compiler knows that no store changes
  for (int64_t i = 0; i < n; ++i) {
    const float g = to_acc(grad[i]) * f.grad_scale;
    const float m = exp_avg[i] + f.one_minus_beta1 * (g - exp_avg[i]);
    const float v = f.beta2 * exp_avg_sq[i] + f.one_minus_beta2 * (g * g);
    float w = param[i];
    if constexpr (!std::is_same_v<C, float>) {
      const float written = to_acc(copy[i]);
      w = f.follow_copy && written != to_acc(from_acc<C>(w)) ? written : w;
    }
    const float p = w * f.decay - f.step_size * (m / (__builtin_sqrtf(v) * f.inverse_root + f.eps));
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = p;
    if constexpr (!std::is_same_v<C, float>) {
      copy[i] = from_acc<C>(p);
    }
  }
}

template <typename G>
constexpr StepsFrom<G> kSteps = {step<G, float>, step<G, BFloat16>, step<G, Half>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kSteps<float>, kSteps<BFloat16>, kSteps<Half>};

} // namespace moe_ext::adam::MOE_ISA
