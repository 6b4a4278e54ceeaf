// The gate's CUDA kernels, emulated, against loops in double, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>

#include <numeric>
#include <random>

#include "gating/gating_kernels.cuh"
#include "gating/losses_kernels.cuh"
#include "gating/weights_kernels.cuh"
#include "schedules.h"

namespace moe_ext::gating {
namespace {

struct Case {
  int num_tokens;
  int num_experts;
  int top_k;
  ScoreFn fn = ScoreFn::kSoftmax;
  bool renormalize = true;
  bool biased = false;
  int num_groups = 1;
  int top_groups = 1;
  int group_terms = 1;

  GateOptions options() const {
    return {num_experts, top_k, num_groups, top_groups, fn, renormalize, 1.5, group_terms};
  }
};

// Sums of E and K numbers in float.
constexpr double kTolerance = 1e-5;

struct Token {
  std::vector<double> score; // normalised
  std::vector<int> idx;
  std::vector<double> weights;
};

std::vector<int> best(const std::vector<double>& keys, int count) {
  std::vector<int> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] > keys[b]; });
  order.resize(count);
  return order;
}

void limit_groups(std::vector<double>& keys, const Case& c) {
  const int size = c.num_experts / c.num_groups;
  std::vector<double> group;
  for (int g = 0; g < c.num_groups; ++g) {
    std::vector<double> of_group(keys.begin() + g * size, keys.begin() + (g + 1) * size);
    std::sort(of_group.rbegin(), of_group.rend());
    group.push_back(std::accumulate(of_group.begin(), of_group.begin() + c.group_terms, 0.0));
  }
  const std::vector<int> kept = best(group, c.top_groups);
  for (int e = 0; e < c.num_experts; ++e) {
    if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) {
      keys[e] = -INFINITY;
    }
  }
}

template <typename T>
Token serial_gate(const Case& c, const T* row, const std::vector<acc_t<T>>& bias) {
  Token out;
  std::vector<double> x(row, row + c.num_experts), raw(c.num_experts);
  const double top = *std::max_element(x.begin(), x.end());
  std::transform(x.begin(), x.end(), raw.begin(), [&](double v) {
    return c.fn == ScoreFn::kSigmoid        ? 1 / (1 + std::exp(-v))
           : c.fn == ScoreFn::kSqrtSoftplus ? std::sqrt(std::log1p(std::exp(v)))
                                            : std::exp(v - top);
  });
  const double sum = std::accumulate(raw.begin(), raw.end(), 0.0);
  for (double v : raw) {
    out.score.push_back(v / sum);
  }
  std::vector<double> keys = x;
  for (int e = 0; c.biased && e < c.num_experts; ++e) {
    keys[e] = (is_pointwise(c.fn) ? raw[e] : out.score[e]) + bias[e];
  }
  if (c.top_groups < c.num_groups) {
    limit_groups(keys, c);
  }
  out.idx = best(keys, c.top_k);
  double chosen_sum = 0;
  for (int e : out.idx) {
    out.weights.push_back(is_pointwise(c.fn) || c.options().softmax_of_chosen() ? raw[e] : out.score[e]);
    chosen_sum += out.weights.back();
  }
  for (double& w : out.weights) {
    w *= 1.5 / (c.renormalize || c.options().softmax_of_chosen() ? chosen_sum : 1.0);
  }
  return out;
}

class Gate : public simt::ScheduleTest<Case> {};

template <typename T>
void gate_matches(const Case& c) {
  using Acc = acc_t<T>;
  const auto logits = random_values<T>(int64_t{c.num_tokens} * c.num_experts, 1);
  const auto bias = random_values<Acc>(c.num_experts, 2);
  std::vector<char> mask(c.num_tokens);
  for (int t = 0; t < c.num_tokens; ++t) {
    mask[t] = t % 3 != 1;
  }
  std::vector<Acc> weights(c.num_tokens * c.top_k, 7), score_sum(c.num_experts, 7);
  std::vector<int64_t> idx(c.num_tokens * c.top_k, 7), counts(c.num_experts, 7);
  const GatePlan plan = plan_gate<Acc>(c.num_tokens, c.options(), device_properties());
  std::vector<double> workspace(ceil_div(gate_workspace_bytes<Acc>(plan, c.num_experts), 8), NAN);
  const GateArgs<T> args{logits.data(),
                         c.biased ? bias.data() : nullptr,
                         reinterpret_cast<const bool*>(mask.data()),
                         weights.data(),
                         idx.data(),
                         c.options()};
  launch_topk_gate<true>(args, c.num_tokens, plan, workspace.data(), score_sum.data(), counts.data(), nullptr);
  std::vector<double> expected_sum(c.num_experts);
  std::vector<int64_t> expected_counts(c.num_experts);
  for (int t = 0; t < c.num_tokens; ++t) {
    const Token expected = serial_gate(c, logits.data() + int64_t{t} * c.num_experts, bias);
    for (int k = 0; k < c.top_k; ++k) {
      ASSERT_EQ(idx[t * c.top_k + k], mask[t] ? expected.idx[k] : -1) << "token " << t << ", choice " << k;
      ASSERT_NEAR(weights[t * c.top_k + k], mask[t] ? expected.weights[k] : 0, kTolerance) << "token " << t;
      expected_counts[expected.idx[k]] += mask[t];
    }
    for (int e = 0; e < c.num_experts; ++e) {
      expected_sum[e] += mask[t] ? expected.score[e] : 0;
    }
  }
  EXPECT_EQ(counts, expected_counts);
  for (int e = 0; e < c.num_experts; ++e) {
    ASSERT_NEAR(score_sum[e], expected_sum[e], kTolerance * (1 + expected_sum[e]));
  }
}

TEST_P(Gate, MatchesSerialLoops) {
  gate_matches<float>(param());
  gate_matches<double>(param());
  gate_matches<c10::BFloat16>(param());
}

// The gradient of sum(dw weights) + sum(ds score_sum) by central differences of the serial loops.
TEST_P(Gate, BackwardMatchesDifferences) {
  const Case c = param();
  auto logits = random_values<double>(int64_t{c.num_tokens} * c.num_experts, 3);
  const auto bias = random_values<double>(c.num_experts, 2), ds = random_values<double>(c.num_experts, 4);
  const auto dw = random_values<double>(c.num_tokens * c.top_k, 5);
  std::vector<int64_t> idx;
  for (int t = 0; t < c.num_tokens; ++t) {
    const Token token = serial_gate(c, logits.data() + t * c.num_experts, bias);
    idx.insert(idx.end(), token.idx.begin(), token.idx.end());
  }
  std::vector<double> grad(logits.size(), 7);
  const GateGradArgs<double> args{grad.data(), logits.data(), idx.data(), dw.data(), ds.data(), c.options()};
  const GatePlan plan = plan_gate<double>(c.num_tokens, c.options(), device_properties());
  launch_topk_gate_backward<true>(args, c.num_tokens, plan, nullptr);
  // Some 500 to 1000 of them at most, an odd number apart: those of every lane.
  const int64_t size = static_cast<int64_t>(logits.size());
  for (int64_t i = 0; i < size; i += (size / 500) | 1) {
    const int64_t t = i / c.num_experts;
    const double* row = logits.data() + t * c.num_experts;
    const auto loss = [&] {
      const Token token = serial_gate(c, row, bias);
      double sum = std::inner_product(ds.begin(), ds.end(), token.score.begin(), 0.0);
      return std::inner_product(token.weights.begin(), token.weights.end(), dw.begin() + t * c.top_k, sum);
    };
    const double before = logits[i], step = 1e-6;
    logits[i] = before + step;
    const double above = loss();
    logits[i] = before - step;
    const double slope = (above - loss()) / (2 * step);
    logits[i] = before;
    ASSERT_NEAR(grad[i], slope, 1e-6) << "token " << t << ", expert " << i % c.num_experts;
  }
}

// The choice of the gate with every fifth one taken away: what is left has the scores and sums of the serial loops.
template <typename T>
void weights_match(const Case& c) {
  using Acc = acc_t<T>;
  const auto logits = random_values<T>(int64_t{c.num_tokens} * c.num_experts, 1);
  const auto bias = random_values<Acc>(c.num_experts, 2);
  std::vector<int64_t> idx, counts(c.num_experts, 7), expected_counts(c.num_experts);
  std::vector<double> expected_weights, expected_sum(c.num_experts);
  for (int t = 0; t < c.num_tokens; ++t) {
    const Token token = serial_gate(c, logits.data() + int64_t{t} * c.num_experts, bias);
    double left = 0, all = 0;
    bool active = false;
    for (int k = 0; k < c.top_k; ++k) {
      const bool hole = (t * 3 + k) % 5 == 0;
      idx.push_back(hole ? -1 : token.idx[k]);
      expected_weights.push_back(hole ? 0 : token.weights[k]);
      expected_counts[token.idx[k]] += !hole;
      active = active || !hole;
      left += expected_weights.back();
      all += token.weights[k];
    }
    for (int k = 0; k < c.top_k && left > 0; ++k) {
      expected_weights[t * c.top_k + k] *= c.renormalize || c.options().softmax_of_chosen() ? all / left : 1;
    }
    for (int e = 0; e < c.num_experts; ++e) {
      expected_sum[e] += active ? token.score[e] : 0;
    }
  }
  std::vector<Acc> weights(idx.size(), 7), score_sum(c.num_experts, 7);
  const GatePlan plan = plan_gate<Acc>(c.num_tokens, c.options(), device_properties());
  std::vector<double> workspace(ceil_div(gate_workspace_bytes<Acc>(plan, c.num_experts), 8), NAN);
  const GateWeightsArgs<T> args{logits.data(), idx.data(), weights.data(), c.options()};
  launch_gate_weights<true>(args, c.num_tokens, plan, workspace.data(), score_sum.data(), counts.data(), nullptr);
  EXPECT_EQ(counts, expected_counts);
  for (size_t i = 0; i < idx.size(); ++i) {
    ASSERT_NEAR(weights[i], expected_weights[i], kTolerance) << "choice " << i;
  }
  for (int e = 0; e < c.num_experts; ++e) {
    ASSERT_NEAR(score_sum[e], expected_sum[e], kTolerance * (1 + expected_sum[e]));
  }
}

TEST_P(Gate, WeightsOfAGivenChoiceMatchSerialLoops) {
  weights_match<float>(param());
  weights_match<double>(param());
  weights_match<c10::BFloat16>(param());
}

std::vector<Case> gate_cases() {
  std::vector<Case> cases;
  for (int num_tokens : {0, 1, 31, 33, 257}) {
    cases.push_back({num_tokens, 8, 2});
  }
  for (int num_experts : {1, 31, 32, 33, 255, 256, 257}) {
    cases.push_back({5, num_experts, std::min(num_experts, 6), ScoreFn::kSoftmax, false});
  }
  cases.push_back({9, 70, 40, ScoreFn::kSigmoid, true, true});
  cases.push_back({9, 24, 4, ScoreFn::kSigmoid, false});
  cases.push_back({9, 24, 4, ScoreFn::kTopkSoftmax, false, true});
  cases.push_back({9, 24, 4, ScoreFn::kSoftmax, true, true, 6, 2, 2});
  cases.push_back({9, 24, 4, ScoreFn::kSqrtSoftplus, true, true, 3, 1, 4});
  cases.push_back({9, 72, 4, ScoreFn::kSigmoid, true, false, 36, 5});
  // Fewer warps to a block, and then more shared memory than a launch has without asking.
  cases.push_back({3, 2000, 3});
  cases.push_back({3, 3000, 3});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, Gate, simt::under_all_schedules(gate_cases()), [](const auto& info) {
  const Case& c = std::get<1>(info.param);
  return simt::to_string(std::get<0>(info.param)) + "_tokens" + std::to_string(c.num_tokens) + "_experts" +
         std::to_string(c.num_experts) + "_fn" + std::to_string(static_cast<int>(c.fn)) + (c.biased ? "_biased" : "") +
         (c.renormalize ? "" : "_plain") + "_groups" + std::to_string(c.num_groups);
});

TEST(GateValues, AreTrapped) {
  const Case c = {1, 4, 2};
  std::vector<float> weights(2), score_sum(4);
  std::vector<int64_t> idx(2), counts(4);
  const GatePlan plan = plan_gate<float>(1, c.options(), device_properties());
  std::vector<double> workspace(100);
  const std::vector<float> rows[] = {{0, NAN, 0, 0}, {0, INFINITY, 0, 0}, {0, -INFINITY, -INFINITY, -INFINITY}};
  for (const std::vector<float>& row : rows) {
    const GateArgs<float> args{row.data(), nullptr, nullptr, weights.data(), idx.data(), c.options()};
    EXPECT_THROW(
        launch_topk_gate<true>(args, 1, plan, workspace.data(), score_sum.data(), counts.data(), nullptr), simt::Error);
  }
  // Without checks, choices that do not exist are not routed.
  const GateArgs<float> args{rows[2].data(), nullptr, nullptr, weights.data(), idx.data(), c.options()};
  launch_topk_gate<false>(args, 1, plan, workspace.data(), score_sum.data(), counts.data(), nullptr);
  EXPECT_EQ(idx, (std::vector<int64_t>{0, -1}));
  EXPECT_EQ(weights, (std::vector<float>{1.5f, 0}));
}

class GateTies : public simt::ScheduleTest<int> {};

// Signed zeros are equal, signs and -inf are ordered, and the lower index comes first in a tie.
template <typename T>
void ties_are_broken_by_index() {
  const Case c = {1, 70, 8};
  std::vector<T> row(70, -2);
  for (int e : {3, 66}) {
    row[e] = T(-0.0);
    row[e + 1] = T(0.0);
  }
  row[34] = 1;
  row[68] = 1;
  row[1] = -1;
  row[0] = -INFINITY;
  std::vector<acc_t<T>> weights(8), score_sum(70);
  std::vector<int64_t> idx(8), counts(70);
  const GatePlan plan = plan_gate<acc_t<T>>(1, c.options(), device_properties());
  std::vector<double> workspace(200);
  const GateArgs<T> args{row.data(), nullptr, nullptr, weights.data(), idx.data(), c.options()};
  launch_topk_gate<true>(args, 1, plan, workspace.data(), score_sum.data(), counts.data(), nullptr);
  EXPECT_EQ(idx, (std::vector<int64_t>{34, 68, 3, 4, 66, 67, 1, 2}));
}

TEST_P(GateTies, AreBrokenByIndex) {
  ties_are_broken_by_index<float>();
  ties_are_broken_by_index<double>();
  ties_are_broken_by_index<c10::BFloat16>();
}

// One warp for both tokens: what the first left in shared memory must not reach the second.
TEST_P(GateTies, ChosenLogitsAreThoseOfTheToken) {
  const Case c = {2, 40, 2, ScoreFn::kTopkSoftmax};
  std::vector<float> rows(80, 0), weights(4), score_sum(40);
  rows[0] = rows[1] = 1;
  std::fill(rows.begin() + 40, rows.end(), -400.0f);
  rows[40 + 38] = -300;
  rows[40 + 39] = -301;
  std::vector<int64_t> idx(4), counts(40);
  GatePlan plan = plan_gate<float>(1, c.options(), device_properties());
  plan.num_warps = plan.num_blocks = 1;
  std::vector<double> workspace(100);
  const GateArgs<float> args{rows.data(), nullptr, nullptr, weights.data(), idx.data(), c.options()};
  launch_topk_gate<true>(args, 2, plan, workspace.data(), score_sum.data(), counts.data(), nullptr);
  EXPECT_EQ(idx, (std::vector<int64_t>{0, 1, 38, 39}));
  EXPECT_NEAR(weights[2] / weights[3], std::exp(1), kTolerance * 10);
}

INSTANTIATE_TEST_SUITE_P(Schedules, GateTies, simt::under_all_schedules(std::vector<int>{0}), [](const auto& info) {
  return simt::to_string(std::get<0>(info.param));
});

TEST(GateWeightsValues, AreTrapped) {
  const Case c = {1, 4, 2};
  std::vector<float> weights(2), score_sum(4);
  std::vector<int64_t> counts(4);
  const GatePlan plan = plan_gate<float>(1, c.options(), device_properties());
  std::vector<double> workspace(100);
  const std::vector<float> row = {0, 1, 2, 3}, with_nan = {0, NAN, 0, 0};
  const std::vector<int64_t> good = {0, 1}, beyond = {0, 4}, below = {-2, 1};
  const auto weigh = [&](const std::vector<float>& logits, const std::vector<int64_t>& idx) {
    const GateWeightsArgs<float> args{logits.data(), idx.data(), weights.data(), c.options()};
    launch_gate_weights<true>(args, 1, plan, workspace.data(), score_sum.data(), counts.data(), nullptr);
  };
  weigh(row, good);
  EXPECT_THROW(weigh(with_nan, good), simt::Error);
  EXPECT_THROW(weigh(row, beyond), simt::Error);
  EXPECT_THROW(weigh(row, below), simt::Error);
}

class Losses : public simt::ScheduleTest<int> {};

TEST_P(Losses, ZLossMatchesSerialLoops) {
  const int num_tokens = param(), num_experts = 37;
  const auto logits = random_values<float>(num_tokens * num_experts, 1);
  const ZLossArgs<float> args{logits.data(), nullptr, num_experts};
  std::vector<double> partials(2 * z_loss_blocks(num_tokens), NAN);
  float loss = 7;
  const float grad_loss = 0.5f;
  double factor = 7, sum = 0;
  std::vector<float> grad(logits.size(), 7);
  launch_router_z_loss(args, num_tokens, partials.data(), &loss, nullptr);
  launch_router_z_loss_backward(&grad_loss, args, num_tokens, &factor, grad.data(), nullptr);
  for (int t = 0; t < num_tokens; ++t) {
    double exps = 0;
    for (int e = 0; e < num_experts; ++e) {
      exps += std::exp(static_cast<double>(logits[t * num_experts + e]));
    }
    const double lse = std::log(exps);
    sum += lse * lse;
    for (int e = 0; e < num_experts; ++e) {
      const double p = std::exp(static_cast<double>(logits[t * num_experts + e])) / exps;
      ASSERT_NEAR(grad[t * num_experts + e], lse * p / num_tokens, kTolerance);
    }
  }
  EXPECT_NEAR(loss, num_tokens == 0 ? 0 : sum / num_tokens, kTolerance * (1 + sum));
}

TEST_P(Losses, BalanceLossMatchesTheFormula) {
  const int num_experts = param();
  const auto score_sum = random_values<double>(num_experts, 1);
  std::vector<int32_t> counts(num_experts);
  std::iota(counts.begin(), counts.end(), 1);
  double loss = 7, total = 0, sum = 0;
  const double grad_loss = 2;
  std::vector<double> grad(num_experts, 7);
  launch_load_balance_loss(score_sum.data(), counts.data(), num_experts, 2, &loss, nullptr);
  launch_load_balance_loss_backward(&grad_loss, counts.data(), num_experts, 2, grad.data(), nullptr);
  for (int e = 0; e < num_experts; ++e) {
    total += counts[e];
    sum += counts[e] * score_sum[e];
  }
  const double slope = total == 0 ? 0 : num_experts * 2 / (total * total);
  EXPECT_NEAR(loss, slope * sum, 1e-12);
  for (int e = 0; e < num_experts; ++e) {
    ASSERT_NEAR(grad[e], 2 * slope * counts[e], 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, Losses, simt::under_all_schedules(std::vector<int>{0, 1, 31, 32, 33, 255, 256, 257}),
    [](const auto& info) {
      return simt::to_string(std::get<0>(info.param)) + "_size" + std::to_string(std::get<1>(info.param));
    });

} // namespace
} // namespace moe_ext::gating
