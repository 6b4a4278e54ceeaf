// The noisy gates' CUDA kernels, emulated, against loops in double, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>

#include <functional>

#include "noisy_gating/noisy_gating_kernels.cuh"
#include "noisy_gating/random_kernels.cuh"
#include "noisy_serial.h"
#include "schedules.h"

namespace moe_ext::noisy_gating {
namespace {

struct Case {
  int num_tokens;
  int num_experts;
  int top_k;
  bool random = true;
};

const int64_t kState[4] = {0x0123456789ABCDEF, 5, 77, 1000};
// Sums of T and E numbers of order one, in float.
constexpr double kTolerance = 2e-5;
constexpr double kScale = 1.5, kEpsilon = 0.01;

template <typename T>
std::vector<double> row(const std::vector<T>& values, int64_t t, int n) {
  return values.empty() ? std::vector<double>()
                        : std::vector<double>(values.begin() + t * n, values.begin() + (t + 1) * n);
}

std::vector<char> every_third_masked(int num_tokens) {
  std::vector<char> mask(num_tokens);
  for (int t = 0; t < num_tokens; ++t) {
    mask[t] = t % 3 != 1;
  }
  return mask;
}

const bool* as_bools(const std::vector<char>& mask) {
  return reinterpret_cast<const bool*>(mask.data());
}

class NoisyKernels : public simt::ScheduleTest<Case> {
 protected:
  RngSource rng() const {
    return {param().random ? kState : nullptr, nullptr};
  }
};

TEST_P(NoisyKernels, UniformsAndJitter) {
  const int num_tokens = param().num_tokens, n = param().num_experts;
  const RngSource rng{kState, nullptr};
  std::vector<float> uniforms(num_tokens * n, 7);
  const auto x = random_values<float>(num_tokens * n, 1);
  std::vector<float> out(x.size(), 7);
  launch_routing_uniform(uniforms.data(), num_tokens, n, Stream::kDropPriority, rng, nullptr);
  launch_routing_jitter(JitterArgs<float>{out.data(), x.data(), n, 0.25, rng}, num_tokens, nullptr);
  for (int t = 0; t < num_tokens; ++t) {
    for (int c = 0; c < n; ++c) {
      ASSERT_EQ(uniforms[t * n + c], serial::uniform(rng, Stream::kDropPriority, t, c));
      const double factor = 0.75 + 0.5 * serial::uniform(rng, Stream::kJitter, t, c);
      ASSERT_NEAR(out[t * n + c], x[t * n + c] * factor, 1e-6);
    }
  }
}

template <typename T>
void gshard_matches(const Case& c, const RngSource& rng) {
  using Acc = acc_t<T>;
  const int n = c.num_experts;
  const auto x = random_values<T>(c.num_tokens * n, 2);
  const std::vector<char> mask = every_third_masked(c.num_tokens);
  std::vector<Acc> weights(2 * c.num_tokens, 7), score_sum(n, 7);
  std::vector<int64_t> idx(2 * c.num_tokens, 7), counts(n, 7), firsts(n, 7);
  const GatePlan plan = plan_noisy<Acc>(c.num_tokens, n, 2, device_properties());
  std::vector<double> workspace(ceil_div(noisy_workspace_bytes<Acc>(plan, n), 8), NAN);
  const GShardArgs<T> args{x.data(), as_bools(mask), weights.data(), idx.data(), n, kScale, rng};
  const Totals<Acc> totals{{score_sum.data(), nullptr}, {counts.data(), firsts.data()}, false};
  launch_gshard_gate<true>(args, c.num_tokens, plan, workspace.data(), totals, nullptr);
  std::vector<double> expected_sum(n);
  std::vector<int64_t> expected_counts(n), expected_firsts(n);
  for (int t = 0; t < c.num_tokens; ++t) {
    const serial::Token token = serial::gshard(row(x, t, n), rng, t);
    for (int k = 0; k < 2; ++k) {
      ASSERT_EQ(idx[2 * t + k], mask[t] ? token.idx[k] : -1) << "token " << t;
      ASSERT_NEAR(weights[2 * t + k], mask[t] ? kScale * token.weights[k] : 0, kTolerance) << "token " << t;
      if (mask[t] && token.idx[k] >= 0) {
        ++expected_counts[token.idx[k]];
      }
    }
    expected_firsts[token.idx[0]] += mask[t];
    for (int e = 0; e < n; ++e) {
      expected_sum[e] += mask[t] ? token.sums[e] : 0;
    }
  }
  EXPECT_EQ(counts, expected_counts);
  EXPECT_EQ(firsts, expected_firsts);
  for (int e = 0; e < n; ++e) {
    ASSERT_NEAR(score_sum[e], expected_sum[e], kTolerance * (1 + expected_sum[e]));
  }
}

TEST_P(NoisyKernels, GShardMatchesSerialLoops) {
  if (param().num_experts > 1) {
    gshard_matches<float>(param(), rng());
    gshard_matches<double>(param(), rng());
    gshard_matches<c10::BFloat16>(param(), rng());
  }
}

template <typename T>
void noisy_matches(const Case& c, const RngSource& rng) {
  using Acc = acc_t<T>;
  const int n = c.num_experts;
  const NoisyOptions options{n, c.top_k, kEpsilon, kScale};
  const auto clean = random_values<T>(c.num_tokens * n, 2),
             noise = random_values<T>(c.random ? c.num_tokens * n : 0, 3);
  const std::vector<char> mask = every_third_masked(c.num_tokens);
  std::vector<Acc> weights(c.top_k * c.num_tokens, 7), importance(n, 7), load(n, 7);
  std::vector<int64_t> idx(c.top_k * c.num_tokens, 7), counts(n, 7);
  const GatePlan plan = plan_noisy<Acc>(c.num_tokens, n, options.num_ranked(), device_properties());
  std::vector<double> workspace(ceil_div(noisy_workspace_bytes<Acc>(plan, n), 8), NAN);
  const NoisyArgs<T> args{
      clean.data(), c.random ? noise.data() : nullptr, as_bools(mask), weights.data(), idx.data(), options, rng};
  const Totals<Acc> totals{{importance.data(), load.data()}, {counts.data(), nullptr}, !c.random};
  launch_noisy_topk_gate<true>(args, c.num_tokens, plan, workspace.data(), totals, nullptr);
  std::vector<double> expected_importance(n), expected_load(n);
  std::vector<int64_t> expected_counts(n);
  for (int t = 0; t < c.num_tokens; ++t) {
    const serial::Token token = serial::noisy(row(clean, t, n), row(noise, t, n), rng, t, c.top_k, kEpsilon);
    for (int k = 0; k < c.top_k; ++k) {
      ASSERT_EQ(idx[c.top_k * t + k], mask[t] ? token.idx[k] : -1) << "token " << t;
      ASSERT_NEAR(weights[c.top_k * t + k], mask[t] ? kScale * token.weights[k] : 0, kTolerance) << "token " << t;
      expected_counts[token.idx[k]] += mask[t];
    }
    for (int e = 0; e < n; ++e) {
      expected_importance[e] += mask[t] ? token.sums[e] : 0;
      expected_load[e] += mask[t] ? token.loads[e] : 0;
    }
  }
  EXPECT_EQ(counts, expected_counts);
  for (int e = 0; e < n; ++e) {
    ASSERT_NEAR(importance[e], expected_importance[e], kTolerance * (1 + expected_importance[e]));
    ASSERT_NEAR(load[e], expected_load[e], kTolerance * (1 + expected_load[e]));
  }
}

TEST_P(NoisyKernels, NoisyMatchesSerialLoops) {
  noisy_matches<float>(param(), rng());
  noisy_matches<double>(param(), rng());
  noisy_matches<c10::BFloat16>(param(), rng());
}

// Compares a gradient with central differences of loss(token), at most some 200 of them.
void matches_differences(
    std::vector<double>& x, const std::vector<double>& grad, int num_experts,
    const std::function<double(int64_t)>& loss) {
  const int64_t size = static_cast<int64_t>(x.size());
  for (int64_t i = 0; i < size; i += 1 + size / 200) {
    const double before = x[i], step = 1e-6;
    x[i] = before + step;
    const double above = loss(i / num_experts);
    x[i] = before - step;
    const double slope = (above - loss(i / num_experts)) / (2 * step);
    x[i] = before;
    ASSERT_NEAR(grad[i], slope, 1e-6 * (1 + std::abs(slope)))
        << "token " << i / num_experts << ", expert " << i % num_experts;
  }
}

TEST_P(NoisyKernels, GShardBackwardMatchesDifferences) {
  const Case c = param();
  const int n = c.num_experts;
  if (n < 2) {
    return;
  }
  auto x = random_values<double>(c.num_tokens * n, 3);
  const auto ds = random_values<double>(n, 4), dw = random_values<double>(2 * c.num_tokens, 5);
  std::vector<int64_t> idx;
  for (int t = 0; t < c.num_tokens; ++t) {
    for (int e : serial::gshard(row(x, t, n), rng(), t).idx) {
      idx.push_back(e);
    }
  }
  std::vector<double> grad(x.size(), 7);
  const GShardGradArgs<double> args{grad.data(), x.data(), idx.data(), dw.data(), ds.data(), n, kScale};
  launch_gshard_gate_backward(args, c.num_tokens, plan_noisy<double>(c.num_tokens, n, 2, device_properties()), nullptr);
  matches_differences(x, grad, n, [&](int64_t t) {
    const serial::Token token = serial::gshard(row(x, t, n), {}, t);
    const bool kept = idx[2 * t + 1] >= 0;
    return kScale * (token.weights[0] * dw[2 * t] + (kept ? token.weights[1] * dw[2 * t + 1] : 0)) +
           std::inner_product(ds.begin(), ds.end(), token.sums.begin(), 0.0);
  });
}

TEST_P(NoisyKernels, NoisyBackwardMatchesDifferences) {
  const Case c = param();
  const int n = c.num_experts;
  const NoisyOptions options{n, c.top_k, kEpsilon, kScale};
  auto clean = random_values<double>(c.num_tokens * n, 3),
       noise = random_values<double>(c.random ? clean.size() : 0, 6);
  const auto di = random_values<double>(n, 4), dl = random_values<double>(n, 7);
  const auto dw = random_values<double>(c.top_k * c.num_tokens, 5);
  const std::vector<int64_t> idx(c.top_k * c.num_tokens, 0);
  std::vector<double> grad_clean(clean.size(), 7), grad_noise(noise.size(), 7);
  const NoisyGradArgs<double> args{grad_clean.data(), c.random ? grad_noise.data() : nullptr,
                                   clean.data(),      c.random ? noise.data() : nullptr,
                                   idx.data(),        dw.data(),
                                   di.data(),         dl.data(),
                                   options,           rng()};
  const GatePlan plan = plan_noisy<double>(c.num_tokens, n, options.num_ranked(), device_properties());
  launch_noisy_topk_gate_backward(args, c.num_tokens, plan, nullptr);
  const auto loss = [&](int64_t t) {
    const serial::Token token = serial::noisy(row(clean, t, n), row(noise, t, n), rng(), t, c.top_k, kEpsilon);
    double sum = std::inner_product(di.begin(), di.end(), token.sums.begin(), 0.0);
    if (c.random) {
      sum += std::inner_product(dl.begin(), dl.end(), token.loads.begin(), 0.0);
    }
    return std::inner_product(
        token.weights.begin(), token.weights.end(), dw.begin() + t * c.top_k, sum,
        [](double a, double b) { return a + b; }, [](double a, double b) { return kScale * a * b; });
  };
  matches_differences(clean, grad_clean, n, loss);
  matches_differences(noise, grad_noise, n, loss);
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  for (int num_tokens : {0, 1, 31, 33, 257}) {
    cases.push_back({num_tokens, 8, 2});
  }
  for (int num_experts : {1, 31, 32, 33, 70}) {
    cases.push_back({5, num_experts, std::min(num_experts, 6)});
  }
  cases.push_back({9, 8, 8});
  cases.push_back({9, 24, 3, false});
  cases.push_back({9, 70, 40});
  // Fewer warps to a block, and then more shared memory than a launch has without asking.
  cases.push_back({3, 1000, 3});
  cases.push_back({3, 1500, 3});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, NoisyKernels, simt::under_all_schedules(cases()), [](const auto& info) {
  const Case& c = std::get<1>(info.param);
  return simt::to_string(std::get<0>(info.param)) + "_tokens" + std::to_string(c.num_tokens) + "_experts" +
         std::to_string(c.num_experts) + "_k" + std::to_string(c.top_k) + (c.random ? "" : "_plain");
});

TEST(NoisyValues, AreTrapped) {
  const NoisyOptions options{4, 2, 0, 1};
  std::vector<float> weights(2), sums(8);
  std::vector<int64_t> idx(2), counts(4), firsts(4);
  const GatePlan plan = plan_noisy<float>(1, 4, 3, device_properties());
  std::vector<double> workspace(200);
  const Totals<float> totals{{sums.data(), sums.data() + 4}, {counts.data(), firsts.data()}, false};
  const std::vector<float> good(4, 0);
  const std::vector<float> rows[] = {{0, NAN, 0, 0}, {0, INFINITY, 0, 0}, {0, -INFINITY, -INFINITY, -INFINITY}};
  const RngSource rng{kState, nullptr};
  for (const std::vector<float>& bad : rows) {
    const GShardArgs<float> gshard{bad.data(), nullptr, weights.data(), idx.data(), 4, 1, rng};
    EXPECT_THROW(launch_gshard_gate<true>(gshard, 1, plan, workspace.data(), totals, nullptr), simt::Error);
    for (bool in_noise : {false, true}) {
      const NoisyArgs<float> noisy{
          in_noise ? good.data() : bad.data(),
          in_noise ? bad.data() : good.data(),
          nullptr,
          weights.data(),
          idx.data(),
          options,
          rng};
      EXPECT_THROW(launch_noisy_topk_gate<true>(noisy, 1, plan, workspace.data(), totals, nullptr), simt::Error);
    }
  }
  // Without checks, choices that do not exist are not routed.
  const GShardArgs<float> args{rows[2].data(), nullptr, weights.data(), idx.data(), 4, 1, rng};
  launch_gshard_gate<false>(args, 1, plan, workspace.data(), totals, nullptr);
  EXPECT_EQ(idx, (std::vector<int64_t>{0, -1}));
  EXPECT_EQ(weights, (std::vector<float>{1, 0}));
}

} // namespace
} // namespace moe_ext::noisy_gating
