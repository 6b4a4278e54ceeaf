// CPU side of the causal convolution. A task computes kLanes channels of all rows of the batch.
#include "recurrence/causal_conv1d.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/new_on_cpu.h"
#include "recurrence/causal_conv1d_tables.h"
#include "recurrence/checks.h"
#include "recurrence/lanes.h"

namespace moe_ext::recurrence {
namespace conv {

MOE_EXT_SELECT_KERNELS(ConvTable)

} // namespace conv

namespace {

// Positions that a task processes at a time.
constexpr int64_t kStretch = 256;

template <typename Acc>
struct __attribute__((visibility("hidden"))) Convolution {
  Strided<const Acc> x, halo;
  Tensor weight;
  OptionalTensor bias;
  std::vector<std::vector<int64_t>> reach; // for each row of the batch, or one for all; empty: a single document
  int64_t batch, channels, length, width, tiles;
  bool silu;

  Convolution(const CausalConvArgs& args, bool silu)
      : x(args.x),
        halo(args.halo),
        weight(as_contiguous(args.weight)),
        bias(optional_contiguous(args.bias)),
        batch(args.x.size(0)),
        channels(args.x.size(1)),
        length(args.x.size(2)),
        width(args.weight.size(1)),
        tiles((channels + kLanes - 1) / kLanes),
        silu(silu) {
    const OptionalTensor documents = optional_contiguous(args.documents);
    const int64_t whole = width - 1 + length;
    for (int64_t row = 0; documents && row < documents->size(0); ++row) {
      const int64_t* numbers = data<int64_t>(*documents) + row * whole;
      std::vector<int64_t> of_row(length);
      for (int64_t i = 1, same = 0; i < whole; ++i) {
        same = numbers[i] == numbers[i - 1] ? std::min(same + 1, width - 1) : 0;
        if (i >= width - 1) {
          of_row[i - width + 1] = same;
        }
      }
      reach.push_back(std::move(of_row));
    }
  }

  // Call f(lanes) for each task. A task covers the whole batch, so that sums over the batch need no other task.
  template <typename F>
  void each_task(const F& f) const {
    for_each_task(tiles, [&](int64_t tile) { f(Lanes{tile * kLanes, std::min(kLanes, channels - tile * kLanes)}); });
  }

  // Copy the weight [width][kLanes] and the bias [kLanes] of some channels.
  void parameters(Acc* weights, Acc* biases, const Lanes& lanes) const {
    gather<kLanes>(weights, data<const Acc>(weight) + lanes.first * width, width, 1, width, lanes.count);
    std::fill_n(biases, kLanes, Acc(0));
    if (bias) {
      std::copy_n(data<const Acc>(*bias) + lanes.first, lanes.count, biases);
    }
  }

  // Copy positions [begin - width + 1, begin + n) of some channels to out [width - 1 + n][kLanes].
  void positions(Acc* out, int64_t b, const Lanes& lanes, int64_t begin, int64_t n) const {
    const int64_t before = width - 1, of_halo = std::clamp<int64_t>(before - begin, 0, before);
    gather<kLanes>(out, halo.at(b, lanes.first, before - of_halo), halo.row, halo.position, of_halo, lanes.count);
    gather<kLanes>(
        out + of_halo * kLanes, x.at(b, lanes.first, begin - before + of_halo), x.row, x.position, before - of_halo + n,
        lanes.count);
  }

  ConvArgs<Acc> args(
      int64_t b, int64_t begin, int64_t n, const Acc* rows, const Acc* weights, const Acc* biases) const {
    const int64_t* numbers = reach.empty() ? nullptr : reach[reach.size() > 1 ? b : 0].data() + begin;
    return {n, width, rows, weights, biases, numbers, silu};
  }
};

Tensor causal_conv1d_cpu(
    Tensor x, Tensor weight, OptionalTensor bias, Tensor halo, OptionalTensor documents, bool silu) {
  const CausalConvArgs given = {x, weight, bias, halo, documents};
  check_causal_conv("causal_conv1d", given);
  Tensor out = new_like(x);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const Convolution<Acc> in(given, silu);
    const Strided<Acc> to(out);
    in.each_task([&](const Lanes& lanes) {
      Memory<Acc> memory(kLanes * (2 * kStretch + 2 * in.width));
      Acc *rows = memory.take(kLanes * (in.width - 1 + kStretch)), *results = memory.take(kLanes * kStretch);
      Acc *weights = memory.take(kLanes * in.width), *biases = memory.take(kLanes);
      in.parameters(weights, biases, lanes);
      for (int64_t b = 0; b < in.batch; ++b) {
        for (int64_t begin = 0; begin < in.length; begin += kStretch) {
          const int64_t n = std::min(kStretch, in.length - begin);
          in.positions(rows, b, lanes, begin, n);
          conv::kernels().of<Acc>().forward(results, in.args(b, begin, n, rows, weights, biases));
          scatter<kLanes>(to.at(b, lanes.first, begin), to.row, to.position, results, n, lanes.count);
        }
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward_cpu(
    Tensor grad, Tensor x, Tensor weight, OptionalTensor bias, Tensor halo, OptionalTensor documents, bool silu) {
  const char* op = "_causal_conv1d_backward";
  const CausalConvArgs given = {x, weight, bias, halo, documents};
  check_causal_conv(op, given);
  check_like(op, "grad", grad, "x", x);
  const ScalarType dtype = x.scalar_type();
  Tensor grad_x = new_like(x), grad_halo = new_on_cpu(sizes_of(halo), dtype);
  Tensor grad_weight = new_on_cpu(sizes_of(weight), dtype);
  Tensor grad_bias = new_on_cpu({bias ? x.size(1) : 0}, dtype);
  dispatch_floating(dtype, [&]<typename T>() {
    using Acc = acc_t<T>;
    const Convolution<Acc> in(given, silu);
    const Strided<const Acc> of_out(grad);
    const Strided<Acc> to_x(grad_x);
    in.each_task([&](const Lanes& lanes) {
      const int64_t before = in.width - 1, count = kLanes * (before + kStretch);
      Memory<Acc> memory(2 * count + kLanes * (kStretch + 2 * in.width + 2));
      Acc *rows = memory.take(count), *of_rows = memory.take(count), *of_results = memory.take(kLanes * kStretch);
      Acc *weights = memory.take(kLanes * in.width), *biases = memory.take(kLanes);
      Acc *of_weights = memory.take(kLanes * in.width), *of_biases = memory.take(kLanes);
      in.parameters(weights, biases, lanes);
      std::fill_n(of_weights, kLanes * in.width, Acc(0));
      std::fill_n(of_biases, kLanes, Acc(0));
      for (int64_t b = 0; b < in.batch; ++b) {
        Acc* const to_halo = data<Acc>(grad_halo) + (b * in.channels + lanes.first) * before;
        std::fill_n(of_rows, count, Acc(0));
        for (int64_t begin = 0; begin < in.length; begin += kStretch) {
          const int64_t n = std::min(kStretch, in.length - begin);
          in.positions(rows, b, lanes, begin, n);
          gather<kLanes>(of_results, of_out.at(b, lanes.first, begin), of_out.row, of_out.position, n, lanes.count);
          conv::kernels().of<Acc>().backward(
              {of_results, of_rows, of_weights, of_biases}, in.args(b, begin, n, rows, weights, biases));
          // The next stretch adds to the gradients of the last width - 1 positions. They are carried over, and written
          // with that stretch.
          const bool last = begin + n == in.length;
          const int64_t from = begin - before, end = last ? in.length : begin + n - before;
          const int64_t of_halo = std::clamp<int64_t>(-from, 0, before);
          const int64_t done = std::min(of_halo, end - from);
          scatter<kLanes>(to_halo + before - of_halo, before, 1, of_rows, done, lanes.count);
          if (end > from + done) {
            Acc* const first = to_x.at(b, lanes.first, from + done);
            scatter<kLanes>(first, to_x.row, to_x.position, of_rows + done * kLanes, end - from - done, lanes.count);
          }
          std::copy_n(of_rows + n * kLanes, before * kLanes, of_rows);
          std::fill(of_rows + before * kLanes, of_rows + count, Acc(0));
        }
        if (in.length == 0) {
          for (int64_t lane = 0; lane < lanes.count; ++lane) {
            std::fill_n(to_halo + lane * before, before, Acc(0));
          }
        }
      }
      scatter<kLanes>(data<Acc>(grad_weight) + lanes.first * in.width, in.width, 1, of_weights, in.width, lanes.count);
      if (bias) {
        std::copy_n(of_biases, lanes.count, data<Acc>(grad_bias) + lanes.first);
      }
    });
  });
  return {grad_x, grad_weight, grad_bias, grad_halo};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d_cpu));
  m.impl("_causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward_cpu));
}

} // namespace moe_ext::recurrence
