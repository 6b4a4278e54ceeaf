// The loops over rows of a permutation.
#include "count.h"
#include "permutation/permutation_tables.h"

namespace moe_ext::permutation::avx2 {
extern const Kernels kernel_table;
}

namespace moe_ext::count {
namespace {

constexpr int64_t kDim = 1024, kRows = 16, kTopK = 4;

template <typename T>
void add_cases(std::vector<Case>& cases) {
  const auto* kernels = &permutation::avx2::kernel_table.of<T>();
  const auto rows = random_values<T>(kRows * kDim, 1);
  const std::string dtype = dtype_name<T>();
  cases.emplace_back("permutation: combine " + dtype, [=, out = std::vector<T>(kDim)]() mutable {
    const float weights[kTopK] = {0.4f, 0.3f, 0.2f, 0.1f};
    for (int64_t first = 0; first < kRows; ++first) {
      const int64_t row_idx[kTopK] = {first, (first + 5) % kRows, -1, (first + 9) % kRows};
      kernels->combine(out.data(), rows.data(), row_idx, row_idx, weights, kTopK, kDim, false);
    }
  });
  cases.emplace_back("permutation: scale and dot " + dtype, [=, out = std::vector<T>(kDim), sum = 0.0f]() mutable {
    for (int64_t row = 1; row < kRows; ++row) {
      sum += kernels->scale_dot(out.data(), rows.data(), rows.data() + row * kDim, rows.data(), 0.7f, kDim, false);
    }
  });
}

} // namespace

std::vector<Case> permutation_cases() {
  std::vector<Case> cases;
  add_cases<float>(cases);
  add_cases<BFloat16>(cases);
  add_cases<Half>(cases);
  return cases;
}

} // namespace moe_ext::count
