// Activations over one row of a wide expert.
#include "activation/activation_tables.h"
#include "count.h"

namespace moe_ext::activation::avx2 {
extern const Kernels kernel_table;
}

namespace moe_ext::count {
namespace {

using activation::Kind;
using activation::Layout;

constexpr int64_t kDim = 16384;

template <typename T>
void add_cases(std::vector<Case>& cases) {
  const auto* loops = &activation::avx2::kernel_table.of<T>();
  const auto x = random_values<T>(2 * kDim, 1);
  const auto grad = random_values<T>(kDim, 2);
  const std::pair<const char*, Kind> kinds[] = {
      {"swiglu", Kind::kSilu}, {"geglu", Kind::kGelu}, {"reglu", Kind::kRelu}};
  for (const auto& [name, kind] : kinds) {
    const std::string label = std::string(name) + " " + dtype_name<T>();
    cases.emplace_back("activation: " + label, [=, kind = kind, out = std::vector<T>(kDim)]() mutable {
      loops->gated(kind, Layout::kConcatenated, out.data(), x.data(), 1, kDim, kDim);
    });
    cases.emplace_back(
        "activation: " + label + " backward", [=, kind = kind, out = std::vector<T>(2 * kDim)]() mutable {
          loops->gated_backward(kind, Layout::kConcatenated, out.data(), grad.data(), x.data(), kDim, kDim);
        });
  }
  cases.emplace_back(
      std::string("activation: swiglu weighted ") + dtype_name<T>() + " backward",
      [=, out = std::vector<T>(2 * kDim)]() mutable {
        loops->gated_backward_weighted(Kind::kSilu, Layout::kConcatenated, out.data(), grad.data(), x.data(), 1, kDim);
      });
  cases.emplace_back(
      std::string("activation: swiglu interleaved ") + dtype_name<T>(), [=, out = std::vector<T>(kDim)]() mutable {
        loops->gated(Kind::kSilu, Layout::kInterleaved, out.data(), x.data(), 1, kDim, kDim);
      });
}

} // namespace

std::vector<Case> activation_cases() {
  std::vector<Case> cases;
  add_cases<float>(cases);
  add_cases<BFloat16>(cases);
  return cases;
}

} // namespace moe_ext::count
