// The kernel of scaled copies, emulated, against a serial loop, under every schedule: the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "quantize/scale_into_kernels.cuh"
#include "schedules.h"

namespace moe_ext::scale_into {
namespace {

struct Case {
  int64_t numel;
  int64_t offset = 0; // elements, of both tensors
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.numel << " from " << c.offset;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename T>
std::vector<T> values(const Case& c) {
  std::vector<T> x;
  for (const float value : random_values<float>(c.numel + c.offset, 3)) {
    x.push_back(rounded<T>(static_cast<wide_t<T, T>>(value)));
  }
  return x;
}

template <typename T, typename U>
void expect_scaled(const Case& c, double special = 0.5) {
  std::vector<T> x = values<T>(c);
  if (c.numel > 0) {
    x[c.offset + c.numel * 2 / 3] = rounded<T>(static_cast<wide_t<T, T>>(special));
  }
  const acc_t<T> scale = static_cast<acc_t<T>>(1.0 / 3);
  const U before = rounded<U>(wide_t<U, U>(7));
  std::vector<U> out(x.size(), before), expected = out;
  bool nonfinite = false, any = false;
  for (size_t i = c.offset; i < x.size(); ++i) {
    expected[i] = rounded<U>(static_cast<wide_t<T, U>>(to_acc(x[i]) * scale));
    any |= !std::isfinite(to_acc(expected[i]));
  }
  launch_scale_into(x.data() + c.offset, scale, c.numel, out.data() + c.offset, &nonfinite, nullptr);
  EXPECT_TRUE(same_bits(out, expected));
  EXPECT_EQ(nonfinite, any);
  EXPECT_EQ(nonfinite, c.numel > 0 && special != 0.5);
  if constexpr (std::is_same_v<T, U>) {
    nonfinite = false;
    std::copy(out.begin(), out.begin() + c.offset, x.begin());
    launch_scale_into(x.data() + c.offset, scale, c.numel, x.data() + c.offset, &nonfinite, nullptr);
    EXPECT_TRUE(same_bits(x, expected));
    EXPECT_EQ(nonfinite, any);
  }
}

class ScaleInto : public simt::ScheduleTest<Case> {};

TEST_P(ScaleInto, EqualsASerialLoop) {
  expect_scaled<float, float>(param());
  expect_scaled<float, BFloat16>(param());
  expect_scaled<float, Half>(param());
  expect_scaled<float, double>(param());
  expect_scaled<BFloat16, BFloat16>(param());
  expect_scaled<Half, float>(param());
  expect_scaled<double, double>(param());
  expect_scaled<double, BFloat16>(param());
}

TEST_P(ScaleInto, FindsWhatIsNotFinite) {
  for (const double special : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::quiet_NaN()}) {
    expect_scaled<float, float>(param(), special);
    expect_scaled<float, BFloat16>(param(), special);
    expect_scaled<double, double>(param(), special);
    expect_scaled<double, float>(param(), special);
  }
  // Finite before it is rounded.
  expect_scaled<float, Half>(param(), 3e5);
  expect_scaled<double, BFloat16>(param(), 1.1e39);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, ScaleInto,
    simt::under_all_schedules<Case>({{0}, {1}, {3}, {4}, {7}, {257}, {2051}, {5, 1}, {1030, 3}, {64, 2}, {100003}}));

} // namespace
} // namespace moe_ext::scale_into
