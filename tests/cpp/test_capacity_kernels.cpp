// The capacity limit's CUDA kernels, emulated, against a serial walk over the slots, under every schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "capacity/capacity_kernels.cuh"
#include "schedules.h"

namespace moe_ext::capacity {
namespace {

struct Case {
  int num_tokens;
  int top_k;
  int num_experts;
  int capacity;
  int num_groups = 1;
  bool ordered = false;
  bool reroute = false;

  int per_group() const {
    return ceil_div(num_tokens, num_groups) * top_k;
  }
};

struct Result {
  std::vector<int64_t> idx;
  int64_t num_dropped = 0;
};

std::vector<int64_t> shuffled(int size, std::mt19937& generator) {
  std::vector<int64_t> values(size);
  std::iota(values.begin(), values.end(), 0);
  std::shuffle(values.begin(), values.end(), generator);
  return values;
}

Result serial_limit(
    const Case& c, const std::vector<int64_t>& idx, const std::vector<int64_t>& order,
    const std::vector<int64_t>& ranked) {
  Result out{idx};
  const int per_group = c.per_group(), num_slots = static_cast<int>(idx.size());
  for (int g = 0; g < c.num_groups; ++g) {
    std::vector<int> room(c.num_experts, c.capacity);
    std::vector<int64_t> refused;
    for (int i = g * per_group; i < std::min(num_slots, (g + 1) * per_group); ++i) {
      const int64_t slot = order[i];
      if (idx[slot] >= 0 && room[idx[slot]]-- <= 0) {
        ++room[idx[slot]];
        out.idx[slot] = -1;
        refused.push_back(slot);
      }
    }
    for (const int64_t slot : refused) {
      const int64_t token = slot / c.top_k;
      const auto own = out.idx.begin() + token * c.top_k;
      ++out.num_dropped;
      for (int r = 0; c.reroute && r < c.num_experts; ++r) {
        const int64_t e = ranked[token * c.num_experts + r];
        if (room[e] > 0 && std::find(own, own + c.top_k, e) == own + c.top_k) {
          --room[e];
          out.idx[slot] = e;
          --out.num_dropped;
          break;
        }
      }
    }
  }
  return out;
}

class LimitCapacity : public simt::ScheduleTest<Case> {};

TEST_P(LimitCapacity, EqualsASerialWalk) {
  const Case c = param();
  std::mt19937 generator(c.num_tokens + c.num_experts);
  const int num_slots = c.num_tokens * c.top_k, per_group = c.per_group();
  std::vector<int64_t> idx, ranked, order(num_slots);
  for (int t = 0; t < c.num_tokens; ++t) {
    const auto experts = shuffled(c.num_experts, generator);
    ranked.insert(ranked.end(), experts.begin(), experts.end());
    // Half of the choices go to the first experts, so that these overflow; some slots have none.
    for (int k = 0; k < c.top_k; ++k) {
      idx.push_back(generator() % 8 == 0 ? -1 : generator() % 2 == 0 ? experts[k] : k);
    }
  }
  std::iota(order.begin(), order.end(), 0);
  for (int g = 0; c.ordered && g < c.num_groups; ++g) {
    const auto at = [&](int group) { return order.begin() + std::min(num_slots, group * per_group); };
    std::shuffle(at(g), at(g + 1), generator);
  }
  const Result expected = serial_limit(c, idx, order, ranked);
  const int pairs = c.num_experts * c.num_groups;
  const permutation::SortPlan plan = permutation::plan_sort(num_slots, pairs, device_properties());
  std::vector<int64_t> out(num_slots, -7), slot_of_row(num_slots), row_of_slot(num_slots), offsets(pairs + 1),
      counts(pairs);
  int64_t num_dropped = -7;
  std::vector<int> pair_of_slot(num_slots), rerouted(c.num_groups);
  std::vector<int64_t> sort(permutation::tables_workspace_bytes(plan, false) / 8 + 1);
  const Slots slots{
      idx.data(),
      c.ordered ? order.data() : nullptr,
      c.reroute ? ranked.data() : nullptr,
      out.data(),
      num_slots,
      c.top_k,
      c.num_experts,
      c.num_experts,
      c.num_groups,
      per_group,
      c.capacity};
  const Workspace workspace{
      {slot_of_row.data(), num_slots, row_of_slot.data(), {offsets.data(), counts.data(), &num_dropped, nullptr}},
      pair_of_slot.data(),
      rerouted.data(),
      sort.data()};
  launch_limit_capacity<true>(slots, plan, workspace, nullptr);
  EXPECT_EQ(out, expected.idx);
  EXPECT_EQ(num_dropped, expected.num_dropped);
}

TEST(LimitCapacityMemory, IsBoundedByTheSlotsForAnyNumberOfGroups) {
  const DeviceProperties h200 = {132, 2048, 48 * 1024, 227 * 1024, 9};
  const auto bytes = [&](int slots, int groups) {
    return permutation::tables_workspace_bytes(permutation::plan_sort(slots, 64 * groups, h200), false);
  };
  const int slots = 16384 * 8;
  EXPECT_EQ(permutation::plan_sort(slots, 64, h200).slots_per_segment, 256);
  for (const int groups : {1, 16, 256, 1024, 16384}) {
    // Counts of 64 bytes a slot, in whole segments, and totals of the pairs.
    EXPECT_LE(bytes(slots, groups), int64_t{64} * slots + 8 * 64 * groups) << groups;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, LimitCapacity,
    simt::under_all_schedules<Case>(
        {{0, 2, 4, 1, 1, true, true},
         {1, 1, 1, 1},
         {64, 2, 8, 5},
         {64, 2, 8, 5, 4, true},
         {65, 2, 40, 1, 1, true, true},
         {96, 3, 6, 20, 3, true, true},
         {94, 3, 6, 20, 3, true, true},
         {5, 2, 3, 1, 4, false, true},
         {300, 2, 5, 90, 1, false, true},
         {33, 1, 70, 2, 1, false, true}}));

} // namespace
} // namespace moe_ext::capacity
