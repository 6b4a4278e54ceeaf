// The gate over a block of tokens: few experts, many, and a list of the chosen that is kept in memory.
#include "count.h"
#include "gating/gating_tables.h"

namespace moe_ext::gating::avx2 {
extern const Kernels kernel_table;
}

namespace moe_ext::count {
namespace {

using gating::GateOptions;
using gating::ScoreFn;

constexpr int64_t kTokens = 512;

template <typename T>
void add_cases(std::vector<Case>& cases, const std::string& name, const GateOptions& options) {
  const auto* kernels = &gating::avx2::kernel_table.of<T>();
  const int64_t experts = options.num_experts, slots = kTokens * options.top_k;
  const auto logits = random_values<T>(kTokens * experts, 1);
  const std::vector<float> grad_weights = random_values<float>(slots, 2), grad_sum = random_values<float>(experts, 3);
  const std::string label = "gating: " + name + " " + dtype_name<T>();

  std::vector<float> weights(slots), score_sum(experts), scratch(gating::scratch_size(options));
  std::vector<int64_t> idx(slots), counts(experts);
  // The backward pass wants the experts that the forward pass chose.
  kernels->gate(
      {logits.data(), nullptr, nullptr, weights.data(), idx.data(), options}, 0, kTokens, score_sum.data(),
      counts.data(), scratch.data());
  cases.emplace_back(label, [=]() mutable {
    kernels->gate(
        {logits.data(), nullptr, nullptr, weights.data(), idx.data(), options}, 0, kTokens, score_sum.data(),
        counts.data(), scratch.data());
  });
  cases.emplace_back(label + " backward", [=, grad = std::vector<T>(kTokens * experts)]() mutable {
    kernels->gate_backward(
        {grad.data(), logits.data(), idx.data(), grad_weights.data(), grad_sum.data(), options}, 0, kTokens,
        scratch.data());
  });
}

} // namespace

std::vector<Case> gating_cases() {
  std::vector<Case> cases;
  const GateOptions few{8, 2, 1, 1, ScoreFn::kSoftmax, true, 1.0};
  const GateOptions many{64, 8, 1, 1, ScoreFn::kSoftmax, true, 1.0};
  const GateOptions grouped{256, 8, 8, 4, ScoreFn::kSigmoid, true, 2.5};
  const GateOptions long_list{64, 10, 1, 1, ScoreFn::kSoftmax, false, 1.0};
  add_cases<float>(cases, "E=8 K=2", few);
  add_cases<float>(cases, "E=64 K=8", many);
  add_cases<BFloat16>(cases, "E=64 K=8", many);
  add_cases<float>(cases, "E=256 K=8 grouped sigmoid", grouped);
  add_cases<float>(cases, "E=64 K=10", long_list);
  const auto logits = random_values<float>(kTokens * 64, 1);
  const int64_t size = gating::scratch_size(gating::z_loss_options(64));
  cases.emplace_back("gating: z loss E=64 float32", [=, scratch = std::vector<float>(size)]() mutable {
    gating::avx2::kernel_table.f32.z_loss({logits.data(), nullptr, 64}, 0, kTokens, scratch.data());
  });
  return cases;
}

} // namespace moe_ext::count
