// Loops of the selective scan, compiled once for each instruction set. Heads lie side by side, positions follow one
// another.
#include "recurrence/decay_math.h"
#include "recurrence/selective_scan_tables.h"

namespace moe_ext::recurrence::scan::MOE_ISA {
namespace {

template <typename Acc>
MOE_INLINE bool is_fresh(const ScanArgs<Acc>& args, int64_t t) {
  return args.fresh != nullptr && args.fresh[t];
}

template <typename Acc>
MOE_INLINE void clear(Acc* lanes, int64_t rows) {
  for (int64_t i = 0; i < rows * kLanes; ++i) {
    lanes[i] = 0;
  }
}

template <typename Acc>
void forward(Acc* y, Acc* state, const ScanArgs<Acc>& args) {
  for (int64_t t = 0; t < args.n; ++t) {
    if (is_fresh(args, t)) {
      clear(state, args.dim);
    }
    const Acc* __restrict dt = args.dt + t * kLanes;
    Acc taken[kLanes], sum[kLanes] = {};
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      taken[lane] = dt[lane] * args.x[t * kLanes + lane];
    }
    for (int64_t k = 0; k < args.dim; ++k) {
      const Acc b = args.b[t * args.b_stride + k], c = args.c[t * args.c_stride + k];
      const Acc* __restrict a = args.a + k * kLanes;
      Acc* __restrict s = state + k * kLanes;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        s[lane] = decay_of(dt[lane] * a[lane]) * s[lane] + taken[lane] * b;
        sum[lane] += c * s[lane];
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      y[t * kLanes + lane] = sum[lane];
    }
  }
}

// Recomputes the state before each position, and the decay at the position.
template <typename Acc>
MOE_INLINE void retrace(const ScanGrads<Acc>& grads, const ScanArgs<Acc>& args) {
  const int64_t width = args.dim * kLanes;
  const Acc* from = grads.before;
  for (int64_t t = 0; t < args.n; ++t) {
    Acc* const here = grads.states + t * width;
    if (t == 0) {
      for (int64_t i = 0; i < width; ++i) {
        here[i] = from[i];
      }
    }
    if (is_fresh(args, t)) {
      clear(here, args.dim);
    }
    const Acc* __restrict dt = args.dt + t * kLanes;
    const bool last = t + 1 == args.n;
    for (int64_t k = 0; k < args.dim; ++k) {
      const Acc b = args.b[t * args.b_stride + k];
      const Acc* __restrict a = args.a + k * kLanes;
      const Acc* __restrict s = here + k * kLanes;
      Acc* __restrict decay = grads.decays + t * width + k * kLanes;
      Acc* __restrict next = here + (last ? 0 : width) + k * kLanes;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        decay[lane] = decay_of(dt[lane] * a[lane]);
      }
      for (int64_t lane = 0; !last && lane < kLanes; ++lane) {
        next[lane] = decay[lane] * s[lane] + dt[lane] * args.x[t * kLanes + lane] * b;
      }
    }
  }
}

template <typename Acc>
void backward(const ScanGrads<Acc>& grads, const ScanArgs<Acc>& args) {
  retrace(grads, args);
  const int64_t width = args.dim * kLanes;
  for (int64_t t = args.n - 1; t >= 0; --t) {
    const Acc* __restrict dt = args.dt + t * kLanes;
    const Acc* __restrict x = args.x + t * kLanes;
    const Acc* __restrict dy = grads.out + t * kLanes;
    Acc taken[kLanes], of_taken[kLanes] = {}, of_dt[kLanes] = {};
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      taken[lane] = dt[lane] * x[lane];
    }
    for (int64_t k = 0; k < args.dim; ++k) {
      const Acc b = args.b[t * args.b_stride + k], c = args.c[t * args.c_stride + k];
      const int64_t at = t * width + k * kLanes;
      const Acc* __restrict a = args.a + k * kLanes;
      const Acc* __restrict s = grads.states + at;
      const Acc* __restrict decay = grads.decays + at;
      Acc* __restrict of_state = grads.state + k * kLanes;
      Acc* __restrict of_a = grads.a + k * kLanes;
      Acc* __restrict of_b = grads.b + at;
      Acc* __restrict of_c = grads.c + at;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const Acc kept = decay[lane] * s[lane];
        const Acc grad = of_state[lane] + c * dy[lane];
        of_c[lane] += dy[lane] * (kept + taken[lane] * b);
        of_b[lane] += grad * taken[lane];
        of_taken[lane] += grad * b;
        const Acc of_log = grad * kept;
        of_a[lane] += of_log * dt[lane];
        of_dt[lane] += of_log * a[lane];
        of_state[lane] = grad * decay[lane];
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      grads.x[t * kLanes + lane] = dt[lane] * of_taken[lane];
      grads.dt[t * kLanes + lane] = x[lane] * of_taken[lane] + of_dt[lane];
    }
    if (is_fresh(args, t)) {
      clear(grads.state, args.dim);
    }
  }
}

template <typename Acc>
void add_lanes(Acc* sums, const Acc* lanes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Acc half[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      half[lane] = lanes[i * kLanes + lane];
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) {
        half[lane] += half[lane + width];
      }
    }
    sums[i] += half[0];
  }
}

template <typename Acc>
constexpr ScanKernels<Acc> kScanKernels = {forward<Acc>, backward<Acc>, add_lanes<Acc>};

} // namespace

extern const ScanTable kernel_table;
const ScanTable kernel_table = {kScanKernels<float>, kScanKernels<double>};

} // namespace moe_ext::recurrence::scan::MOE_ISA
