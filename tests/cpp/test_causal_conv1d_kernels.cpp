// The causal convolution's CUDA kernels, emulated, against serial loops, under every schedule.
#include <gtest/gtest.h>

#include <cmath>

#include "recurrence/causal_conv1d_kernels.cuh"
#include "schedules.h"

namespace moe_ext::recurrence {
namespace {

struct Case {
  int64_t batch, channels, length;
  int width;
  bool silu = false, packed = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << "x" << c.channels << "x" << c.length << " by " << c.width;
}

class CausalConv : public simt::ScheduleTest<Case> {};

TEST_P(CausalConv, EqualsASerialLoop) {
  const Case c = param();
  const int64_t rows = c.batch * c.channels, before = c.width - 1, whole = before + c.length;
  const std::vector<double> x = random_values<double>(rows * c.length, 1),
                            halo = random_values<double>(rows * before, 2);
  const std::vector<double> weight = random_values<double>(c.channels * c.width, 3);
  const std::vector<double> bias = random_values<double>(c.channels, 4);
  const std::vector<double> grad = random_values<double>(rows * c.length, 5);
  std::vector<int64_t> documents(whole);
  for (int64_t i = 0; i < whole; ++i) {
    documents[i] = i / 3 + (i > 40);
  }
  std::vector<double> out(x.size()), of_x(x.size()), of_halo(halo.size()), of_weight(weight.size()),
      of_bias(bias.size());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t d = row % c.channels;
    const auto at = [&](int64_t i) { return i < before ? halo[row * before + i] : x[row * c.length + i - before]; };
    for (int64_t t = 0; t < c.length; ++t) {
      double sum = bias[d];
      int64_t first = t;
      while (first < t + before) {
        bool same = true;
        for (int64_t i = first; c.packed && i < t + before; ++i) {
          same = same && documents[i] == documents[i + 1];
        }
        if (same) {
          break;
        }
        ++first;
      }
      for (int64_t i = first; i <= t + before; ++i) {
        sum += weight[d * c.width + i - t] * at(i);
      }
      const double gate = 1 / (1 + std::exp(-sum));
      out[row * c.length + t] = c.silu ? sum * gate : sum;
      const double of_sum = grad[row * c.length + t] * (c.silu ? gate * (1 + sum * (1 - gate)) : 1);
      of_bias[d] += of_sum;
      for (int64_t i = first; i <= t + before; ++i) {
        of_weight[d * c.width + i - t] += of_sum * at(i);
        (i < before ? of_halo[row * before + i] : of_x[row * c.length + i - before]) +=
            of_sum * weight[d * c.width + i - t];
      }
    }
  }
  const ConvStrides strides = {c.channels * c.length, c.length, 1}, of_halos = {c.channels * before, before, 1};
  const ConvInput<double> in = {
      x.data(), halo.data(), strides,    of_halos, weight.data(), bias.data(), c.packed ? documents.data() : nullptr,
      0,        c.batch,     c.channels, c.length, c.width,       c.silu};
  const auto expect_near = [](const std::vector<double>& actual, const std::vector<double>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], 1e-11 * (1 + std::abs(expected[i]))) << i;
    }
  };
  std::vector<double> found(x.size(), 7);
  launch_causal_conv(in, found.data(), strides, nullptr);
  expect_near(found, out);
  std::vector<double> sums(x.size()), gx(x.size(), 7), gh(halo.size(), 7), gw(weight.size(), 7), gb(bias.size(), 7);
  launch_causal_conv_backward(
      in, {grad.data(), strides, sums.data(), gx.data(), strides, gh.data(), gw.data(), gb.data()}, nullptr);
  expect_near(gx, of_x);
  expect_near(gh, of_halo);
  expect_near(gw, of_weight);
  expect_near(gb, of_bias);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, CausalConv,
    simt::under_all_schedules<Case>({
        {1, 1, 1, 1},
        {2, 3, 33, 4, true, true},
        {1, 2, 2, 4, true},
        {1, 5, 257, 3, false, true},
        {1, 1, 0, 3},
        {2, 0, 4, 2},
    }));

} // namespace
} // namespace moe_ext::recurrence
