// The split of float32 into bfloat16 parts, emulated, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>

#include <cmath>

#include "router_linear/router_linear_kernels.cuh"
#include "schedules.h"

namespace moe_ext::router_linear {
namespace {

struct Shape {
  const char* name;
  int64_t rows, cols, padding;
};

class Parts : public simt::ScheduleTest<Shape> {
 protected:
  const Shape shape = param();
  const int64_t stride = shape.cols + shape.padding;

  template <typename T>
  std::vector<c10::BFloat16> split(const std::vector<T>& in, const Blocks& blocks, bool side_by_side) const {
    const int64_t size = shape.rows * shape.cols;
    std::vector<c10::BFloat16> out(size * blocks.count, c10::BFloat16(99.0f));
    launch_split(
        in.data(), shape.rows, shape.cols, stride, blocks, side_by_side ? shape.cols : size,
        side_by_side ? shape.cols * blocks.count : shape.cols, out.data(), nullptr);
    return out;
  }
};

TEST_P(Parts, OfFloatSumToItInAnyPlace) {
  std::vector<float> in = random_values<float>(shape.rows * stride, 1);
  if (!in.empty()) {
    in[0] = 0x1.fffffep+100f; // all 24 bits
  }
  for (const Blocks& blocks : {kThreeParts, kLeftOfSix, kRightOfSix}) {
    for (bool side_by_side : {false, true}) {
      const auto out = split(in, blocks, side_by_side);
      for (int64_t i = 0; i < shape.rows * shape.cols; ++i) {
        const int64_t row = i / shape.cols, col = i % shape.cols;
        double parts[3] = {}, sum = 0;
        for (int b = 0; b < blocks.count; ++b) {
          const int64_t at =
              side_by_side ? (row * blocks.count + b) * shape.cols + col : (b * shape.rows + row) * shape.cols + col;
          const double part = static_cast<float>(out[at]);
          // The same part is the same number in every block.
          ASSERT_TRUE(parts[blocks.parts[b]] == 0 || parts[blocks.parts[b]] == part);
          parts[blocks.parts[b]] = part;
        }
        for (double part : parts) {
          sum += part;
        }
        ASSERT_EQ(sum, double(in[row * stride + col])) << "row " << row << ", column " << col;
        ASSERT_LE(std::abs(parts[1]), 0x1p-8 * std::abs(sum));
        ASSERT_LE(std::abs(parts[2]), 0x1p-16 * std::abs(sum));
      }
    }
  }
}

TEST_P(Parts, OfBfloat16AreItself) {
  const auto in = random_values<c10::BFloat16>(shape.rows * stride, 2);
  const auto out = split(in, kOnePart, false);
  for (int64_t i = 0; i < int64_t(out.size()); ++i) {
    const int64_t in_block = i % (shape.rows * shape.cols);
    ASSERT_EQ(float(out[i]), float(in[in_block / shape.cols * stride + in_block % shape.cols]));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, Parts,
    simt::under_all_schedules(
        std::vector<Shape>{
            {"wide", 37, 136, 0}, {"narrow", 5, 10, 0}, {"padded", 9, 12, 4}, {"apart", 3, 4, 1}, {"none", 0, 8, 0}}),
    [](const auto& info) { return simt::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name; });

// Which products the blocks take: all of three parts with one, and of three with three but the smallest three.
TEST(BlocksOfParts, AreThoseOfTheWantedProducts) {
  const auto pairs = [](const Blocks& left, const Blocks& right) {
    EXPECT_EQ(left.count, right.count);
    int taken[3][3] = {}, before = 4;
    for (int b = 0; b < left.count; ++b) {
      taken[left.parts[b]][right.parts[b]] += 1;
      const int order = left.parts[b] + right.parts[b];
      EXPECT_LE(order, before) << "the smallest come first";
      before = order;
    }
    std::string text;
    for (int p = 0; p < 3; ++p) {
      for (int q = 0; q < 3; ++q) {
        text += static_cast<char>('0' + taken[p][q]);
      }
    }
    return text;
  };
  EXPECT_EQ(pairs(kThreeParts, kOnePart), "100100100");
  EXPECT_EQ(pairs(kLeftOfSix, kRightOfSix), "111110100");
}

} // namespace
} // namespace moe_ext::router_linear
