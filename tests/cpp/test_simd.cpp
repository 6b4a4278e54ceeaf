// The scalar conversions and maths of common/simd.h against the standard library and torch's own types.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "common/simd.h"

namespace moe_ext {
namespace {

TEST(Half, EveryBitPatternConvertsAsTorchDoes) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float ours = to_acc(Half{static_cast<uint16_t>(bits)});
    const float torchs = static_cast<float>(c10::Half(static_cast<uint16_t>(bits), c10::Half::from_bits()));
    if (std::isnan(torchs)) {
      EXPECT_TRUE(std::isnan(ours)) << bits;
    } else {
      EXPECT_EQ(bit_cast<uint32_t>(ours), bit_cast<uint32_t>(torchs)) << bits;
    }
  }
}

// Every exponent, with mantissas at and beside the points where rounding turns.
template <typename F>
void for_each_hard_float(F&& f) {
  std::mt19937 generator(0);
  for (uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (uint32_t low :
         {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, static_cast<uint32_t>(generator() & 0xFFFFu)}) {
      f(bit_cast<float>(high << 16 | low));
    }
    for (uint32_t low : {0x0FFFu, 0x1000u, 0x1001u, 0x2FFFu, 0x3000u, 0x3001u}) {
      f(bit_cast<float>(high << 16 | low));
    }
  }
}

TEST(Half, RoundsAsTorchDoes) {
  for_each_hard_float([](float x) {
    const uint16_t ours = from_acc<Half>(x).bits;
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(to_acc(Half{ours})));
    } else {
      ASSERT_EQ(ours, c10::Half(x).x) << x;
    }
  });
}

TEST(BFloat16, RoundsAsTorchDoes) {
  for_each_hard_float([](float x) {
    const uint16_t ours = from_acc<BFloat16>(x).bits;
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(to_acc(BFloat16{ours})));
    } else {
      ASSERT_EQ(ours, c10::BFloat16(x).x) << x;
    }
  });
}

// The polynomial is good to one unit in the last place, and the sum and the product with 2^n round once more.
constexpr double kExpUlps = 2.5;

// Sums that end between two floats, or beside that, and products and addends of any size. This file is compiled for a
// processor without the instruction.
TEST(Fma, RoundsOnce) {
  std::mt19937 generator(0);
  const auto any = [&] { return bit_cast<float>(static_cast<uint32_t>(generator())); };
  const auto near_one = [&] { return 1 + static_cast<float>(generator() & 0xFFF) * 0x1p-12f; };
  for (int i = 0; i < 3000000; ++i) {
    float a = any(), b = any(), c = any();
    if (i % 3 == 1) {
      a = near_one(), b = near_one(), c = std::ldexp(near_one() - 1.5f, static_cast<int>(generator() % 80) - 50);
    } else if (i % 3 == 2) {
      a = std::ldexp(near_one(), -70), b = std::ldexp(near_one(), static_cast<int>(generator() % 20) - 75);
      c = std::ldexp(near_one(), static_cast<int>(generator() % 30) - 150);
    }
    const float found = fma_acc(a, b, c), wanted = std::fma(a, b, c);
    if (!(std::isnan(found) && std::isnan(wanted))) {
      ASSERT_EQ(bit_cast<uint32_t>(found), bit_cast<uint32_t>(wanted)) << a << " " << b << " " << c;
    }
  }
}

TEST(Exp, WithinTwoUlpsOfTheStandardLibrary) {
  for (float x = -87.3f; x < 88.0f; x += 0.000731f) {
    const double exact = std::exp(static_cast<double>(x));
    ASSERT_NEAR(exp_acc(x) / exact, 1.0, kExpUlps * std::numeric_limits<float>::epsilon() / 2) << x;
  }
}

TEST(Exp, EdgesAreExact) {
  EXPECT_EQ(exp_acc(0.0f), 1.0f);
  EXPECT_EQ(exp_acc(-0.0f), 1.0f);
  EXPECT_EQ(exp_acc(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(exp_acc(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_acc(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Sigmoid, SaturatesWithoutNaN) {
  EXPECT_EQ(sigmoid_acc(0.0f), 0.5f);
  EXPECT_EQ(sigmoid_acc(1e30f), 1.0f);
  EXPECT_EQ(sigmoid_acc(-1e30f), 0.0f);
  EXPECT_EQ(sigmoid_acc(-std::numeric_limits<float>::infinity()), 0.0f);
}

} // namespace
} // namespace moe_ext
