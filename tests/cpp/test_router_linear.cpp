// The conversions of the router product, for every instruction set.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "isa.h"
#include "router_linear/router_linear_tables.h"

namespace moe_ext::router_linear {

MOE_EXT_TABLES(Kernels)

namespace {

class Conversions : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {};

// Every finite 16-bit pattern that fits, there and back, is itself; no element past the end is written.
template <typename T>
void round_trips(const Kernels& kernels, int64_t n) {
  std::vector<T> in(n), out(n + 1);
  for (int64_t i = 0; i < n; ++i) {
    in[i] = from_acc<T>(static_cast<acc_t<T>>((i % 2 == 0 ? 1 : -1) * 0.37f * static_cast<float>(i + 1)));
  }
  std::vector<acc_t<T>> wide(n + 1, 7);
  out[n] = from_acc<T>(7);
  kernels.of<T>().widen(wide.data(), in.data(), n);
  kernels.of<T>().narrow(out.data(), wide.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_EQ(wide[i], to_acc(in[i]));
    ASSERT_EQ(to_acc(out[i]), to_acc(in[i]));
  }
  EXPECT_EQ(wide[n], 7);
  EXPECT_EQ(to_acc(out[n]), 7);
}

TEST_P(Conversions, RoundTrip) {
  const Kernels& kernels = table(std::get<0>(GetParam()));
  const int64_t n = std::get<1>(GetParam());
  round_trips<float>(kernels, n);
  round_trips<double>(kernels, n);
  round_trips<BFloat16>(kernels, n);
  round_trips<Half>(kernels, n);
}

INSTANTIATE_TEST_SUITE_P(
    Isas, Conversions,
    ::testing::Combine(
        ::testing::ValuesIn(testing::supported_isas()), ::testing::Values(0, 1, 15, 16, 17, 255, 256, 257)),
    [](const auto& info) { return std::get<0>(info.param) + "_n" + std::to_string(std::get<1>(info.param)); });

} // namespace
} // namespace moe_ext::router_linear
