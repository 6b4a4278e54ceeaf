// Tables of the loops that causal_conv1d_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::recurrence {

// Channels that a loop processes side by side. Missing channels of the last group are zeros.
constexpr int64_t kLanes = 16;

// Input of a stretch of positions of kLanes channels.
template <typename Acc>
struct ConvArgs {
  int64_t n, width;
  const Acc* x;      // [width - 1 + n][kLanes], starting width - 1 positions before the stretch
  const Acc* weight; // [width][kLanes]
  const Acc* bias;   // [kLanes], zeros without a bias
  // [n]: number of earlier positions in the same document, at most width - 1; null: always width - 1
  const int64_t* reach;
  bool silu;
};

template <typename Acc>
struct ConvGrads {
  const Acc* out;     // [n][kLanes], gradient of the result
  Acc* x;             // [width - 1 + n][kLanes], gradient of x, added to
  Acc *weight, *bias; // shapes as in ConvArgs, added to
};

template <typename Acc>
struct ConvKernels {
  void (*forward)(Acc* out, const ConvArgs<Acc>& args); // [n][kLanes]
  void (*backward)(const ConvGrads<Acc>& grads, const ConvArgs<Acc>& args);
};

struct ConvTable {
  ConvKernels<float> f32;
  ConvKernels<double> f64;

  template <typename Acc>
  const ConvKernels<Acc>& of() const {
    if constexpr (sizeof(Acc) == 8) {
      return f64;
    } else {
      return f32;
    }
  }
};

} // namespace moe_ext::recurrence
