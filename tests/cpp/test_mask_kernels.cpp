// The CUDA kernels of packing by mask, emulated, against serial loops, under every schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "schedules.h"
#include "sparse/mask_kernels.cuh"

namespace moe_ext::mask {
namespace {

struct Mask {
  int64_t numel;
  unsigned one_in; // elements that are marked
};

std::ostream& operator<<(std::ostream& out, const Mask& c) {
  return out << "one in " << c.one_in << " of " << c.numel;
}

// Exactly as large as they have to be, so that an element past an end is noticed.
struct Example {
  std::vector<uint16_t> x, kept;
  std::vector<uint8_t> bitmap;
};

Example example(Mask mask) {
  std::mt19937 generator(7);
  Example made{std::vector<uint16_t>(mask.numel), {}, std::vector<uint8_t>(ceil_div(mask.numel, 8))};
  for (int64_t i = 0; i < mask.numel; ++i) {
    made.x[i] = static_cast<uint16_t>(generator());
    if (generator() % mask.one_in == 0) {
      made.kept.push_back(made.x[i]);
      made.bitmap[i / 8] |= static_cast<uint8_t>(1u << i % 8);
    }
  }
  return made;
}

class PackMasked : public simt::ScheduleTest<Mask> {};

TEST_P(PackMasked, ComesBackAmongZeros) {
  const auto [x, kept, bitmap] = example(param());
  const int64_t numel = param().numel, size = static_cast<int64_t>(kept.size());
  std::vector<int64_t> counts(num_tiles(numel) + 1);
  std::vector<uint16_t> dense = x, packed(size, 9);
  launch_move_masked<true, true>(dense.data(), packed.data(), size, bitmap.data(), numel, counts.data(), nullptr);
  EXPECT_EQ(packed, kept);
  EXPECT_EQ(dense, x);
  launch_move_masked<false, true>(dense.data(), packed.data(), size, bitmap.data(), numel, counts.data(), nullptr);
  for (int64_t i = 0; i < numel; ++i) {
    ASSERT_EQ(dense[i], (bitmap[i / 8] >> i % 8 & 1) != 0 ? x[i] : 0) << i;
  }
  std::vector<uint8_t> found(bitmap.size(), 0xA5), wanted(bitmap.size());
  for (int64_t i = 0; i < numel; ++i) {
    wanted[i / 8] |= static_cast<uint8_t>((dense[i] != 0) << i % 8);
  }
  launch_pack_bits(dense.data(), numel, found.data(), nullptr);
  EXPECT_EQ(found, wanted);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, PackMasked,
    simt::under_all_schedules<Mask>({{0, 1}, {1, 1}, {31, 2}, {257, 3}, {8192, 1}, {8193, 50}, {20000, 2}}));

class MaskedMm : public simt::ScheduleTest<int64_t> {};

TEST_P(MaskedMm, HasTheBitsOfTheCpu) {
  const int64_t num_tokens = param(), num_rows = 9, dim = 72;
  const Example made = example({num_rows * dim, 3});
  const int64_t size = static_cast<int64_t>(made.kept.size());
  const std::vector<float> x = random_values<float>(num_tokens * dim, 1), values = random_values<float>(size, 2);
  std::vector<float> out(num_tokens * num_rows), wanted(out.size());
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t i = 0, place = 0; i < num_rows; ++i) {
      float sums[kSums] = {};
      for (int64_t column = 0; column < dim; ++column) {
        const int64_t at = i * dim + column;
        if ((made.bitmap[at / 8] >> at % 8 & 1) != 0) {
          sums[column % kSums] += values[place++] * x[t * dim + column];
        }
      }
      for (const float sum : sums) {
        wanted[t * num_rows + i] += sum;
      }
    }
  }
  std::vector<int64_t> counts(num_rows + 1);
  MaskedProduct<float> product{x.data(),   values.data(), made.bitmap.data(), counts.data(), out.data(),
                               num_tokens, dim,           num_rows,           size};
  launch_masked_mm<true>(product, counts.data(), nullptr);
  EXPECT_EQ(out, wanted);
  // As the rows of three experts, of which the second has no token.
  const auto half = static_cast<int32_t>(num_tokens / 2);
  const std::vector<int32_t> ends = {half, half, static_cast<int32_t>(num_tokens)};
  std::vector<float> of_experts(num_tokens * 3);
  product.out = of_experts.data();
  product.experts = {nullptr, ends.data(), 3};
  launch_masked_mm<true>(product, counts.data(), nullptr);
  for (int64_t i = 0; i < num_tokens * 3; ++i) {
    const int64_t t = i / 3, e = t < half ? 0 : 2;
    EXPECT_EQ(of_experts[i], wanted[t * num_rows + e * 3 + i % 3]) << "token " << t;
  }
  product.out = out.data();
  product.experts = {};
  product.size = size / 2;
  EXPECT_THROW(launch_masked_mm<true>(product, counts.data(), nullptr), simt::Error);
  launch_masked_mm<false>(product, counts.data(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Tokens, MaskedMm, simt::under_all_schedules<int64_t>({1, 4, 9}));

TEST(PackMasked, StaysInsideOfTooFewElements) {
  auto [x, kept, bitmap] = example({9001, 2});
  const int64_t numel = static_cast<int64_t>(x.size());
  bitmap.back() = 0xFF;
  std::vector<int64_t> counts(num_tiles(numel) + 1);
  std::vector<uint16_t> packed(100), dense = x;
  launch_move_masked<true, false>(x.data(), packed.data(), 100, bitmap.data(), numel, counts.data(), nullptr);
  EXPECT_TRUE(std::equal(packed.begin(), packed.end(), kept.begin()));
  launch_move_masked<false, false>(dense.data(), packed.data(), 100, bitmap.data(), numel, counts.data(), nullptr);
  EXPECT_EQ(std::count_if(dense.begin(), dense.end(), [](uint16_t bits) { return bits != 0; }), 100);
  EXPECT_THROW(
      (launch_move_masked<true, true>(x.data(), packed.data(), 100, bitmap.data(), numel, counts.data(), nullptr)),
      simt::Error);
}

} // namespace
} // namespace moe_ext::mask
