// The permutation's CUDA kernels, emulated, against a serial sort and serial sums, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "permutation/permutation_kernels.cuh"
#include "permutation/rows_kernels.cuh"
#include "schedules.h"

namespace moe_ext::permutation {
namespace {

struct Case {
  int num_slots;
  int num_experts;
  int64_t capacity; // INT64_MAX when dropless
  bool by_score;
  int64_t align;
  int shared_bytes = 48 * 1024; // of the emulated device
};

struct Expected {
  std::vector<int64_t> slot_of_row, row_of_slot, expert_offsets, num_tokens_per_expert;
  int64_t num_dropped = 0;
};

template <typename IndexT>
std::vector<IndexT> random_experts(int num_slots, int num_experts) {
  std::mt19937 generator(num_slots * 31 + num_experts);
  std::uniform_int_distribution<int> expert(-1, num_experts - 1);
  std::vector<IndexT> experts(num_slots);
  std::generate(experts.begin(), experts.end(), [&] { return expert(generator); });
  return experts;
}

// Few distinct values, so that ties and both zeros are at work.
template <typename Weight>
std::vector<Weight> random_weights(int num_slots) {
  std::mt19937 generator(num_slots);
  const Weight values[] = {Weight(-0.5), Weight(-0.0), Weight(0.0), Weight(1e-30), Weight(0.25), Weight(3e7)};
  std::vector<Weight> weights(num_slots);
  std::generate(weights.begin(), weights.end(), [&] { return values[generator() % 6]; });
  return weights;
}

template <typename IndexT, typename Weight>
Expected serial_sort(const Case& c, const std::vector<IndexT>& experts, const std::vector<Weight>& weights) {
  Expected out;
  out.row_of_slot.assign(c.num_slots, -1);
  out.expert_offsets.push_back(0);
  for (int e = 0; e < c.num_experts; ++e) {
    std::vector<int64_t> slots;
    for (int slot = 0; slot < c.num_slots; ++slot) {
      if (experts[slot] == e) {
        slots.push_back(slot);
      }
    }
    const int64_t kept = std::min<int64_t>(slots.size(), c.capacity);
    out.num_dropped += slots.size() - kept;
    if (c.by_score) {
      std::stable_sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    }
    slots.resize(kept);
    std::sort(slots.begin(), slots.end());
    for (int64_t slot : slots) {
      out.row_of_slot[slot] = out.slot_of_row.size();
      out.slot_of_row.push_back(slot);
    }
    out.slot_of_row.resize(ceil_div(static_cast<int64_t>(out.slot_of_row.size()), c.align) * c.align, -1);
    out.num_tokens_per_expert.push_back(kept);
    out.expert_offsets.push_back(out.slot_of_row.size());
  }
  return out;
}

class BuildTables : public simt::ScheduleTest<Case> {
 protected:
  bool few_ = true;

  template <typename IndexT, typename Weight>
  void matches_serial_sort() {
    const Case c = param();
    DeviceProperties small = device_properties();
    small.shared_bytes_per_block = c.shared_bytes;
    const simt::Scoped scoped(device_properties(), small);
    const auto experts = random_experts<IndexT>(c.num_slots, c.num_experts);
    const auto weights = random_weights<Weight>(c.num_slots);
    Expected expected = serial_sort(c, experts, weights);
    const int64_t num_rows = expected.slot_of_row.size() + 5;
    expected.slot_of_row.resize(num_rows, -1);
    Expected actual = {
        std::vector<int64_t>(num_rows, 99), std::vector<int64_t>(c.num_slots, 99),
        std::vector<int64_t>(c.num_experts + 1, 99), std::vector<int64_t>(c.num_experts, 99), 99};
    const Tables tables = {
        actual.slot_of_row.data(),
        num_rows,
        actual.row_of_slot.data(),
        {actual.expert_offsets.data(), actual.num_tokens_per_expert.data(), &actual.num_dropped, nullptr}};
    SortPlan plan = plan_sort(c.num_slots, c.num_experts, device_properties());
    // Those that one block could take are sorted by many, too.
    plan.few = plan.few && few_;
    std::vector<int64_t> workspace(ceil_div(tables_workspace_bytes(plan, c.by_score), 8), -1);
    launch_build_tables<true>(
        experts.data(), c.by_score ? weights.data() : nullptr, plan, c.capacity, c.align, workspace.data(), tables,
        nullptr);
    EXPECT_EQ(actual.expert_offsets, expected.expert_offsets);
    EXPECT_EQ(actual.num_tokens_per_expert, expected.num_tokens_per_expert);
    EXPECT_EQ(actual.num_dropped, expected.num_dropped);
    EXPECT_EQ(actual.row_of_slot, expected.row_of_slot);
    EXPECT_EQ(actual.slot_of_row, expected.slot_of_row);
  }
};

TEST_P(BuildTables, MatchesSerialSort) {
  matches_serial_sort<int64_t, float>();
}

TEST_P(BuildTables, MatchesSerialSortInt32AndDoubleWeights) {
  matches_serial_sort<int32_t, double>();
}

TEST_P(BuildTables, OfManyBlocksMatchSerialSort) {
  few_ = false;
  matches_serial_sort<int64_t, float>();
}

TEST(SortPlan, OneBlockTakesFewSlotsWithoutMoreSharedMemory) {
  EXPECT_TRUE(plan_sort(kFewSlots, 180, device_properties()).few);
  EXPECT_FALSE(plan_sort(kFewSlots + 1, 8, device_properties()).few);
  EXPECT_FALSE(plan_sort(64, 200, device_properties()).few);
}

std::vector<Case> table_cases() {
  std::vector<Case> cases;
  for (int num_slots : {0, 1, 31, 32, 33, 255, 256, 257, 3000}) {
    cases.push_back({num_slots, 5, INT64_MAX, false, 1});
    cases.push_back({num_slots, 5, 7, false, 4});
    cases.push_back({num_slots, 5, 7, true, 1});
  }
  for (int num_experts : {1, 33}) {
    cases.push_back({300, num_experts, 3, true, 3});
  }
  cases.push_back({300, 257, 3, false, 3});
  // Counters of eight warps do not fit into shared memory, then not even those of one.
  cases.push_back({600, 17, INT64_MAX, false, 1, 256});
  cases.push_back({600, 17, 2, true, 1, 64});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, BuildTables, simt::under_all_schedules(table_cases()), [](const auto& info) {
  const Case& c = std::get<1>(info.param);
  return simt::to_string(std::get<0>(info.param)) + "_slots" + std::to_string(c.num_slots) + "_experts" +
         std::to_string(c.num_experts) + (c.capacity == INT64_MAX ? "" : "_capacity" + std::to_string(c.capacity)) +
         (c.by_score ? "_score" : "") + "_align" + std::to_string(c.align) + "_shared" + std::to_string(c.shared_bytes);
});

TEST(Tables, TrapAnIndexOutOfRange) {
  for (int64_t bad : {-2, 2}) {
    const std::vector<int64_t> experts = {0, bad};
    std::vector<int64_t> slot_of_row(2), row_of_slot(2), offsets(3), counts(2), workspace(100);
    int64_t dropped = 0;
    const Tables tables = {
        slot_of_row.data(), 2, row_of_slot.data(), {offsets.data(), counts.data(), &dropped, nullptr}};
    const SortPlan plan = plan_sort(2, 2, device_properties());
    const float* no_weights = nullptr;
    EXPECT_THROW(
        launch_build_tables<true>(
            experts.data(), no_weights, plan, INT64_MAX, int64_t{1}, workspace.data(), tables, nullptr),
        simt::Error);
    launch_build_tables<false>(
        experts.data(), no_weights, plan, INT64_MAX, int64_t{1}, workspace.data(), tables, nullptr);
    EXPECT_EQ(row_of_slot, (std::vector<int64_t>{0, -1})) << "without checks it counts as not routed";
  }
}

// Slots 0, 2, 3 and 5 of three tokens have rows; rows 1 and 4 have no slot.
constexpr int kTopK = 2;
const std::vector<int64_t> kRowOfSlot = {3, -1, 0, 5, -1, 2};
const std::vector<int64_t> kSlotOfRow = {2, -1, 5, 0, -1, 3};

// Half a unit in the last place of the output, and one rounding of each term of the sum.
template <typename T>
double tolerance(double magnitude, int64_t terms) {
  const double out_eps = std::is_same_v<T, c10::BFloat16> ? 0x1p-8 : std::is_same_v<T, c10::Half> ? 0x1p-11 : 0;
  const double acc_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  return magnitude * (out_eps + 2 * terms * acc_eps) + (std::is_same_v<T, c10::Half> ? 0x1p-25 : 0);
}

class Rows : public simt::ScheduleTest<int> {
 protected:
  template <typename T>
  void copies() {
    const int64_t dim = param();
    const auto x = random_values<T>(3 * dim, 1);
    std::vector<T> expected(6 * dim, T(0));
    for (int row = 0; row < 6; ++row) {
      if (kSlotOfRow[row] >= 0) {
        std::copy_n(x.begin() + kSlotOfRow[row] / kTopK * dim, dim, expected.begin() + row * dim);
      }
    }
    std::vector<T> scattered(6 * dim, T(7)), gathered(6 * dim, T(7));
    launch_scatter_tokens<true>(
        x.data(), kRowOfSlot.data(), kSlotOfRow.data(), 3, 6, kTopK, dim, sizeof(T), scattered.data(), nullptr);
    launch_gather_tokens<true>(x.data(), kSlotOfRow.data(), 3, 6, kTopK, dim, sizeof(T), gathered.data(), nullptr);
    EXPECT_EQ(scattered, expected);
    EXPECT_EQ(gathered, expected);
  }

  template <typename T>
  void sums() {
    const int64_t dim = param();
    const auto rows = random_values<T>(6 * dim, 2);
    const auto weights = random_values<acc_t<T>>(6, 3);
    for (const acc_t<T>* w : {static_cast<const acc_t<T>*>(nullptr), weights.data()}) {
      std::vector<T> y(3 * dim, T(7));
      launch_unpermute_tokens<true, T>(rows.data(), kRowOfSlot.data(), w, 3, 6, kTopK, dim, y.data(), nullptr);
      for (int64_t i = 0; i < 3 * dim; ++i) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < kTopK; ++k) {
          const int64_t slot = i / dim * kTopK + k;
          if (kRowOfSlot[slot] >= 0) {
            const double term = (w ? w[slot] : 1) * double(acc_t<T>(rows[kRowOfSlot[slot] * dim + i % dim]));
            sum += term;
            magnitude += std::abs(term);
          }
        }
        ASSERT_NEAR(double(acc_t<T>(y[i])), sum, tolerance<T>(magnitude, kTopK)) << i;
      }
    }
  }

  template <typename T>
  void gradients() {
    const int64_t dim = param();
    const auto grad = random_values<T>(3 * dim, 4), rows = random_values<T>(6 * dim, 5);
    const auto weights = random_values<acc_t<T>>(6, 6);
    std::vector<T> grad_rows(6 * dim, T(7));
    std::vector<acc_t<T>> grad_weights(6, 7);
    launch_unpermute_tokens_backward<true, T>(
        grad.data(), rows.data(), kSlotOfRow.data(), kRowOfSlot.data(), weights.data(), 6, 6, kTopK, dim,
        grad_rows.data(), grad_weights.data(), nullptr);
    for (int row = 0; row < 6; ++row) {
      double dot = 0, magnitude = 0;
      const int64_t slot = kSlotOfRow[row];
      for (int64_t i = 0; i < dim; ++i) {
        const double g = slot < 0 ? 0 : double(acc_t<T>(grad[slot / kTopK * dim + i]));
        const double scaled = slot < 0 ? 0 : double(weights[slot]) * g;
        ASSERT_NEAR(double(acc_t<T>(grad_rows[row * dim + i])), scaled, tolerance<T>(std::abs(scaled), 1));
        dot += g * double(acc_t<T>(rows[row * dim + i]));
        magnitude += std::abs(g * double(acc_t<T>(rows[row * dim + i])));
      }
      if (slot >= 0) {
        const double acc_eps = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
        ASSERT_NEAR(double(grad_weights[slot]), dot, magnitude * acc_eps * (dim / 16 + 20));
      }
    }
    EXPECT_EQ(grad_weights[1], 0);
    EXPECT_EQ(grad_weights[4], 0);
  }
};

TEST_P(Rows, AreCopiedForEveryElementSize) {
  copies<uint8_t>();
  copies<uint16_t>();
  copies<float>();
  copies<double>();
}

TEST_P(Rows, AreSummedInOrder) {
  sums<float>();
  sums<double>();
  sums<c10::BFloat16>();
  sums<c10::Half>();
}

TEST_P(Rows, GiveGradients) {
  gradients<float>();
  gradients<double>();
  gradients<c10::BFloat16>();
  gradients<c10::Half>();
}

// Widths that do and do not allow 16-byte accesses, and several tiles of columns.
INSTANTIATE_TEST_SUITE_P(
    Schedules, Rows, simt::under_all_schedules(std::vector<int>{0, 1, 31, 32, 33, 255, 256, 257, 2064}),
    [](const auto& info) {
      return simt::to_string(std::get<0>(info.param)) + "_dim" + std::to_string(std::get<1>(info.param));
    });

TEST(RowsOfUnalignedMemory, AreCopiedByElement) {
  const auto x = random_values<float>(3 * 8 + 1, 1);
  std::vector<float> out(6 * 8 + 1, 7);
  launch_scatter_tokens<true>(
      x.data() + 1, kRowOfSlot.data(), kSlotOfRow.data(), 3, 6, kTopK, 8, 4, out.data() + 1, nullptr);
  EXPECT_TRUE(std::equal(x.begin() + 1, x.begin() + 9, out.begin() + 1 + 3 * 8));
}

} // namespace
} // namespace moe_ext::permutation
