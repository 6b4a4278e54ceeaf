// CUDA side of the selective scan: allocates and launches, and never waits for the device.
#include <tuple>

#include "common/dispatch.h"
#include "common/torch_cuda.cuh"
#include "recurrence/selective_scan.h"
#include "recurrence/selective_scan_kernels.cuh"

namespace moe_ext::recurrence {
namespace {

using torch::stable::new_empty;

static_assert(kKeptEvery == kScanChunk);

void check_dim_on_cuda(const char* op, const Tensor& a) {
  constexpr int64_t kMost = kWarpSize * kMostPerLane;
  MOE_CHECK(
      a.size(1) <= kMost, op, ": expected A to have at most ", kMost, " columns on CUDA, got shape ", shape_string(a));
}

ScanStrides strides_of(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2)};
}

// The arguments, contiguous where kernels need it. The object keeps contiguous copies alive.
struct Arguments {
  Tensor x, dt, a, b, c;
  OptionalTensor documents;

  explicit Arguments(const SelectiveScanArgs& args)
      : x(args.x),
        dt(args.dt),
        a(as_contiguous(args.a)),
        b(as_contiguous(args.b)),
        c(as_contiguous(args.c)),
        documents(optional_contiguous(args.documents)) {
  }

  template <typename Acc>
  ScanInput<Acc> input() const {
    return {
        data<const Acc>(x),
        data<const Acc>(dt),
        strides_of(x),
        strides_of(dt),
        data<const Acc>(a),
        data<const Acc>(b),
        data<const Acc>(c),
        data_or_null<int64_t>(documents),
        documents && documents->size(0) > 1 ? x.size(2) : 0,
        x.size(0),
        b.size(1),
        x.size(1),
        x.size(2),
        a.size(1)};
  }
};

std::tuple<Tensor, Tensor, Tensor> selective_scan_cuda(
    Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, OptionalTensor documents) {
  const char* op = "selective_scan";
  const SelectiveScanArgs args = {x, dt, a, b, c, state, documents};
  check_selective_scan(op, args);
  check_dim_on_cuda(op, a);
  const DeviceScope device(x);
  const Arguments given(args);
  const Tensor first = as_contiguous(state);
  Tensor out = torch::stable::empty_like(x), last = new_empty(x, sizes_of(state));
  Tensor states = new_empty(x, {x.size(0), x.size(1), ceil_div(x.size(2), kScanChunk), a.size(1)});
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    launch_selective_scan<Acc>(
        given.input<Acc>(), data<const Acc>(first), data<Acc>(out), strides_of(out), data<Acc>(last), data<Acc>(states),
        device.stream());
  });
  return {out, last, states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> selective_scan_backward_cuda(
    Tensor grad_out, Tensor grad_last, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, OptionalTensor documents,
    Tensor states) {
  const char* op = "_selective_scan_backward";
  const SelectiveScanArgs args = {x, dt, a, b, c, grad_last, documents};
  check_selective_scan_backward(op, args, grad_out, grad_last, states);
  check_dim_on_cuda(op, a);
  const DeviceScope device(x);
  const Arguments given(args);
  const Tensor kept = as_contiguous(states);
  Tensor grad_x = torch::stable::empty_like(x), grad_dt = torch::stable::empty_like(dt);
  Tensor grad_state = new_empty(x, sizes_of(grad_last));
  torch::stable::copy_(grad_state, grad_last);
  const Tensor grad_a = torch::stable::new_zeros(x, sizes_of(grad_last));
  const int64_t groups = b.size(1), per_group = x.size(1) / std::max<int64_t>(1, groups);
  const int64_t parts = scan_parts(x.size(0) * groups, per_group, a.size(1));
  const std::vector<int64_t> sizes = {parts, x.size(0), groups, x.size(2), a.size(1)};
  const Tensor grad_b = new_empty(x, sizes), grad_c = new_empty(x, sizes);
  dispatch_floating(x.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const ScanGradients<Acc> grads = {data<const Acc>(grad_out), strides_of(grad_out),  data<const Acc>(kept),
                                      data<Acc>(grad_x),         data<Acc>(grad_dt),    strides_of(grad_x),
                                      strides_of(grad_dt),       data<Acc>(grad_state), data<Acc>(grad_a),
                                      data<Acc>(grad_b),         data<Acc>(grad_c)};
    launch_selective_scan_backward<Acc>(given.input<Acc>(), grads, parts, device.stream());
  });
  return {grad_x, grad_dt, sum_over_first(grad_a), sum_over_first(grad_b), sum_over_first(grad_c), grad_state};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("selective_scan", TORCH_BOX(&selective_scan_cuda));
  m.impl("_selective_scan_backward", TORCH_BOX(&selective_scan_backward_cuda));
}

} // namespace moe_ext::recurrence
