// CUDA side of the gated delta rule: allocates and launches, and never waits for the device.
#include <tuple>

#include "common/dispatch.h"
#include "common/torch_cuda.cuh"
#include "recurrence/delta_rule.h"
#include "recurrence/delta_rule_kernels.cuh"

namespace moe_ext::recurrence {
namespace {

using torch::stable::new_empty;

template <typename Acc>
RuleRows<const Acc> rows_of(const Tensor& t) {
  return {data<const Acc>(t), t.stride(0), t.stride(1), t.stride(2)};
}

// The arguments, contiguous where kernels need it. The object keeps contiguous copies alive.
struct Arguments {
  Tensor q, k, v, g;
  OptionalTensor beta, documents;

  explicit Arguments(const DeltaRuleArgs& args)
      : q(with_dense_rows(args.q)),
        k(with_dense_rows(args.k)),
        v(with_dense_rows(args.v)),
        g(as_contiguous(args.g)),
        beta(optional_contiguous(args.beta)),
        documents(optional_contiguous(args.documents)) {
  }

  template <typename Acc>
  RuleInput<Acc> input(const char* op) const {
    const int64_t dim = q.size(3), v_dim = v.size(3);
    const int columns = dim <= (sizeof(Acc) == 8 ? 128 : 256) ? rule_columns<Acc>(static_cast<int>(dim)) : 0;
    MOE_CHECK(
        columns > 0 && v_dim <= kMostValuesOnCuda, op,
        ": expected the head dims of q and v to be at most 256 (128 in float64) and ", kMostValuesOnCuda,
        " on CUDA, got ", dim, " and ", v_dim);
    return {
        rows_of<Acc>(q),
        rows_of<Acc>(k),
        rows_of<Acc>(v),
        data<const Acc>(g),
        data_or_null<Acc>(beta),
        data_or_null<int64_t>(documents),
        documents && documents->size(0) > 1 ? v.size(2) : 0,
        v.size(0),
        q.size(1),
        v.size(1),
        v.size(2),
        static_cast<int>(dim),
        static_cast<int>(v_dim),
        columns};
  }
};

std::tuple<Tensor, Tensor, Tensor> gated_delta_rule_cuda(
    Tensor q, Tensor k, Tensor v, Tensor g, OptionalTensor beta, Tensor state, OptionalTensor documents) {
  const char* op = "gated_delta_rule";
  const DeltaRuleArgs args = {q, k, v, g, beta, state, documents};
  check_delta_rule(op, args);
  const DeviceScope device(v);
  const Arguments given(args);
  Tensor out = new_empty(v, sizes_of(v)), last = new_empty(v, sizes_of(state));
  Tensor news = new_empty(v, beta ? sizes_of(v) : std::vector<int64_t>{0});
  torch::stable::copy_(last, state);
  dispatch_floating(v.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    launch_delta_rule<Acc>(
        given.input<Acc>(op), data<Acc>(out), data<Acc>(last), beta ? data<Acc>(news) : nullptr, device.stream());
  });
  return {out, last, news};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward_cuda(
    Tensor grad_out, Tensor grad_last, Tensor q, Tensor k, Tensor v, Tensor g, OptionalTensor beta, Tensor state,
    OptionalTensor documents, Tensor news) {
  const char* op = "_gated_delta_rule_backward";
  const DeltaRuleArgs args = {q, k, v, g, beta, state, documents};
  check_delta_rule_backward(op, args, grad_out, grad_last, news);
  const DeviceScope device(v);
  const Arguments given(args);
  const Tensor of_out = with_dense_rows(grad_out), first = as_contiguous(state), added = as_contiguous(news);
  const int64_t batch = v.size(0), groups = q.size(1), heads = v.size(1), length = v.size(2), dim = q.size(3);
  Tensor grad_v = new_empty(v, sizes_of(v)), grad_state = new_empty(v, sizes_of(state));
  torch::stable::copy_(grad_state, grad_last);
  const Tensor states = new_empty(v, {batch, heads, ceil_div(length, int64_t{kRuleChunk}), dim, v.size(3)});
  return dispatch_floating(v.scalar_type(), [&]<typename T>() {
    using Acc = acc_t<T>;
    const RuleInput<Acc> in = given.input<Acc>(op);
    const int64_t tiles = in.tiles(), shares = heads / std::max<int64_t>(1, groups) * tiles;
    // Partial sums by head that shares q and k, and by tile of columns. Zeros, because no kernel runs if V is 0.
    const std::vector<int64_t> of_rows = {batch, groups, shares, length, dim}, of_head = {batch, heads, tiles, length};
    const Tensor grad_q = torch::stable::new_zeros(v, of_rows), grad_k = torch::stable::new_zeros(v, of_rows);
    const Tensor grad_g = torch::stable::new_zeros(v, of_head);
    const Tensor grad_beta = torch::stable::new_zeros(v, beta ? of_head : std::vector<int64_t>{0});
    launch_delta_rule_backward<Acc>(
        in, data<const Acc>(first), data<Acc>(states),
        {rows_of<Acc>(of_out), beta ? data<const Acc>(added) : nullptr, data<const Acc>(states), data<Acc>(grad_q),
         data<Acc>(grad_k), data<Acc>(grad_v), data<Acc>(grad_g), beta ? data<Acc>(grad_beta) : nullptr,
         data<Acc>(grad_state)},
        device.stream());
    return std::tuple(
        sum_over(grad_q, 2), sum_over(grad_k, 2), grad_v, sum_over(grad_g, 2),
        beta ? sum_over(grad_beta, 2) : grad_beta, grad_state);
  });
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule_cuda));
  m.impl("_gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward_cuda));
}

} // namespace moe_ext::recurrence
