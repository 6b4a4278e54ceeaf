// Gated experts over tokens: calls the operators between a gate and the tokens' sums, one after the other.
//
// This function is no operator of the stable ABI, which turns Python exceptions raised inside into errors without a
// message. torch ends a recomputation under activation checkpointing by such an exception.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "runtime/operators.h"
#include "runtime/runtime.h"

namespace moe_ext::runtime {
namespace {

using at::Tensor;
using c10::SymInt;
using Optional = const std::optional<Tensor>&;

// Return the tokens' sums and the number of dropped slots. With `ends`, products take int32 ends instead of offsets.
std::pair<Tensor, Tensor> routed_experts(
    const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights, const Tensor& gate_up, const Tensor& down,
    const std::string& kind, const std::string& layout, int64_t align, bool ends) {
  using Permuted = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto permute = find_operator<Permuted(
      const Tensor&, const Tensor&, SymInt, Optional, std::optional<SymInt>, std::string_view, SymInt)>(
      "moe_ext::permute_tokens");
  static const auto product =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, Optional)>("moe_ext::grouped_mm");
  static const auto activation =
      find_operator<Tensor(const Tensor&, std::string_view, std::string_view, Optional, Optional)>(
          "moe_ext::gated_activation");
  static const auto sum =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, SymInt, Optional)>("moe_ext::unpermute_tokens");

  auto [rows, slot_of_row, row_of_slot, offsets, counts, dropped] =
      permute.call(x, topk_idx, gate_up.size(0), std::nullopt, std::nullopt, "position", align);
  if (ends) {
    offsets = offsets.narrow(0, 1, gate_up.size(0)).to(at::kInt);
  }
  Tensor hidden = product.call(rows, gate_up, offsets, std::nullopt);
  rows.reset();
  hidden = activation.call(hidden, kind, layout, topk_weights, slot_of_row);
  hidden = product.call(hidden, down, offsets, std::nullopt);
  return {sum.call(hidden, slot_of_row, row_of_slot, topk_idx.size(1), std::nullopt), dropped};
}

} // namespace

void bind_routed_experts(pybind11::module_& module) {
  module.def("routed_experts", &routed_experts, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace moe_ext::runtime
