// Tables of the loops that selective_scan_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::recurrence {

// Heads that a loop processes side by side. Missing heads of the last group are zeros.
constexpr int64_t kLanes = 16;

// Inputs of a stretch of positions of kLanes heads, which share B and C.
template <typename Acc>
struct ScanArgs {
  int64_t n, dim; // positions; K
  const Acc* x;   // [n][kLanes]
  const Acc* dt;  // [n][kLanes]
  const Acc* a;   // [dim][kLanes]
  const Acc* b;   // [n][dim], rows b_stride apart
  const Acc* c;   // [n][dim], rows c_stride apart
  int64_t b_stride, c_stride;
  const bool* fresh; // [n]: true if a document begins here, from a state of zeros; null: nowhere
};

template <typename Acc>
struct ScanGrads {
  const Acc* out;    // [n][kLanes]: gradient of y
  const Acc* before; // [dim][kLanes], the state before the stretch
  Acc* states;       // [n][dim][kLanes], memory
  Acc* decays;       // [n][dim][kLanes], memory
  Acc* state;        // [dim][kLanes]: gradient of the state after the stretch, then of the state before it
  Acc *x, *dt;       // [n][kLanes]
  Acc* a;            // [dim][kLanes], added to
  Acc *b, *c;        // [n][dim][kLanes], added to, by head
};

template <typename Acc>
struct ScanKernels {
  // Computes y [n][kLanes], and replaces state [dim][kLanes] by the state after the stretch.
  void (*forward)(Acc* y, Acc* state, const ScanArgs<Acc>& args);
  void (*backward)(const ScanGrads<Acc>& grads, const ScanArgs<Acc>& args);
  // sums[i] += the sum of the lanes of i
  void (*add_lanes)(Acc* sums, const Acc* lanes, int64_t n);
};

struct ScanTable {
  ScanKernels<float> f32;
  ScanKernels<double> f64;

  template <typename Acc>
  const ScanKernels<Acc>& of() const {
    if constexpr (sizeof(Acc) == 8) {
      return f64;
    } else {
      return f32;
    }
  }
};

} // namespace moe_ext::recurrence
