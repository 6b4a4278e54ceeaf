// CPU side of the selective scan. Heads that share B and C lie side by side in the lanes of selective_scan_simd.cpp.
// The division of heads into tasks depends on the sizes only, so that bits do not depend on the number of threads.
#include "recurrence/selective_scan.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "recurrence/checks.h"
#include "recurrence/lanes.h"
#include "recurrence/selective_scan_tables.h"

namespace moe_ext::recurrence {
namespace scan {

MOE_EXT_SELECT_KERNELS(ScanTable)

} // namespace scan

namespace {

// The arguments, and the division of heads into tiles of kLanes and parts.
template <typename Acc>
struct __attribute__((visibility("hidden"))) Scan {
  Tensor b_rows, c_rows;
  OptionalTensor numbers;
  Strided<const Acc> x, dt, b, c;
  Tensor rates;
  int64_t batch, groups, heads, length, dim, per_group, tiles, parts;

  explicit Scan(const SelectiveScanArgs& args)
      : b_rows(with_dense_rows(args.b)),
        c_rows(with_dense_rows(args.c)),
        numbers(optional_contiguous(args.documents)),
        x(args.x),
        dt(args.dt),
        b(b_rows),
        c(c_rows),
        rates(as_contiguous(args.a)),
        batch(args.x.size(0)),
        groups(args.b.size(1)),
        heads(args.x.size(1)),
        length(args.x.size(2)),
        dim(args.a.size(1)),
        per_group(groups > 0 ? heads / groups : 0),
        tiles((per_group + kLanes - 1) / kLanes),
        parts(
            std::clamp<int64_t>(kTasksWanted / std::max<int64_t>(1, batch * groups), 1, std::max<int64_t>(1, tiles))) {
  }

  int64_t num_chunks() const {
    return (length + kScanChunk - 1) / kScanChunk;
  }

  // Set memory[t] to true if a document begins at position begin + t. Returns null without documents.
  const bool* fresh(bool* memory, int64_t row, int64_t begin, int64_t n) const {
    if (!numbers) {
      return nullptr;
    }
    const int64_t* document = data<int64_t>(*numbers) + (numbers->size(0) > 1 ? row : 0) * length;
    for (int64_t t = 0; t < n; ++t) {
      memory[t] = begin + t > 0 && document[begin + t] != document[begin + t - 1];
    }
    return memory;
  }

  // Inputs of a stretch of positions of some heads. x and dt are gathered into memory [kScanChunk][kLanes].
  ScanArgs<Acc> stretch(
      int64_t row, int64_t group, const Lanes& lanes, int64_t begin, int64_t n, Acc* of_x, Acc* of_dt,
      const Acc* of_rates, const bool* fresh) const {
    gather<kLanes>(of_x, x.at(row, lanes.first, begin), x.row, x.position, n, lanes.count);
    gather<kLanes>(of_dt, dt.at(row, lanes.first, begin), dt.row, dt.position, n, lanes.count);
    return {n,          dim,        of_x, of_dt, of_rates, b.at(row, group, begin), c.at(row, group, begin),
            b.position, c.position, fresh};
  }

  // Call f(part, b, group) for each task.
  template <typename F>
  void each_task(const F& f) const {
    for_each_task(parts * batch * groups, [&](int64_t task) {
      const int64_t place = task % (batch * groups);
      f(task / (batch * groups), place / groups, place % groups);
    });
  }
};

template <typename Acc>
Lanes lanes_of(const Scan<Acc>& in, int64_t group, int64_t tile) {
  return {group * in.per_group + tile * kLanes, std::min(kLanes, in.per_group - tile * kLanes)};
}

template <typename Acc>
void forward_tile(
    const Scan<Acc>& in, int64_t row, int64_t group, const Lanes& lanes, const Tensor& out, const Tensor& last,
    const Tensor& states) {
  Memory<Acc> memory(kLanes * (3 * kScanChunk + 2 * in.dim));
  Acc *x = memory.take(kScanChunk * kLanes), *dt = memory.take(kScanChunk * kLanes);
  Acc *y = memory.take(kScanChunk * kLanes), *rates = memory.take(in.dim * kLanes),
      *state = memory.take(in.dim * kLanes);
  std::array<bool, kScanChunk> memory_of_fresh;
  const int64_t head = row * in.heads + lanes.first;
  gather<kLanes>(rates, data<Acc>(in.rates) + lanes.first * in.dim, in.dim, 1, in.dim, lanes.count);
  gather<kLanes>(state, data<Acc>(last) + head * in.dim, in.dim, 1, in.dim, lanes.count);
  for (int64_t chunk = 0, begin = 0; begin < in.length; ++chunk, begin += kScanChunk) {
    const int64_t n = std::min(kScanChunk, in.length - begin), chunks = in.num_chunks();
    scatter<kLanes>(
        data<Acc>(states) + (head * chunks + chunk) * in.dim, chunks * in.dim, 1, state, in.dim, lanes.count);
    const bool* fresh = in.fresh(memory_of_fresh.data(), row, begin, n);
    const ScanArgs<Acc> args = in.stretch(row, group, lanes, begin, n, x, dt, rates, fresh);
    scan::kernels().of<Acc>().forward(y, state, args);
    const Strided<Acc> to(out);
    scatter<kLanes>(to.at(row, lanes.first, begin), to.row, to.position, y, n, lanes.count);
  }
  scatter<kLanes>(data<Acc>(last) + head * in.dim, in.dim, 1, state, in.dim, lanes.count);
}

std::tuple<Tensor, Tensor, Tensor> selective_scan_cpu(
    Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, OptionalTensor documents) {
  const SelectiveScanArgs args = {x, dt, a, b, c, state, documents};
  check_selective_scan("selective_scan", args);
  const ScalarType dtype = x.scalar_type();
  Tensor out = new_like(x), last = new_on_cpu(sizes_of(state), dtype);
  torch::stable::copy_(last, state);
  Tensor states = new_on_cpu({x.size(0), x.size(1), (x.size(2) + kScanChunk - 1) / kScanChunk, a.size(1)}, dtype);
  dispatch_floating(dtype, [&]<typename T>() {
    const Scan<acc_t<T>> in(args);
    in.each_task([&](int64_t part, int64_t row, int64_t group) {
      for (int64_t tile = in.tiles * part / in.parts; tile < in.tiles * (part + 1) / in.parts; ++tile) {
        forward_tile(in, row, group, lanes_of(in, group, tile), out, last, states);
      }
    });
  });
  return {out, last, states};
}

// Tensors of a backward pass besides the arguments. Gradients of B and C are partial sums [parts, B, G, L, K]; that of
// A is [B, H, K], by row of the batch.
template <typename Acc>
struct Results {
  Strided<const Acc> out;
  Strided<Acc> x, dt;
  const Tensor &states, &a, &b, &c, &state;
};

// Process tiles [first, end) of a group: chunks from the last to the first, and all tiles for each chunk. Gradients of
// B and C are summed over tiles in lanes, and then once over lanes.
template <typename Acc>
void backward_tiles(
    const Scan<Acc>& in, const Results<Acc>& to, int64_t part, int64_t row, int64_t group, int64_t first, int64_t end) {
  const ScanKernels<Acc>& loops = scan::kernels().of<Acc>();
  const int64_t width = in.dim * kLanes, rows = kScanChunk * kLanes, count = end - first, chunks = in.num_chunks();
  Memory<Acc> memory(5 * rows + 4 * kScanChunk * width + width * (2 * count + 2));
  Acc *x = memory.take(rows), *dt = memory.take(rows), *dy = memory.take(rows);
  Acc *of_x = memory.take(rows), *of_dt = memory.take(rows);
  Acc *states = memory.take(kScanChunk * width), *decays = memory.take(kScanChunk * width);
  Acc *of_b = memory.take(kScanChunk * width), *of_c = memory.take(kScanChunk * width);
  Acc *rates = memory.take(width), *before = memory.take(width);
  Acc *of_states = memory.take(count * width), *of_rates = memory.take(count * width);
  std::array<bool, kScanChunk> memory_of_fresh;
  std::fill_n(of_rates, count * width, Acc(0));
  for (int64_t i = 0; i < count; ++i) {
    const Lanes lanes = lanes_of(in, group, first + i);
    const int64_t head = row * in.heads + lanes.first;
    gather<kLanes>(of_states + i * width, data<Acc>(to.state) + head * in.dim, in.dim, 1, in.dim, lanes.count);
  }
  const int64_t of_part = ((part * in.batch + row) * in.groups + group) * in.length;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kScanChunk, n = std::min(kScanChunk, in.length - begin);
    const bool* fresh = in.fresh(memory_of_fresh.data(), row, begin, n);
    std::fill_n(of_b, n * width, Acc(0));
    std::fill_n(of_c, n * width, Acc(0));
    for (int64_t i = 0; i < count; ++i) {
      const Lanes lanes = lanes_of(in, group, first + i);
      const int64_t head = row * in.heads + lanes.first;
      gather<kLanes>(rates, data<Acc>(in.rates) + lanes.first * in.dim, in.dim, 1, in.dim, lanes.count);
      gather<kLanes>(
          before, data<Acc>(to.states) + (head * chunks + chunk) * in.dim, chunks * in.dim, 1, in.dim, lanes.count);
      gather<kLanes>(dy, to.out.at(row, lanes.first, begin), to.out.row, to.out.position, n, lanes.count);
      const ScanArgs<Acc> args = in.stretch(row, group, lanes, begin, n, x, dt, rates, fresh);
      loops.backward(
          {dy, before, states, decays, of_states + i * width, of_x, of_dt, of_rates + i * width, of_b, of_c}, args);
      scatter<kLanes>(to.x.at(row, lanes.first, begin), to.x.row, to.x.position, of_x, n, lanes.count);
      scatter<kLanes>(to.dt.at(row, lanes.first, begin), to.dt.row, to.dt.position, of_dt, n, lanes.count);
    }
    for (const auto& [grad, lanes] : {std::pair(&to.b, of_b), std::pair(&to.c, of_c)}) {
      Acc* const sums = data<Acc>(*grad) + (of_part + begin) * in.dim;
      std::fill_n(sums, n * in.dim, Acc(0));
      loops.add_lanes(sums, lanes, n * in.dim);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Lanes lanes = lanes_of(in, group, first + i);
    const int64_t head = (row * in.heads + lanes.first) * in.dim;
    scatter<kLanes>(data<Acc>(to.state) + head, in.dim, 1, of_states + i * width, in.dim, lanes.count);
    scatter<kLanes>(data<Acc>(to.a) + head, in.dim, 1, of_rates + i * width, in.dim, lanes.count);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> selective_scan_backward_cpu(
    Tensor grad_out, Tensor grad_last, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, OptionalTensor documents,
    Tensor states) {
  const SelectiveScanArgs args = {x, dt, a, b, c, grad_last, documents};
  check_selective_scan_backward("_selective_scan_backward", args, grad_out, grad_last, states);
  const ScalarType dtype = x.scalar_type();
  const Tensor kept = as_contiguous(states);
  Tensor grad_x = new_like(x), grad_dt = new_like(dt);
  Tensor grad_state = new_on_cpu(sizes_of(grad_last), dtype), grad_a = new_on_cpu(sizes_of(grad_last), dtype);
  torch::stable::copy_(grad_state, grad_last);
  return dispatch_floating(dtype, [&]<typename T>() {
    using Acc = acc_t<T>;
    const Scan<Acc> in(args);
    const std::vector<int64_t> sizes = {in.parts, in.batch, in.groups, in.length, in.dim};
    const Tensor grad_b = new_on_cpu(sizes, dtype), grad_c = new_on_cpu(sizes, dtype);
    const Results<Acc> to = {Strided<const Acc>(grad_out),
                             Strided<Acc>(grad_x),
                             Strided<Acc>(grad_dt),
                             kept,
                             grad_a,
                             grad_b,
                             grad_c,
                             grad_state};
    in.each_task([&](int64_t part, int64_t row, int64_t group) {
      backward_tiles(in, to, part, row, group, in.tiles * part / in.parts, in.tiles * (part + 1) / in.parts);
    });
    return std::tuple(
        grad_x, grad_dt, sum_over_first(grad_a), sum_over_first(grad_b), sum_over_first(grad_c), grad_state);
  });
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("selective_scan", TORCH_BOX(&selective_scan_cpu));
  m.impl("_selective_scan_backward", TORCH_BOX(&selective_scan_backward_cpu));
}

} // namespace moe_ext::recurrence
