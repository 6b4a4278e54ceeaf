// The assignments' CUDA kernels, emulated, against serial loops in double, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "assignment/assignment_kernels.cuh"
#include "assignment/auction_kernels.cuh"
#include "schedules.h"

namespace moe_ext::assignment {
namespace {

struct Case {
  int num_tokens;
  int num_experts;
  int capacity = 0;
  bool masked = false;
  bool sigmoid = false;
  int num_sequences = 1;
  bool tied = false;
};

// Sums of T and E numbers in float.
constexpr double kTolerance = 2e-5;

template <typename T>
std::vector<T> random_logits(const Case& c, int seed = 0) {
  std::mt19937 generator(c.num_tokens * 31 + c.num_experts + seed);
  std::normal_distribution<float> normal(0, 1.5f);
  std::vector<T> logits(c.num_tokens * c.num_experts);
  std::generate(logits.begin(), logits.end(), [&] {
    const float x = normal(generator);
    return static_cast<T>(c.tied ? std::round(x) : x);
  });
  return logits;
}

std::unique_ptr<bool[]> random_mask(const Case& c) {
  if (!c.masked) {
    return nullptr;
  }
  std::mt19937 generator(c.num_tokens);
  auto mask = std::make_unique<bool[]>(c.num_tokens);
  std::generate_n(mask.get(), c.num_tokens, [&] { return generator() % 3 != 0; });
  return mask;
}

bool is_real(const std::unique_ptr<bool[]>& mask, int t) {
  return mask == nullptr || mask[t];
}

// Normalised scores of one token.
template <typename T>
std::vector<double> serial_scores(const Case& c, const T* row) {
  std::vector<double> s(row, row + c.num_experts);
  const double top = *std::max_element(s.begin(), s.end());
  for (double& x : s) {
    x = c.sigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - top);
  }
  const double sum = std::accumulate(s.begin(), s.end(), 0.0);
  for (double& x : s) {
    x /= sum;
  }
  return s;
}

class Assignment : public simt::ScheduleTest<Case> {};

template <typename T>
void check_expert_choice(const Case& c) {
  using Acc = acc_t<T>;
  const int num_tokens = c.num_tokens, n = c.num_experts;
  const auto logits = random_logits<T>(c);
  const auto mask = random_mask(c);
  const RowPlan plan = plan_rows<Acc>(num_tokens, n, 2, device_properties());
  std::vector<Acc> weights(num_tokens * n, -1), partials(plan.num_blocks * n), score_sum(n);
  std::vector<int64_t> idx(num_tokens * n, -7), counts(n);
  std::vector<Acc> memory(ChoiceScratch<Acc>::bytes(num_tokens, n) / sizeof(Acc), Acc(-1));
  launch_scores<true>(
      ScoreArgs<T>{logits.data(), mask.get(), n, gating::ScoreFn::kSoftmax}, 1, num_tokens, plan, weights.data(),
      partials.data(), score_sum.data(), nullptr);
  const std::vector<Acc> scores = weights;
  launch_expert_choice(
      mask.get(), num_tokens, n, c.capacity, {memory.data(), num_tokens, n}, weights.data(), idx.data(), counts.data(),
      nullptr);
  std::vector<int> real;
  for (int t = 0; t < num_tokens; ++t) {
    if (is_real(mask, t)) {
      real.push_back(t);
    }
  }
  for (int e = 0; e < n; ++e) {
    double sum = 0;
    for (int t : real) {
      const double expected = serial_scores(c, &logits[t * n])[e];
      EXPECT_NEAR(scores[t * n + e], expected, kTolerance);
      sum += expected;
    }
    EXPECT_NEAR(score_sum[e], sum, kTolerance * (1 + num_tokens));
    std::vector<int> order = real;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a * n + e] > scores[b * n + e]; });
    order.resize(std::min<size_t>(order.size(), c.capacity));
    EXPECT_EQ(counts[e], static_cast<int64_t>(order.size()));
    for (int t = 0; t < num_tokens; ++t) {
      const bool taken = std::find(order.begin(), order.end(), t) != order.end();
      EXPECT_EQ(idx[t * n + e], taken ? e : -1) << "token " << t << " expert " << e;
      EXPECT_EQ(weights[t * n + e], taken ? scores[t * n + e] : Acc(0));
    }
  }
}

TEST_P(Assignment, ExpertChoice) {
  Case c = param();
  c.sigmoid = false;
  // A block an expert: SequenceLoad has the cases of many.
  c.num_experts = std::min(c.num_experts, 3);
  for (const int capacity : {1, 5, c.num_tokens + 3}) {
    c.capacity = capacity;
    check_expert_choice<float>(c);
  }
  c.capacity = std::max(1, c.num_tokens / 2);
  check_expert_choice<double>(c);
  check_expert_choice<c10::BFloat16>(c);
}

template <typename T>
void check_sequence_load(const Case& c) {
  using Acc = acc_t<T>;
  const int n = c.num_experts, length = c.num_tokens / c.num_sequences, top_k = 2;
  const auto logits = random_logits<T>(c);
  const auto mask = random_mask(c);
  const RowPlan plan = plan_rows<Acc>(length, n, 2, device_properties());
  std::vector<Acc> partials(c.num_sequences * plan.num_blocks * n), score_sum(c.num_sequences * n);
  std::vector<int64_t> idx(c.num_tokens * top_k), counts(c.num_sequences * n, 0);
  for (size_t i = 0; i < idx.size(); ++i) {
    idx[i] = static_cast<int64_t>(i * 7 % (n + 1)) - 1;
  }
  const ScoreArgs<T> args{
      logits.data(), mask.get(), n, c.sigmoid ? gating::ScoreFn::kSigmoid : gating::ScoreFn::kSoftmax};
  launch_scores<true>(
      args, c.num_sequences, length, plan, static_cast<Acc*>(nullptr), partials.data(), score_sum.data(), nullptr);
  launch_count_choices<true>(idx.data(), mask.get(), c.num_sequences, length, top_k, n, counts.data(), nullptr);
  std::vector<Acc> grad_sum(c.num_sequences * n);
  for (size_t i = 0; i < grad_sum.size(); ++i) {
    grad_sum[i] = Acc(std::sin(double(i)));
  }
  std::vector<T> grad(c.num_tokens * n, T(9));
  launch_scores_backward<true>(
      ScoreGradArgs<T>{args, grad_sum.data(), nullptr, nullptr, grad.data()}, c.num_sequences, length, plan, nullptr);
  for (int b = 0; b < c.num_sequences; ++b) {
    std::vector<double> sums(n, 0);
    std::vector<int64_t> expected_counts(n, 0);
    for (int t = b * length; t < (b + 1) * length; ++t) {
      const std::vector<double> s = serial_scores(c, &logits[t * n]);
      double mean = 0;
      for (int e = 0; e < n; ++e) {
        sums[e] += is_real(mask, t) ? s[e] : 0;
        mean += s[e] * grad_sum[b * n + e];
      }
      for (int k = 0; k < top_k; ++k) {
        if (is_real(mask, t) && idx[t * top_k + k] >= 0) {
          ++expected_counts[idx[t * top_k + k]];
        }
      }
      for (int e = 0; e < n; ++e) {
        const double x = logits[t * n + e];
        const double slope = c.sigmoid ? 1 - 1 / (1 + std::exp(-x)) : 1;
        const double expected = is_real(mask, t) ? s[e] * slope * (grad_sum[b * n + e] - mean) : 0;
        EXPECT_NEAR(static_cast<double>(grad[t * n + e]), expected, sizeof(T) == 2 ? 4e-3 : kTolerance);
      }
    }
    for (int e = 0; e < n; ++e) {
      EXPECT_NEAR(score_sum[b * n + e], sums[e], kTolerance * (1 + length));
      EXPECT_EQ(counts[b * n + e], expected_counts[e]);
    }
  }
}

TEST_P(Assignment, SequenceLoad) {
  check_sequence_load<float>(param());
  check_sequence_load<double>(param());
  check_sequence_load<c10::Half>(param());
}

TEST_P(Assignment, SinkhornScale) {
  const Case c = param();
  const int n = c.num_experts;
  const auto logits = random_logits<double>(c);
  const auto mask = random_mask(c);
  std::vector<std::vector<double>> cost;
  for (int t = 0; t < c.num_tokens; ++t) {
    if (is_real(mask, t)) {
      const double* row = &logits[t * n];
      const double top = *std::max_element(row, row + n);
      cost.emplace_back(n);
      std::transform(row, row + n, cost.back().begin(), [&](double x) { return std::exp(x - top); });
    }
  }
  for (const double tolerance : {0.0, 1e-3}) {
    const int num_iters = 7;
    std::vector<double> expected(n, 1);
    for (int i = 0; i < num_iters && !cost.empty(); ++i) {
      std::vector<double> sums(n, 1e-8);
      for (const auto& row : cost) {
        const double dot = std::inner_product(row.begin(), row.end(), expected.begin(), 0.0);
        for (int e = 0; e < n; ++e) {
          sums[e] += row[e] / dot / cost.size();
        }
      }
      double change = 0;
      for (int e = 0; e < n; ++e) {
        change += std::abs(1 / (n * sums[e]) - expected[e]) / n;
        expected[e] = 1 / (n * sums[e]);
      }
      if (change <= tolerance) {
        break;
      }
    }
    const RowPlan plan = plan_rows<double>(c.num_tokens, n, 2, device_properties());
    std::vector<double> scale(n), partials(plan.num_blocks * n), out(n);
    int done = -1;
    launch_sinkhorn_scale<true>(
        ScoreArgs<double>{logits.data(), mask.get(), n, gating::ScoreFn::kSoftmax}, c.num_tokens, num_iters, tolerance,
        plan, SinkhornState<double>{scale.data(), partials.data(), &done}, out.data(), nullptr);
    for (int e = 0; e < n; ++e) {
      EXPECT_NEAR(out[e], std::log(expected[e]), 1e-9);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Assignment,
    simt::under_all_schedules<Case>(
        {{0, 5},
         {1, 1},
         {31, 3, 0, true},
         {48, 33, 0, false, true, 4},
         {129, 7, 0, true, true, 1},
         {270, 2, 0, true, false, 3, true}}));

// The largest sum by dynamic programming over how many tokens each expert has, and the assignment that has it.
struct Optimum {
  double sum;
  std::vector<int> expert_of;
};

Optimum best_assignment(const std::vector<float>& scores, const std::vector<int>& tokens, int n) {
  const int even = static_cast<int>(tokens.size()) / n, rest = static_cast<int>(tokens.size()) % n;
  std::map<std::vector<int>, Optimum> states{{std::vector<int>(n, 0), {0, {}}}};
  for (int t : tokens) {
    std::map<std::vector<int>, Optimum> next;
    for (const auto& [counts, optimum] : states) {
      for (int e = 0; e < n; ++e) {
        std::vector<int> more = counts;
        ++more[e];
        const auto dearer = std::count_if(more.begin(), more.end(), [&](int count) { return count > even; });
        if (more[e] > even + 1 || dearer > rest) {
          continue;
        }
        const double sum = optimum.sum + scores[t * n + e];
        auto [place, fresh] = next.try_emplace(more, Optimum{sum, {}});
        if (fresh || sum > place->second.sum) {
          place->second = {sum, optimum.expert_of};
          place->second.expert_of.push_back(e);
        }
      }
    }
    states = std::move(next);
  }
  return std::max_element(
             states.begin(), states.end(), [](const auto& a, const auto& b) { return a.second.sum < b.second.sum; })
      ->second;
}

class Auction : public simt::ScheduleTest<Case> {};

TEST_P(Auction, FindsTheBestAssignment) {
  const Case c = param();
  const int n = c.num_experts;
  const auto scores = random_logits<float>(c);
  const auto mask = random_mask(c);
  std::vector<int64_t> expert_of(c.num_tokens, -7);
  std::vector<double> memory(AuctionScratch::bytes(c.num_tokens, n) / 8 + 1);
  launch_auction<true>(scores.data(), mask.get(), c.num_tokens, n, memory.data(), expert_of.data(), nullptr);
  std::vector<int> tokens, counts(n, 0);
  double sum = 0;
  for (int t = 0; t < c.num_tokens; ++t) {
    if (!is_real(mask, t)) {
      EXPECT_EQ(expert_of[t], -1);
      continue;
    }
    ASSERT_TRUE(expert_of[t] >= 0 && expert_of[t] < n);
    tokens.push_back(t);
    ++counts[expert_of[t]];
    sum += scores[t * n + expert_of[t]];
  }
  for (const int count : counts) {
    EXPECT_GE(count, static_cast<int>(tokens.size()) / n);
    EXPECT_LE(count, (static_cast<int>(tokens.size()) + n - 1) / n);
  }
  const Optimum best = best_assignment(scores, tokens, n);
  EXPECT_NEAR(sum, best.sum, 1e-4);
  for (size_t i = 0; !c.tied && i < tokens.size(); ++i) {
    EXPECT_EQ(expert_of[tokens[i]], best.expert_of[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Auction,
    simt::under_all_schedules<Case>(
        {{0, 3},
         {1, 1},
         {7, 1},
         {2, 5},
         {12, 3},
         {40, 3, 0, true},
         {34, 2},
         {14, 4, 0, true},
         {36, 3, 0, false, false, 1, true},
         {35, 3, 0, false, false, 1, true}}));

// The launch is refused where the classes and what the kernel declares do not fit together.
TEST(Auction, RunsWithTheMostExperts) {
  const int n = static_cast<int>(ClassState::most_experts(device_properties()));
  std::vector<float> scores(n * n, 0.0f);
  for (int t = 0; t < n; ++t) {
    scores[t * n + t] = 1.0f;
  }
  std::vector<int64_t> expert_of(n, -1), expected(n);
  std::iota(expected.begin(), expected.end(), 0);
  std::vector<double> memory(AuctionScratch::bytes(n, n) / 8 + 1);
  launch_auction<true>(scores.data(), nullptr, n, n, memory.data(), expert_of.data(), nullptr);
  EXPECT_EQ(expert_of, expected);
}

TEST(Auction, NamesScoresThatAreNotFinite) {
  const std::vector<float> scores = {0, NAN};
  std::vector<int64_t> expert_of(1);
  std::vector<double> memory(AuctionScratch::bytes(1, 2) / 8 + 1);
  EXPECT_THROW(
      launch_auction<true>(scores.data(), nullptr, 1, 2, memory.data(), expert_of.data(), nullptr), simt::Error);
  launch_auction<false>(scores.data(), nullptr, 1, 2, memory.data(), expert_of.data(), nullptr);
  EXPECT_TRUE(expert_of[0] == 0 || expert_of[0] == 1);
}

} // namespace
} // namespace moe_ext::assignment
