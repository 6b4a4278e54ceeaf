// The operators through torch's dispatcher, with integers small enough that every product is exact, and the offsets'
// check.
#include <gtest/gtest.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/dispatch.h"
#include "grouped_gemm/grouped_gemm.h"

namespace moe_ext::grouped_gemm {
namespace {

using torch::stable::detail::from;

template <size_t kNumArgs>
Tensor call(const char* op, std::array<StableIValue, kNumArgs> stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

template <typename T>
Tensor tensor(std::initializer_list<int64_t> size, ScalarType dtype, const std::vector<T>& values) {
  const Tensor out = torch::stable::empty(size, dtype);
  std::copy(values.begin(), values.end(), data<T>(out));
  return out;
}

template <typename T>
std::vector<T> integers(int64_t n, int seed) {
  std::vector<T> values(n);
  for (int64_t i = 0; i < n; ++i) {
    values[i] = from_acc<T>(acc_t<T>((i * 7 + seed) % 9 - 4));
  }
  return values;
}

class GroupedMm : public ::testing::TestWithParam<ScalarType> {
 protected:
  // Rows 0 and 6 belong to nobody; the second expert has none.
  static constexpr int64_t kRows = 7, kExperts = 3, kIn = 5, kOut = 4;
  const std::vector<int64_t> offsets = {1, 3, 3, 6};

  static int64_t expert_of(int64_t row) {
    return row < 1 || row >= 6 ? -1 : row < 3 ? 0 : 2;
  }

  template <typename T>
  void matches() {
    const std::vector<T> x = integers<T>(kRows * kIn, 1);
    const std::vector<T> weight = integers<T>(kExperts * kOut * kIn, 2);
    const std::vector<T> bias = integers<T>(kExperts * kOut, 3);
    const Tensor y = call<4>(
        "moe_ext::grouped_mm",
        {from(tensor({kRows, kIn}, GetParam(), x)), from(tensor({kExperts, kOut, kIn}, GetParam(), weight)),
         from(tensor({kExperts + 1}, ScalarType::Long, offsets)),
         from(std::optional(tensor({kExperts, kOut}, GetParam(), bias)))});
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t e = expert_of(row);
      for (int64_t m = 0; m < kOut; ++m) {
        double sum = e < 0 ? 0 : to_acc(bias[e * kOut + m]);
        for (int64_t k = 0; e >= 0 && k < kIn; ++k) {
          sum += to_acc(x[row * kIn + k]) * to_acc(weight[(e * kOut + m) * kIn + k]);
        }
        EXPECT_EQ(to_acc(data<T>(y)[row * kOut + m]), sum) << "row " << row << ", column " << m;
      }
    }
  }

  template <typename T>
  void backward_matches() {
    const std::vector<T> x = integers<T>(kRows * kIn, 1);
    const std::vector<T> grad = integers<T>(kRows * kOut, 4);
    const Tensor grad_tensor = tensor({kRows, kOut}, GetParam(), grad);
    const Tensor offsets_tensor = tensor({kExperts + 1}, ScalarType::Long, offsets);
    const Tensor grad_weight = call<4>(
        "moe_ext::_grouped_mm_backward_weight",
        {from(grad_tensor), from(tensor({kRows, kIn}, GetParam(), x)), from(offsets_tensor), from(false)});
    const Tensor grad_bias = call<2>("moe_ext::_grouped_mm_backward_bias", {from(grad_tensor), from(offsets_tensor)});
    std::vector<double> expected_weight(kExperts * kOut * kIn), expected_bias(kExperts * kOut);
    for (int64_t row = 1; row < 6; ++row) {
      for (int64_t m = 0; m < kOut; ++m) {
        const int64_t at = expert_of(row) * kOut + m;
        const double g = to_acc(grad[row * kOut + m]);
        expected_bias[at] += g;
        for (int64_t k = 0; k < kIn; ++k) {
          expected_weight[at * kIn + k] += g * to_acc(x[row * kIn + k]);
        }
      }
    }
    for (size_t i = 0; i < expected_weight.size(); ++i) {
      EXPECT_EQ(to_acc(data<T>(grad_weight)[i]), expected_weight[i]) << i;
    }
    for (size_t i = 0; i < expected_bias.size(); ++i) {
      EXPECT_EQ(to_acc(data<T>(grad_bias)[i]), expected_bias[i]) << i;
    }
  }
};

TEST_P(GroupedMm, MatchesTheTripleLoop) {
  dispatch_floating(GetParam(), [&]<typename T>() { this->template matches<T>(); });
}

TEST_P(GroupedMm, BackwardMatchesTheTripleLoop) {
  dispatch_floating(GetParam(), [&]<typename T>() { this->template backward_matches<T>(); });
}

INSTANTIATE_TEST_SUITE_P(
    Dtype, GroupedMm, ::testing::Values(ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half),
    [](const auto& info) { return std::string(torch::headeronly::toString(info.param)); });

std::string offsets_error(const std::vector<int64_t>& offsets, int64_t num_rows) {
  try {
    check_offsets("op", offsets.data(), static_cast<int64_t>(offsets.size()) - 1, num_rows);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(Offsets, AreRefusedWhereTheyLeaveTheRowsOrDecrease) {
  EXPECT_EQ(offsets_error({0}, 0), "");
  EXPECT_EQ(offsets_error({2, 2, 5}, 5), "");
  EXPECT_EQ(offsets_error({-1, 2}, 5), "op: expected expert_offsets to start at 0 or later, got -1");
  EXPECT_EQ(offsets_error({0, 4, 3}, 5), "op: expected expert_offsets to be non-decreasing, got 4 then 3 at expert 1");
  EXPECT_EQ(offsets_error({0, 6}, 5), "op: expected expert_offsets to end within the 5 rows, got 6");
}

} // namespace
} // namespace moe_ext::grouped_gemm
