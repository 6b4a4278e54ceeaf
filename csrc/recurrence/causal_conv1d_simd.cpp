// Loops of the causal convolution, compiled once for each instruction set. Channels lie side by side in the lanes.
#include "recurrence/causal_conv1d_tables.h"

namespace moe_ext::recurrence::conv::MOE_ISA {
namespace {

// The first tap whose position belongs to the document of position t.
template <typename Acc>
MOE_INLINE int64_t first_tap(const ConvArgs<Acc>& args, int64_t t) {
  return args.reach == nullptr ? 0 : args.width - 1 - args.reach[t];
}

template <typename Acc>
MOE_INLINE void sum_taps(Acc* __restrict sum, const ConvArgs<Acc>& args, int64_t t) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum[lane] = args.bias[lane];
  }
  for (int64_t tap = first_tap(args, t); tap < args.width; ++tap) {
    const Acc* __restrict x = args.x + (t + tap) * kLanes;
    const Acc* __restrict weight = args.weight + tap * kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sum[lane] += weight[lane] * x[lane];
    }
  }
}

template <typename Acc>
void forward(Acc* out, const ConvArgs<Acc>& args) {
  for (int64_t t = 0; t < args.n; ++t) {
    Acc sum[kLanes];
    sum_taps(sum, args, t);
    Acc* __restrict to = out + t * kLanes;
    if (args.silu) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        to[lane] = sum[lane] * sigmoid_acc(sum[lane]);
      }
    } else {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        to[lane] = sum[lane];
      }
    }
  }
}

template <typename Acc>
void backward(const ConvGrads<Acc>& grads, const ConvArgs<Acc>& args) {
  for (int64_t t = 0; t < args.n; ++t) {
    Acc grad[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      grad[lane] = grads.out[t * kLanes + lane];
    }
    if (args.silu) {
      Acc sum[kLanes];
      sum_taps(sum, args, t);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const Acc gate = sigmoid_acc(sum[lane]);
        grad[lane] *= gate * (Acc(1) + sum[lane] * (Acc(1) - gate));
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      grads.bias[lane] += grad[lane];
    }
    for (int64_t tap = first_tap(args, t); tap < args.width; ++tap) {
      const Acc* __restrict x = args.x + (t + tap) * kLanes;
      const Acc* __restrict weight = args.weight + tap * kLanes;
      Acc* __restrict of_x = grads.x + (t + tap) * kLanes;
      Acc* __restrict of_weight = grads.weight + tap * kLanes;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        of_x[lane] += grad[lane] * weight[lane];
        of_weight[lane] += grad[lane] * x[lane];
      }
    }
  }
}

template <typename Acc>
constexpr ConvKernels<Acc> kConvKernels = {forward<Acc>, backward<Acc>};

} // namespace

extern const ConvTable kernel_table;
const ConvTable kernel_table = {kConvKernels<float>, kConvKernels<double>};

} // namespace moe_ext::recurrence::conv::MOE_ISA
