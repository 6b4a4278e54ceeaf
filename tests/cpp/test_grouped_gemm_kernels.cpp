// The kernels around the grouped product, emulated, against serial loops, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>

#include <random>

#include "grouped_gemm/grouped_gemm_kernels.cuh"
#include "schedules.h"

namespace moe_ext::grouped_gemm {
namespace {

// Rows 0 and 1 and those from 90 on belong to nobody; experts 1, 2 and 5 have no rows.
const std::vector<int64_t> kOffsets = {2, 40, 40, 40, 41, 90, 90};
constexpr int64_t kNumExperts = 6;
constexpr int64_t kNumRows = 97;

class ExpertRows : public simt::ScheduleTest<int> {
 protected:
  template <typename T>
  std::vector<T> small_integers(int64_t n) const {
    std::mt19937 generator(n);
    std::vector<T> values(n);
    std::generate(values.begin(), values.end(), [&] { return T(static_cast<float>(generator() % 7) - 3); });
    return values;
  }

  // Sums of small integers are exact in every dtype.
  template <typename T>
  void bias_is_added(bool biased) {
    const int64_t dim = param();
    const auto bias = small_integers<T>(kNumExperts * dim);
    const auto before = small_integers<T>(kNumRows * dim);
    std::vector<T> out = before;
    launch_finish_rows(
        kOffsets.data(), biased ? bias.data() : nullptr, kNumExperts, kNumRows, dim, out.data(), nullptr);
    for (int64_t i = 0; i < kNumRows * dim; ++i) {
      const int64_t row = i / dim;
      const int expert = row < 40 ? 0 : row < 41 ? 3 : 4;
      const bool owned = row >= 2 && row < 90;
      const double added = biased ? double(acc_t<T>(bias[expert * dim + i % dim])) : 0;
      ASSERT_EQ(double(acc_t<T>(out[i])), owned ? double(acc_t<T>(before[i])) + added : 0) << "row " << row;
    }
  }

  template <typename T>
  void rows_are_summed() {
    const int64_t dim = param();
    const auto rows = small_integers<T>(kNumRows * dim);
    std::vector<T> out(kNumExperts * dim, T(99));
    launch_sum_rows(kOffsets.data(), rows.data(), kNumExperts, dim, out.data(), nullptr);
    for (int64_t i = 0; i < kNumExperts * dim; ++i) {
      double sum = 0;
      for (int64_t row = kOffsets[i / dim]; row < kOffsets[i / dim + 1]; ++row) {
        sum += double(acc_t<T>(rows[row * dim + i % dim]));
      }
      ASSERT_EQ(double(acc_t<T>(out[i])), sum) << "expert " << i / dim;
    }
  }
};

TEST_P(ExpertRows, GetTheirExpertsBias) {
  for (bool biased : {false, true}) {
    bias_is_added<float>(biased);
    bias_is_added<double>(biased);
    bias_is_added<c10::BFloat16>(biased);
  }
}

TEST_P(ExpertRows, AreSummed) {
  rows_are_summed<float>();
  rows_are_summed<double>();
  rows_are_summed<c10::BFloat16>();
}

TEST_P(ExpertRows, OfExpertsWithoutAnyLeaveZeros) {
  const int64_t size = 3 * param();
  std::vector<float> out(kNumExperts * size, 7);
  launch_zero_empty_experts(kOffsets.data(), kNumExperts, size, out.data(), nullptr);
  for (int64_t i = 0; i < kNumExperts * size; ++i) {
    const int64_t e = i / size;
    ASSERT_EQ(out[i], e == 1 || e == 2 || e == 5 ? 0 : 7) << "expert " << e;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, ExpertRows, simt::under_all_schedules(std::vector<int>{0, 1, 31, 32, 33, 255, 256, 257}),
    [](const auto& info) {
      return simt::to_string(std::get<0>(info.param)) + "_dim" + std::to_string(std::get<1>(info.param));
    });

} // namespace
} // namespace moe_ext::grouped_gemm
