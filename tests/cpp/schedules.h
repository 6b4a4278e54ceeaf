// Every kernel is tested under three orders of blocks, warps and lanes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simt.h"

namespace simt {

inline std::string to_string(Schedule schedule) {
  switch (schedule.order) {
    case Schedule::Order::kForward:
      return "forward";
    case Schedule::Order::kReverse:
      return "reverse";
    default:
      return "random" + std::to_string(schedule.seed);
  }
}

inline std::vector<Schedule> all_schedules() {
  return {{Schedule::Order::kForward}, {Schedule::Order::kReverse}, {Schedule::Order::kRandom, 1}};
}

// Sets a global for as long as it lives.
template <typename T>
class Scoped {
 public:
  Scoped(T& place, T value) : place_(place), before_(std::exchange(place, value)) {
  }
  ~Scoped() {
    place_ = before_;
  }
  Scoped(const Scoped&) = delete;

 private:
  T& place_;
  T before_;
};

template <typename Param>
auto under_all_schedules(const std::vector<Param>& params) {
  return ::testing::Combine(::testing::ValuesIn(all_schedules()), ::testing::ValuesIn(params));
}

template <typename Param>
class ScheduleTest : public ::testing::TestWithParam<std::tuple<Schedule, Param>> {
 protected:
  Param param() const {
    return std::get<1>(this->GetParam());
  }

 private:
  Scoped<Schedule> scoped_{schedule, std::get<0>(this->GetParam())};
};

} // namespace simt

namespace moe_ext {

// Of a normal distribution.
template <typename T>
std::vector<T> random_values(int64_t n, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(n);
  std::generate(values.begin(), values.end(), [&] { return static_cast<T>(normal(generator)); });
  return values;
}

} // namespace moe_ext
