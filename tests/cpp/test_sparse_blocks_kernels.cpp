// Block and row sparsity's CUDA kernels, emulated, against serial loops, under every schedule.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

#include "schedules.h"
#include "sparse/sparse_blocks_kernels.cuh"

namespace moe_ext::sparse_blocks {
namespace {

struct Blocks {
  int64_t numel;
  int64_t block;
  int64_t offset = 0; // elements
};

std::ostream& operator<<(std::ostream& out, const Blocks& c) {
  return out << c.numel << " in " << c.block << " from " << c.offset;
}

class MoveBlocks : public simt::ScheduleTest<Blocks> {
 protected:
  template <typename T>
  void check() {
    const auto [numel, block, offset] = param();
    const int64_t blocks = ceil_div(numel, block);
    std::vector<T> x(numel + offset);
    std::vector<int64_t> kept;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t last = offset + std::min(numel, (b + 1) * block) - 1;
      std::fill(x.begin() + offset + b * block, x.begin() + last + 1, b % 2 == 0 ? T(-0.0) : T(0));
      if (b % 3 == 0) {
        x[last] = std::numeric_limits<T>::denorm_min();
        kept.push_back(b);
      }
    }
    std::vector<int> flags(blocks);
    std::vector<uint8_t> bitmap(ceil_div(blocks, int64_t{8}), 7), expected(bitmap.size());
    for (const int64_t b : kept) {
      expected[b / 8] |= static_cast<uint8_t>(1 << b % 8);
    }
    launch_nonzero_blocks(x.data() + offset, sizeof(T), numel, block, flags.data(), bitmap.data(), nullptr);
    EXPECT_EQ(bitmap, expected);
    const int64_t count = static_cast<int64_t>(kept.size());
    std::vector<T> packed(count * block, T(7)), out(x.size(), T(0));
    launch_move_blocks<true, true>(
        x.data() + offset, packed.data(), kept.data(), count, sizeof(T), numel, block, nullptr);
    for (int64_t i = 0; i < count * block; ++i) {
      const int64_t at = kept[i / block] * block + i % block;
      ASSERT_EQ(packed[i], at < numel ? x[offset + at] : T(0));
    }
    launch_move_blocks<false, true>(
        out.data() + offset, packed.data(), kept.data(), count, sizeof(T), numel, block, nullptr);
    EXPECT_EQ(out, x);
  }
};

TEST_P(MoveBlocks, FindsAndMovesThem) {
  check<float>();
  check<double>();
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, MoveBlocks,
    simt::under_all_schedules<Blocks>({{1, 1}, {5, 8}, {100, 1}, {1000, 16}, {1000, 16, 1}, {1001, 16}, {9000, 4000}}));

TEST(MoveBlocks, TrapsAnIndexOutOfRange) {
  std::vector<float> x(10), packed(8);
  for (const std::vector<int64_t>& idx : {std::vector<int64_t>{0, 3}, {-1, 0}}) {
    const auto run = [&]<bool kGather>() {
      launch_move_blocks<kGather, true>(x.data(), packed.data(), idx.data(), 2, 4, 10, 4, nullptr);
    };
    EXPECT_THROW(run.operator()<true>(), simt::Error);
    EXPECT_THROW(run.operator()<false>(), simt::Error);
    // Without the check no memory is touched for it.
    launch_move_blocks<true, false>(x.data(), packed.data(), idx.data(), 2, 4, 10, 4, nullptr);
  }
  const std::vector<int64_t> twice = {1, 1};
  EXPECT_THROW(
      (launch_move_blocks<false, true>(x.data(), packed.data(), twice.data(), 2, 4, 10, 4, nullptr)), simt::Error);
}

struct Rows {
  int size;
  int64_t num_rows;
  int64_t dim;
};

std::ostream& operator<<(std::ostream& out, const Rows& c) {
  return out << c.size << " of " << c.num_rows << ", width " << c.dim;
}

class SumRows : public simt::ScheduleTest<Rows> {};

TEST_P(SumRows, EqualsSumsInOrder) {
  const auto [size, num_rows, dim] = param();
  const std::vector<float> rows = random_values<float>(size * dim, 1);
  std::mt19937 generator(3);
  std::vector<int64_t> idx(size);
  std::map<int64_t, std::vector<float>> expected;
  for (int64_t i = 0; i < size; ++i) {
    idx[i] = static_cast<int64_t>(generator() % (std::min<int64_t>(num_rows, 30) + 1)) - 1;
    idx[i] = idx[i] < 0 ? -1 : num_rows - 1 - idx[i] * (num_rows / 30 + (num_rows < 30));
    if (idx[i] >= 0) {
      auto& sum = expected.try_emplace(idx[i], dim, 0.0f).first->second;
      for (int64_t d = 0; d < dim; ++d) {
        sum[d] += rows[i * dim + d];
      }
    }
  }
  std::vector<int64_t> order(size), other(size), groups(size), slot_of_row(size), row_of_slot(size), tables(600);
  std::vector<int> digits(size);
  std::vector<int64_t> sort(permutation::tables_workspace_bytes(plan_rows(size), false) / 8 + 1);
  int64_t num_groups = -1;
  const RowSort scratch{
      order.data(),
      other.data(),
      groups.data(),
      &num_groups,
      digits.data(),
      {slot_of_row.data(),
       size,
       row_of_slot.data(),
       {tables.data(), tables.data() + 257, tables.data() + 513, nullptr}},
      sort.data()};
  const int64_t* sorted = launch_sort_rows<true>(idx.data(), size, num_rows, scratch, nullptr);
  ASSERT_EQ(num_groups, static_cast<int64_t>(expected.size()));
  std::vector<int64_t> unique(num_groups), begins(num_groups + 1);
  launch(
      over_threads(size, nullptr), place_groups_kernel, idx.data(), sorted, groups.data(), int64_t{size}, num_groups,
      unique.data(), begins.data());
  std::vector<float> sums(num_groups * dim);
  launch_sum_groups<float>(rows.data(), sorted, begins.data(), num_groups, dim, sums.data(), nullptr);
  int64_t group = 0;
  for (const auto& [index, sum] : expected) {
    EXPECT_EQ(unique[group], index);
    EXPECT_EQ(std::vector<float>(sums.begin() + group * dim, sums.begin() + (group + 1) * dim), sum);
    ++group;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, SumRows,
    simt::under_all_schedules<Rows>(
        {{1, 1, 1}, {40, 3, 8}, {300, 20, 5}, {700, 256, 4}, {300, 257, 8}, {300, int64_t{1} << 40, 3}}));

} // namespace
} // namespace moe_ext::sparse_blocks
