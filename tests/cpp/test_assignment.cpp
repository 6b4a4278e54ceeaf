// The loops of the assignments against scalar formulas in double, for every instruction set, dtype and awkward size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "assignment/assignment_tables.h"
#include "assignment/auction.h"
#include "isa.h"

namespace moe_ext::assignment {

MOE_EXT_TABLES(Kernels)

namespace {

// Two roundings an operation, over a sum of n terms.
template <typename T>
double tolerance(int64_t n) {
  return (2 * n + 32) * (std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24);
}

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<T> values(n);
  for (T& value : values) {
    value = from_acc<T>(normal(generator));
  }
  return values;
}

template <typename T>
std::vector<double> serial_scores(const T* x, int64_t n, bool sigmoid) {
  std::vector<double> s(n);
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t e = 0; e < n; ++e) {
    top = std::max<double>(top, to_acc(x[e]));
  }
  for (int64_t e = 0; e < n; ++e) {
    s[e] = sigmoid ? 1 / (1 + std::exp(-double(to_acc(x[e])))) : std::exp(to_acc(x[e]) - top);
  }
  const double sum = std::accumulate(s.begin(), s.end(), 0.0);
  std::transform(s.begin(), s.end(), s.begin(), [sum](double v) { return v / sum; });
  return s;
}

class Loops : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  const Kernels& kernels() const {
    return table(std::get<0>(GetParam()));
  }
  int64_t num_experts() const {
    return std::get<1>(GetParam());
  }
};

template <typename T>
void check_scores(const ScoreKernels<T>& table, int64_t n) {
  using Acc = acc_t<T>;
  constexpr int64_t kTokens = 7;
  const auto logits = random_values<T>(kTokens * n, 3);
  const bool mask[kTokens] = {true, true, false, true, true, true, false};
  for (const bool sigmoid : {false, true}) {
    std::vector<Acc> rows(kTokens * n, Acc(9)), sums(n, Acc(0)), scratch(2 * n);
    const ScoreArgs<T> args{logits.data(), mask, n, sigmoid ? gating::ScoreFn::kSigmoid : gating::ScoreFn::kSoftmax};
    EXPECT_EQ(table.scores(args, 0, kTokens, rows.data(), sums.data(), scratch.data()), -1);
    std::vector<double> expected_sums(n, 0);
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto expected = serial_scores(&logits[t * n], n, sigmoid);
      for (int64_t e = 0; e < n; ++e) {
        EXPECT_NEAR(rows[t * n + e], mask[t] ? expected[e] : 0, tolerance<T>(n));
        expected_sums[e] += mask[t] ? expected[e] : 0;
      }
    }
    for (int64_t e = 0; e < n; ++e) {
      EXPECT_NEAR(sums[e], expected_sums[e], kTokens * tolerance<T>(n));
    }
    std::vector<Acc> without_rows(n, Acc(0));
    table.scores(args, 0, kTokens, nullptr, without_rows.data(), scratch.data());
    EXPECT_EQ(without_rows, sums);
  }
}

TEST_P(Loops, Scores) {
  check_scores(kernels().of<float>(), num_experts());
  check_scores(kernels().of<double>(), num_experts());
  check_scores(kernels().of<BFloat16>(), num_experts());
  check_scores(kernels().of<Half>(), num_experts());
}

TEST_P(Loops, ScoresNameTheFirstTokenThatIsRefused) {
  const int64_t n = num_experts();
  for (const float bad : {NAN, INFINITY}) {
    auto logits = random_values<float>(5 * n, 4);
    logits[3 * n + n - 1] = logits[4 * n] = bad;
    std::vector<float> sums(n), scratch(2 * n);
    const ScoreArgs<float> args{logits.data(), nullptr, n, gating::ScoreFn::kSoftmax};
    EXPECT_EQ(kernels().of<float>().scores(args, 0, 5, nullptr, sums.data(), scratch.data()), 3);
    EXPECT_EQ(kernels().of<float>().scores(args, 0, 3, nullptr, sums.data(), scratch.data()), -1);
  }
}

TEST_P(Loops, Sinkhorn) {
  constexpr int64_t kTokens = 5;
  const int64_t n = num_experts();
  const auto logits = random_values<float>(kTokens * n, 5);
  const bool mask[kTokens] = {true, false, true, true, true};
  const ScoreArgs<float> args{logits.data(), mask, n, gating::ScoreFn::kSoftmax};
  std::vector<float> cost(kTokens * n), scale(n), column(n, 1);
  EXPECT_EQ(kernels().of<float>().cost(args, 0, kTokens, cost.data()), -1);
  for (int64_t e = 0; e < n; ++e) {
    scale[e] = 0.5f + static_cast<float>(e % 3);
  }
  const SinkhornArgs<float> rounds{cost.data(), mask, scale.data(), n, 4};
  kernels().of<float>().sinkhorn(rounds, 0, kTokens, column.data());
  std::vector<double> expected(n, 1);
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto p = serial_scores(&logits[t * n], n, false);
    const double dot = std::inner_product(p.begin(), p.end(), scale.begin(), 0.0);
    for (int64_t e = 0; e < n; ++e) {
      expected[e] += mask[t] ? p[e] / (4 * dot) : 0;
    }
  }
  for (int64_t e = 0; e < n; ++e) {
    EXPECT_NEAR(column[e], expected[e], 4 * tolerance<float>(n));
  }
}

TEST_P(Loops, ChoosesTheFirstOfTheBest) {
  const int64_t n = num_experts();
  std::mt19937 generator(6);
  for (int trial = 0; trial < 50; ++trial) {
    // Few levels, so that best and second best are often tied.
    std::vector<float> value(n);
    std::vector<double> price(n);
    for (int64_t e = 0; e < n; ++e) {
      value[e] = static_cast<float>(generator() % 4) * 4194304.0f;
      price[e] = static_cast<double>(generator() % 3) * 4194304.0;
    }
    std::vector<double> worth(n);
    std::transform(value.begin(), value.end(), price.begin(), worth.begin(), std::minus<double>());
    const auto best = std::max_element(worth.begin(), worth.end());
    const int64_t place = best - worth.begin();
    double second = -std::numeric_limits<double>::infinity();
    for (int64_t e = 0; e < n; ++e) {
      second = e == place ? second : std::max(second, worth[e]);
    }
    const Choice choice = kernels().choose(value.data(), price.data(), n);
    EXPECT_EQ(choice.expert, place);
    EXPECT_EQ(choice.margin, n == 1 ? 0 : *best - second);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Loops,
    ::testing::Combine(
        ::testing::ValuesIn(moe_ext::testing::supported_isas()),
        ::testing::Values<int64_t>(1, 2, 7, 8, 15, 16, 17, 64, 70)));

TEST(AuctionShape, GivesEveryExpertItsShare) {
  for (int64_t num_real : {1, 5, 6, 7, 12, 13}) {
    for (int64_t n : {1, 2, 5, 6}) {
      const AuctionShape shape(num_real, n);
      int64_t places = 0;
      for (int64_t c = 0; c < shape.num_classes(); ++c) {
        places += shape.places(c);
        EXPECT_GE(shape.places(c), 1);
      }
      EXPECT_EQ(places, num_real + shape.num_dummies());
      EXPECT_LT(shape.num_dummies(), n);
    }
  }
}

TEST(Auction, QuantizesTheWholeRange) {
  const double big = std::numeric_limits<double>::max();
  EXPECT_EQ(quantized_score(-big, {-big, big}), 0);
  EXPECT_EQ(quantized_score(big, {-big, big}), 16777216.0f);
  EXPECT_EQ(quantized_score(3, {3, 3}), 0);
  EXPECT_EQ(quantized_score(0.25, {0, 1}), 4194304.0f);
  double eps = first_eps({0, 1});
  for (int phase = 1; phase < 10; ++phase) {
    EXPECT_GT(eps, 1);
    eps = next_eps(eps);
  }
  EXPECT_EQ(eps, 1);
}

} // namespace
} // namespace moe_ext::assignment
