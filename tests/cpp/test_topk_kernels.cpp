// The gradient selection's CUDA kernels, emulated, against sorting, under every schedule: the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "schedules.h"
#include "selection/scopes_kernels.cuh"

namespace moe_ext::topk {
namespace {

struct Case {
  int64_t numel;
  int64_t size; // of a scope
  int64_t k;    // or capacity
  double threshold = -1;
  int levels = 0; // of few different magnitudes
  bool velocity = false;
  bool unaligned = false;
  bool elsewhere = false; // what was owed is read from
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.numel << " in " << c.size << ", k " << c.k << ", threshold " << c.threshold << ", levels " << c.levels
             << (c.velocity ? ", velocity" : "") << (c.unaligned ? ", unaligned" : "")
             << (c.elsewhere ? ", elsewhere" : "");
}

template <typename Acc>
struct Result {
  std::vector<Acc> values, residual, velocity, thresholds;
  std::vector<int64_t> indices, counts;

  bool operator==(const Result&) const = default;
};

template <typename T>
struct Problem {
  using Acc = acc_t<T>;
  Case c;
  std::vector<T> grad;
  std::vector<Acc> residual, velocity;

  explicit Problem(const Case& of) : c(of) {
    std::mt19937 generator(static_cast<unsigned>(of.numel + of.k));
    std::normal_distribution<float> normal;
    const auto draw = [&] {
      const float x = normal(generator);
      return of.levels == 0 ? x : std::round(x * static_cast<float>(of.levels)) / 4;
    };
    for (int64_t i = 0; i < of.numel + 1; ++i) {
      grad.push_back(from_acc<T>(static_cast<Acc>(draw())));
      residual.push_back(static_cast<Acc>(draw()));
      velocity.push_back(static_cast<Acc>(draw()));
    }
  }
  int64_t offset() const {
    return c.unaligned ? 1 : 0;
  }
  int64_t num_scopes() const {
    return ceil_div(c.numel, c.size);
  }
  bool by_threshold() const {
    return c.threshold >= 0;
  }
  Feedback<T> feedback(Result<Acc>& state) const {
    Acc* const e = state.residual.data() + offset();
    Acc* const u = c.velocity ? state.velocity.data() + offset() : nullptr;
    if (!c.elsewhere) {
      return {grad.data() + offset(), e, u, e, u, Acc(0.5), Acc(0.75)};
    }
    const Acc* const u_in = c.velocity ? velocity.data() + offset() : nullptr;
    return {grad.data() + offset(), residual.data() + offset(), u_in, e, u, Acc(0.5), Acc(0.75)};
  }
  Result<Acc> start() const {
    const int64_t slots = num_scopes() * c.k;
    const std::vector<Acc> litter(residual.size(), -7);
    return {std::vector<Acc>(slots, -7),     c.elsewhere ? litter : residual,
            c.elsewhere ? litter : velocity, std::vector<Acc>(num_scopes(), static_cast<Acc>(c.threshold)),
            std::vector<int64_t>(slots, -7), std::vector<int64_t>(num_scopes(), -7)};
  }
};

template <typename T>
Result<acc_t<T>> serial(const Problem<T>& problem) {
  const Case& c = problem.c;
  Result<acc_t<T>> out = problem.start();
  const Feedback<T> args = problem.feedback(out);
  for (int64_t i = 0; i < c.numel; ++i) {
    const auto u = c.velocity ? momentum_of<true>(args, i) : momentum_of<false>(args, i);
    args.residual[i] = owed(args, u, i);
    if (c.velocity) {
      args.velocity[i] = u;
    }
  }
  for (int64_t s = 0; s < problem.num_scopes(); ++s) {
    const int64_t begin = s * c.size, end = std::min(c.numel, begin + c.size);
    std::vector<int64_t> order;
    for (int64_t i = begin; i < end; ++i) {
      const auto key = key_of(args.residual[i]);
      if (!problem.by_threshold() || (key > 0 && key >= key_of(static_cast<acc_t<T>>(c.threshold)))) {
        order.push_back(i);
      }
    }
    const int64_t found = static_cast<int64_t>(order.size()), count = std::min(found, c.k);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return key_of(args.residual[a]) > key_of(args.residual[b]);
    });
    std::sort(order.begin(), order.begin() + count);
    for (int64_t i = 0; i < c.k; ++i) {
      const int64_t place = s * c.k + i;
      if (i < count) {
        out.indices[place] = order[i];
        out.values[place] = std::exchange(args.residual[order[i]], 0);
        if (c.velocity) {
          args.velocity[order[i]] = 0;
        }
      } else if (problem.by_threshold()) {
        out.indices[place] = end - 1;
        out.values[place] = 0;
      }
    }
    if (problem.by_threshold()) {
      out.counts[s] = count;
      out.thresholds[s] = adapted(out.thresholds[s], found, int64_t{10});
    }
  }
  return out;
}

template <bool kVelocity, bool kCheck, typename T>
void run(const Problem<T>& problem, Result<acc_t<T>>& out, bool check) {
  const Case& c = problem.c;
  State<T> state{problem.feedback(out), nullptr, false, kCheck};
  state.aligned = vectors_fit(state.args, c.size, problem.num_scopes());
  const Plan plan = make_plan(c.numel, c.size, problem.num_scopes(), c.k, problem.by_threshold(), device_properties());
  const ScratchBytes bytes = scratch_bytes<T>(plan);
  std::vector<int64_t> zeroed(bytes.zeroed / 8 + 1), other(bytes.other / 8 + 1, -1);
  int refused = 0;
  if (check) {
    launch_check_finite<kVelocity, kCheck>(state, c.numel, &refused, nullptr);
    state.refused = &refused;
  }
  Thresholds<T> thresholds{};
  if (problem.by_threshold()) {
    thresholds = {out.thresholds.data(), out.counts.data(), 10};
  }
  launch_select<kVelocity>(
      state, plan, thresholds, scratch_of<T>(plan, zeroed.data(), other.data()),
      {out.values.data(), out.indices.data()}, nullptr);
}

template <typename T>
Result<acc_t<T>> emulated(const Problem<T>& problem, bool check = false) {
  Result<acc_t<T>> out = problem.start();
  problem.c.velocity ? run<true, false>(problem, out, check) : run<false, false>(problem, out, check);
  return out;
}

class Select : public simt::ScheduleTest<Case> {};

TEST_P(Select, EqualsSorting) {
  const auto check = [&]<typename T>() {
    const Problem<T> problem(param());
    EXPECT_EQ(emulated(problem), serial(problem));
  };
  check.operator()<float>();
  check.operator()<double>();
  if (param().numel < 10000) {
    check.operator()<BFloat16>();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Select,
    simt::under_all_schedules<Case>(
        {// A warp a scope, a block a scope, segments of warps.
         {1, 1, 1},
         {1000, 100, 7, -1, 0, true},
         {1000, 100, 7, -1, 0, true, true},
         {700, 300, 300},
         {700, 300, 50, -1, 1},
         {700, 300, 0},
         {900, 300, 40, 1.0},
         {900, 300, 5, 0.25, 2, true},
         {5000, 2000, 150, -1, 0, true},
         {5000, 1999, 150, -1, 2},
         {5000, 2000, 100, 1.0, 0, true},
         {5000, 2000, 9, 0.25, 2},
         {9001, 9001, 200, -1, 0, true},
         {20001, 9001, 100},
         {9001, 9001, 4000},
         {9001, 9001, 300, -1, 1},
         {9001, 9001, 400, 1.5, 0, true},
         {20001, 9001, 50, 1.5, 0, false, true},
         {9001, 9001, 9001, 0.0},
         {9001, 9001, 100, 0.25, 1},
         {1000, 100, 7, -1, 0, true, false, true},
         {900, 300, 5, 0.25, 2, true, true, true},
         {5000, 1999, 150, -1, 2, false, false, true},
         {5000, 2000, 9, 0.25, 2, true, false, true},
         {20001, 9001, 100, -1, 0, true, false, true},
         {20001, 9001, 50, 1.5, 0, false, true, true}}));

// The most that a sample can mislead: nearly all is zero, or what is not lies where no sample falls.
TEST(Select, FillsUpWithTheFirstZeros) {
  Problem<float> problem({20000, 20000, 500});
  std::fill(problem.residual.begin(), problem.residual.end(), 0.0f);
  for (int64_t i = 0; i < 20000; ++i) {
    problem.grad[i] = i % 1000 == 999 ? 1.0f : 0.0f;
  }
  EXPECT_EQ(emulated(problem), serial(problem));
  std::fill(problem.grad.begin(), problem.grad.end(), 0.0f);
  EXPECT_EQ(emulated(problem), serial(problem));
  for (int64_t i = 0; i < 20000; ++i) {
    problem.grad[i] = static_cast<float>(i < 400 ? 100 + i : 1);
  }
  EXPECT_EQ(emulated(problem), serial(problem));
}

TEST(Select, WhatIsNotFiniteTravelsAndTheStateStays) {
  for (const int64_t numel : {300, 3000, 20000}) {
    for (const double threshold : {-1.0, 2.0}) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
        Problem<float> problem({numel, numel, 5, threshold, 0, true});
        problem.grad[numel - 2] = bad;
        const auto before = problem.start(), after = emulated(problem, true);
        EXPECT_EQ(after.residual, before.residual);
        EXPECT_EQ(after.velocity, before.velocity);
        EXPECT_EQ(after.thresholds, before.thresholds);
        const auto place = std::find(after.indices.begin(), after.indices.end(), numel - 2) - after.indices.begin();
        ASSERT_LT(place, 5);
        EXPECT_FALSE(std::isfinite(after.values[place]));
      }
    }
  }
}

// A scope that is fed before the one that is not finite must not adapt its threshold either.
TEST(Select, WhatIsNotFiniteTravelsElsewhereAndTheThresholdsStay) {
  for (const int64_t size : {300, 3000, 10000}) {
    Problem<float> problem({2 * size, size, 5, 2.0, 0, true, false, true});
    problem.grad[2 * size - 2] = std::numeric_limits<float>::infinity();
    const auto after = emulated(problem, true);
    EXPECT_EQ(after.thresholds, problem.start().thresholds);
    EXPECT_EQ(after.counts, std::vector<int64_t>(2, 5));
    const auto place = std::find(after.indices.begin(), after.indices.end(), 2 * size - 2) - after.indices.begin();
    ASSERT_LT(place, 10);
    EXPECT_FALSE(std::isfinite(after.values[place]));
    problem.grad[2 * size - 2] = 0;
    EXPECT_EQ(emulated(problem, true), serial(problem));
  }
}

TEST(Select, TrapsWhatIsNotFinite) {
  for (const bool elsewhere : {false, true}) {
    for (const int64_t numel : {300, 3000, 10000}) {
      Problem<float> problem({numel, numel, 5, -1, 0, false, false, elsewhere});
      problem.grad[7] = std::numeric_limits<float>::infinity();
      auto out = problem.start();
      const auto checked = [&] { run<false, true>(problem, out, true); };
      EXPECT_THROW(checked(), simt::Error);
      EXPECT_TRUE(elsewhere || out == problem.start());
    }
  }
}

} // namespace
} // namespace moe_ext::topk
