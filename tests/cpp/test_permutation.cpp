// The loops over rows against a scalar sum, for every instruction set, dtype and awkward width.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "common/stream.h"
#include "isa.h"
#include "permutation/permutation_tables.h"

namespace moe_ext::permutation {

MOE_EXT_TABLES(Kernels)

namespace {

template <typename T>
std::vector<T> random_row(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(n);
  for (T& value : values) {
    value = from_acc<T>(normal(generator));
  }
  return values;
}

// Half a unit in the last place of the output dtype, and of the sum's for each of its terms.
template <typename T>
double tolerance(double magnitude, int64_t terms) {
  const double out_eps = std::is_same_v<T, BFloat16> ? 0x1p-8 : std::is_same_v<T, Half> ? 0x1p-11 : 0;
  const double acc_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  return magnitude * (out_eps + 2 * terms * acc_eps) + (std::is_same_v<T, Half> ? 0x1p-25 : 0);
}

class RowLoops : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  const Kernels& kernels() const {
    return table(std::get<0>(GetParam()));
  }
  int64_t dim() const {
    return std::get<1>(GetParam());
  }

  template <typename T>
  void combine_matches() {
    constexpr int64_t kTopK = 3;
    const std::vector<T> rows = random_row<T>(4 * dim(), 1);
    const int64_t row_idx[kTopK] = {2, -1, 0};
    const acc_t<T> weights[kTopK] = {0.75, 1e30, -1.5};
    std::vector<T> out(dim() + 1, from_acc<T>(7));
    for (const acc_t<T>* w : {static_cast<const acc_t<T>*>(nullptr), weights}) {
      kernels().of<T>().combine(out.data(), rows.data(), row_idx, w ? row_idx : nullptr, w, kTopK, dim(), false);
      for (int64_t i = 0; i < dim(); ++i) {
        const double a = (w ? 0.75 : 1.0) * to_acc(rows[2 * dim() + i]);
        const double b = (w ? -1.5 : 1.0) * to_acc(rows[i]);
        ASSERT_NEAR(to_acc(out[i]), a + b, tolerance<T>(std::abs(a) + std::abs(b), 2)) << "column " << i;
      }
      ASSERT_EQ(to_acc(out[dim()]), 7) << "wrote past the row";
    }
  }

  template <typename T>
  void scale_dot_matches() {
    const std::vector<T> a = random_row<T>(dim(), 2);
    const std::vector<T> b = random_row<T>(dim(), 3);
    std::vector<T> out(dim() + 1, from_acc<T>(7));
    const double dot =
        kernels().of<T>().scale_dot(out.data(), a.data(), b.data(), nullptr, acc_t<T>(0.3), dim(), false);
    double sum = 0, magnitude = 0;
    for (int64_t i = 0; i < dim(); ++i) {
      const double expected = static_cast<double>(acc_t<T>(0.3)) * to_acc(a[i]);
      ASSERT_NEAR(to_acc(out[i]), expected, tolerance<T>(std::abs(expected), 1));
      sum += static_cast<double>(to_acc(a[i])) * to_acc(b[i]);
      magnitude += std::abs(static_cast<double>(to_acc(a[i])) * to_acc(b[i]));
    }
    ASSERT_EQ(to_acc(out[dim()]), 7) << "wrote past the row";
    const double acc_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
    ASSERT_NEAR(dot, sum, magnitude * acc_eps * (dim() / 16 + 20));
  }

  // Past the caches and through them: the same bits, and nothing beside the row.
  template <typename T>
  void stores_agree() {
    const int64_t line = 64 / sizeof(T), n = dim() / line * line;
    const std::vector<T> rows = random_row<T>(2 * n, 4);
    alignas(64) T out[2][1024 + 64 / sizeof(T)] = {};
    acc_t<T> dot[2];
    for (const bool past_caches : {false, true}) {
      dot[past_caches] = kernels().of<T>().scale_dot(
          out[past_caches], rows.data(), rows.data() + n, rows.data(), acc_t<T>(0.3), n, past_caches);
    }
    stream_end();
    ASSERT_EQ(std::memcmp(out[0], out[1], sizeof(out[0])), 0);
    ASSERT_EQ(dot[0], dot[1]);
    const int64_t row_idx[2] = {1, 0};
    const acc_t<T> weights[2] = {0.75, -1.5};
    for (const bool past_caches : {false, true}) {
      kernels().of<T>().combine(out[past_caches], rows.data(), row_idx, nullptr, weights, 2, n, past_caches);
    }
    stream_end();
    ASSERT_EQ(std::memcmp(out[0], out[1], sizeof(out[0])), 0);
  }
};

TEST_P(RowLoops, CombineMatchesScalarSum) {
  combine_matches<float>();
  combine_matches<double>();
  combine_matches<BFloat16>();
  combine_matches<Half>();
}

TEST_P(RowLoops, ScaleDotMatchesScalarLoop) {
  scale_dot_matches<float>();
  scale_dot_matches<double>();
  scale_dot_matches<BFloat16>();
  scale_dot_matches<Half>();
}

TEST_P(RowLoops, StoresPastTheCachesWriteTheSame) {
  stores_agree<float>();
  stores_agree<double>();
  stores_agree<BFloat16>();
  stores_agree<Half>();
}

INSTANTIATE_TEST_SUITE_P(
    Isa, RowLoops,
    ::testing::Combine(
        ::testing::ValuesIn(moe_ext::testing::supported_isas()),
        ::testing::Values(0, 1, 15, 16, 17, 255, 256, 257, 1024)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)); });

} // namespace
} // namespace moe_ext::permutation
