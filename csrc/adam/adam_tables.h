// Tables of the loops that adam_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include "common/simd.h"

namespace moe_ext::adam {

// Constants that every element of a step shares.
struct Factors {
  float decay; // 1 - lr * weight_decay
  float grad_scale;
  float one_minus_beta1, beta2, one_minus_beta2;
  float inverse_root; // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
  bool follow_copy; // start from `copy` where it differs from the rounded parameter
};

// A step over n elements with gradients of type G. copy [n] becomes the rounded parameters. Reading `copy` for
// `follow_copy` costs no extra memory traffic, because a store loads its lines in any case.
template <typename G, typename C>
using Step = void (*)(
    float* param, const G* grad, float* exp_avg, float* exp_avg_sq, C* copy, const Factors& factors, int64_t n);

// Steps by type of the 16-bit copy. C = float stands for no copy.
template <typename G>
struct StepsFrom {
  Step<G, float> none;
  Step<G, BFloat16> bf16;
  Step<G, Half> f16;
};

struct Kernels {
  StepsFrom<float> f32;
  StepsFrom<BFloat16> bf16;
  StepsFrom<Half> f16;
};

} // namespace moe_ext::adam
