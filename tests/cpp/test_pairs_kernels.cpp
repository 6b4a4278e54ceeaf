// The CUDA kernels of pairs, emulated, against serial loops, under every schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "schedules.h"
#include "sparse/pairs_kernels.cuh"

namespace moe_ext::pairs {
namespace {

struct Pairs {
  int64_t count;
  int64_t numel;
};

std::ostream& operator<<(std::ostream& out, const Pairs& c) {
  return out << c.count << " of " << c.numel;
}

std::vector<int64_t> ascending_indices(int64_t count, int64_t numel) {
  std::mt19937_64 generator(7);
  std::vector<int64_t> indices(count);
  std::generate(
      indices.begin(), indices.end(), [&] { return static_cast<int64_t>(generator() % static_cast<uint64_t>(numel)); });
  std::sort(indices.begin(), indices.end());
  indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  // Unused slots repeat an index.
  indices.resize(count, indices.empty() ? 0 : indices.back());
  return indices;
}

// Exactly as large as it has to be, so that one byte past its end is noticed.
using Bytes = std::vector<uint8_t>;

class PackPairs : public simt::ScheduleTest<Pairs> {};

TEST_P(PackPairs, ComeBackAndAreAdded) {
  const auto [count, numel] = param();
  const IndexLayout layout = index_layout(count, numel);
  const std::vector<int64_t> indices = ascending_indices(count, numel);
  Bytes packed(num_bytes(layout), 0xA5);
  launch_pack_indices<true>(indices.data(), layout, packed.data(), nullptr);
  EXPECT_TRUE(std::all_of(packed.begin() + used_bytes(layout), packed.end(), [](uint8_t byte) { return byte == 0; }));
  std::vector<int64_t> found(count, -1);
  launch_unpack_indices(packed.data(), layout, found.data(), nullptr);
  EXPECT_EQ(found, indices);
  const int64_t start = numel / 3, size = std::min<int64_t>(numel - numel / 3, 100000);
  std::vector<float> values = random_values<float>(count, 3), out = random_values<float>(size, 5), expected = out;
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < start || indices[i] >= start + size || (i > 0 && indices[i] == indices[i - 1])) {
      values[i] = 0;
    } else {
      expected[indices[i] - start] += values[i] / 3.0f;
    }
  }
  launch_add_pairs(out.data(), size, values.data(), packed.data(), layout, start, 3.0f, nullptr);
  EXPECT_EQ(out, expected);
}

TEST_P(PackPairs, OfForeignBytesStayInside) {
  const auto [count, numel] = param();
  const IndexLayout layout = index_layout(count, numel);
  std::mt19937 generator(11);
  Bytes packed(num_bytes(layout));
  std::generate(packed.begin(), packed.end(), [&] { return static_cast<uint8_t>(generator()); });
  std::vector<int64_t> found(count, -1);
  launch_unpack_indices(packed.data(), layout, found.data(), nullptr);
  EXPECT_TRUE(std::all_of(found.begin(), found.end(), [n = numel](int64_t i) { return i >= 0 && i < n; }));
  std::vector<float> out(std::min<int64_t>(numel, 5)), values(count, 1.0f);
  launch_add_pairs(
      out.data(), static_cast<int64_t>(out.size()), values.data(), packed.data(), layout, numel / 2, 1.0f, nullptr);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, PackPairs,
    simt::under_all_schedules<Pairs>(
        {{0, 1},
         {1, 1},
         {3, 70000},
         {5, 70000},
         {1000, 65536},
         {1000, 65537},
         {700, 9000000},
         {40, 9000000},
         {5, int64_t{1} << 31},
         {5, (int64_t{1} << 31) + 1}}));

TEST(PackPairs, TrapsIndicesThatAreNot) {
  for (const std::vector<int64_t>& indices : {std::vector<int64_t>{0, 10}, {-1, 0}, {5, 4}}) {
    const IndexLayout layout = index_layout(2, 10);
    Bytes packed(num_bytes(layout));
    EXPECT_THROW(launch_pack_indices<true>(indices.data(), layout, packed.data(), nullptr), simt::Error);
    launch_pack_indices<false>(indices.data(), layout, packed.data(), nullptr);
  }
}

} // namespace
} // namespace moe_ext::pairs
