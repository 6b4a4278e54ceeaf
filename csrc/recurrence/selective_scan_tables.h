// The loops that selective_scan_simd.cpp provides for each instruction set. Torch-free.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace moe_ext::recurrence {

// Heads that a loop takes side by side, the rest of the last ones filled up with zeros.
constexpr int64_t kLanes = 16;

// A stretch of positions of kLanes heads, which share B and C.
template <typename Acc>
struct ScanArgs {
  int64_t n, dim; // positions; K
  const Acc* x;   // [n][kLanes]
  const Acc* dt;  // [n][kLanes]
  const Acc* a;   // [dim][kLanes]
  const Acc* b;   // [dim] of a position, `stride` apart
  const Acc* c;   // as b
  int64_t b_stride, c_stride;
  const bool* fresh; // [n]: a document begins here, which finds a state of zeros; null: nowhere
};

template <typename Acc>
struct ScanGrads {
  const Acc* out;    // [n][kLanes]: of y
  const Acc* before; // [dim][kLanes], the state that the stretch finds
  Acc* states;       // [n][dim][kLanes], memory
  Acc* decays;       // [n][dim][kLanes], memory
  Acc* state;        // [dim][kLanes]: of the state that the stretch leaves, then of the one that it finds
  Acc *x, *dt;       // [n][kLanes]
  Acc* a;            // [dim][kLanes], added to
  Acc *b, *c;        // [n][dim][kLanes], added to: a share of each head
};

template <typename Acc>
struct ScanKernels {
  // y [n][kLanes]; state [dim][kLanes] goes on to that behind the stretch.
  void (*forward)(Acc* y, Acc* state, const ScanArgs<Acc>& args);
  void (*backward)(const ScanGrads<Acc>& grads, const ScanArgs<Acc>& args);
  // sums[i] += the lanes of i
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
