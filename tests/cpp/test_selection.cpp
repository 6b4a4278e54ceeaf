// Selection among keys against a sort, and the loops of selection for every instruction set: the same bits as the
// portable ones, and nothing written past the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "isa.h"
#include "selection/select.h"
#include "selection/topk_tables.h"

namespace moe_ext {

namespace topk {
MOE_EXT_TABLES(Kernels)
} // namespace topk

namespace {

using testing::random_floats;

constexpr int64_t kSizes[] = {1, 15, 16, 17, 255, 256, 257, 1000};

template <typename Key>
void expect_kth(const std::vector<Key>& keys) {
  std::vector<Key> sorted = keys;
  std::sort(sorted.begin(), sorted.end(), std::greater<Key>());
  const int64_t n = static_cast<int64_t>(keys.size());
  for (const int64_t k : {int64_t{1}, int64_t{2}, n / 100 + 1, n / 2 + 1, n - 1, n}) {
    std::vector<Key> scratch = keys;
    ASSERT_EQ(kth_largest(scratch.data(), n, k), sorted[k - 1]) << k << " of " << n;
    scratch = keys;
    const Cut<Key> cut = cut_largest(keys.data(), scratch.data(), n, k);
    const int64_t above = std::count_if(keys.begin(), keys.end(), [&](Key key) { return key > cut.bound; });
    ASSERT_EQ(above + cut.ties, k);
    ASSERT_LE(cut.ties, std::count(keys.begin(), keys.end(), cut.bound));
  }
}

TEST(Select, FindsTheKthLargest) {
  std::mt19937_64 generator(0);
  for (const int64_t n : {int64_t{2}, int64_t{1024}, int64_t{1025}, int64_t{50000}}) {
    for (const uint64_t range : {uint64_t{1}, uint64_t{7}, uint64_t{5000}, ~uint64_t{0}}) {
      std::vector<uint64_t> wide(n);
      std::vector<uint32_t> narrow(n);
      for (int64_t i = 0; i < n; ++i) {
        wide[i] = generator() % range;
        narrow[i] = static_cast<uint32_t>(generator() % range);
      }
      expect_kth(wide);
      expect_kth(narrow);
    }
  }
}

TEST(Select, TakesNothingForZero) {
  std::vector<uint32_t> keys = {3, 1, 2}, scratch = keys;
  const Cut<uint32_t> cut = cut_largest(keys.data(), scratch.data(), 3, 0);
  EXPECT_EQ(cut.ties, 0);
  EXPECT_GT(cut.bound, 3u);
}

Feedback<float> in_place(
    const std::vector<float>& grad, float* residual, float* velocity, float residual_scale, float momentum) {
  return {grad.data(), residual, velocity, residual, velocity, residual_scale, momentum};
}

class Selection : public ::testing::TestWithParam<std::string> {};

struct Scanned {
  std::vector<uint32_t> keys, offsets;
  std::vector<float> residual, velocity;
  uint32_t largest = 0;
  int64_t equal = 0;
  int64_t count = 0;

  bool operator==(const Scanned&) const = default;
};

Scanned scan(const topk::Kernels& kernels, int64_t n, bool with_velocity, uint32_t low) {
  const std::vector<float> grad = random_floats(n, 1);
  Scanned out{
      std::vector<uint32_t>(n + 32, 7), std::vector<uint32_t>(n + 32, 7), random_floats(n + 1, 2),
      random_floats(n + 1, 3)};
  float* const velocity = with_velocity ? out.velocity.data() : nullptr;
  std::vector<float> velocities(n + 16);
  const Feedback<float> args = in_place(grad, out.residual.data(), velocity, 0.7f, 0.9f);
  topk::Scanned<uint32_t> seen;
  out.count = kernels.f32.feed_and_scan(
      args, 0, n, low, {out.keys.data(), out.offsets.data(), with_velocity ? velocities.data() : nullptr}, &seen);
  out.largest = seen.largest;
  out.equal = seen.equal;
  // What lies behind the candidates is scratch, up to one vector past the end.
  EXPECT_EQ(out.keys[n + 16], 7u);
  EXPECT_EQ(out.offsets[n + 16], 7u);
  out.keys.resize(out.count);
  out.offsets.resize(out.count);
  return out;
}

TEST_P(Selection, ScansAsThePortableLoops) {
  for (const int64_t n : kSizes) {
    for (const float low : {0.0f, 1.0f, 2.5f}) {
      for (const bool with_velocity : {false, true}) {
        const Scanned actual = scan(topk::table(GetParam()), n, with_velocity, key_of(low));
        const Scanned expected = scan(topk::table("portable"), n, with_velocity, key_of(low));
        ASSERT_TRUE(actual == expected) << n << " elements from " << low << " on";
      }
    }
  }
}

// A gradient and a state of one kind that the feed taken backwards finds easy or hard.
struct State {
  std::vector<float> grad, residual, velocity;
};

State state_of(const std::string& kind, int64_t n) {
  State state{random_floats(n, 6), random_floats(n, 7), random_floats(n, 8)};
  for (int64_t i = 0; i < n; ++i) {
    if (kind == "settled") {
      state.residual[i] *= 8;
      state.velocity[i] *= 8;
    } else if (kind == "small residual") {
      state.residual[i] *= 1e-6f;
    } else if (kind == "subnormal") {
      state.grad[i] *= 1e-39f;
      state.residual[i] *= 1e-39f;
      state.velocity[i] *= 1e-38f;
    } else if (kind == "not finite") {
      state.residual[i] = i % 5 == 0 ? std::nanf("0x123") : i % 7 == 0 ? -INFINITY : i % 3 == 0 ? -0.0f : 3e38f;
      state.grad[i] = i % 11 == 0 ? std::nanf("0x77") : i % 13 == 0 ? INFINITY : state.grad[i];
    }
  }
  return state;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// What lies on the stack behind a block that is not full must not be taken for elements of it.
__attribute__((noinline)) void litter_the_stack() {
  char litter[65536];
  std::memset(litter, 0x41, sizeof(litter));
  asm volatile("" : : "r"(litter) : "memory");
}

TEST_P(Selection, ScansBlocksThatAreNotFull) {
  const auto& loops = topk::table(GetParam()).f32;
  for (int64_t n = 1; n < 300; n += 7) {
    const std::vector<float> grad(n, 1.0f);
    std::vector<float> residual(n);
    const Feedback<float> args = in_place(grad, residual.data(), nullptr, 1, 0);
    std::vector<uint32_t> keys(topk::kSegmentBuffer), offsets(topk::kSegmentBuffer);
    for (const uint32_t low : {0u, key_of(0.5f), key_of(1.0f), key_of(2.0f)}) {
      topk::Scanned<uint32_t> seen, fed;
      litter_the_stack();
      EXPECT_EQ(loops.scan(args, 0, n, low, {keys.data(), offsets.data(), nullptr}, &seen), low < key_of(1.0f) ? n : 0);
      EXPECT_EQ(seen.equal, low == key_of(1.0f) ? n : 0);
      EXPECT_EQ(seen.largest, low < key_of(1.0f) ? key_of(1.0f) : 0);
      litter_the_stack();
      EXPECT_EQ(loops.scan_fed(residual.data(), n, low, {keys.data(), offsets.data(), nullptr}, &fed), 0);
      EXPECT_EQ(fed.equal, low == 0 ? n : 0);
    }
  }
}

TEST_P(Selection, TakesAFeedBackBitForBit) {
  const auto& loops = topk::table(GetParam()).f32;
  for (const int64_t n : {int64_t{1}, int64_t{17}, int64_t{256}, int64_t{1000}, topk::kSegment}) {
    for (const char* kind : {"settled", "small residual", "subnormal", "not finite"}) {
      for (const float scale : {1.0f, 0.9f, 0.0f, 1e-30f}) {
        for (const bool with_velocity : {false, true}) {
          const State before = state_of(kind, n);
          State state = before, fed = before;
          const auto feedback = [&](State& s) {
            return in_place(before.grad, s.residual.data(), with_velocity ? s.velocity.data() : nullptr, scale, 0.9f);
          };
          std::vector<uint32_t> keys(topk::kSegmentBuffer), offsets(topk::kSegmentBuffer);
          std::vector<int8_t> steps(2 * topk::kSegment);
          std::vector<float> values(2 * topk::kSegmentBuffer);
          topk::UndoLog<float> log{steps.data(), values.data()};
          topk::Scanned<uint32_t> seen;
          const uint32_t none = 0x7FFFFFFFu;
          loops.logged_feed_and_scan(feedback(state), 0, n, none, {keys.data(), offsets.data(), nullptr}, &seen, &log);
          loops.feed(feedback(fed), 0, n);
          // Which of two NaN a sum keeps is nobody's promise.
          if (std::string(kind) != "not finite") {
            ASSERT_TRUE(same_bits(state.residual, fed.residual) && same_bits(state.velocity, fed.velocity)) << kind;
          }
          loops.undo(feedback(state), 0, n, log);
          ASSERT_TRUE(same_bits(state.residual, before.residual)) << kind << " scaled by " << scale;
          ASSERT_TRUE(same_bits(state.velocity, before.velocity)) << kind << " scaled by " << scale;
          if (std::string(kind) == "settled" && scale > 0.5f && n == topk::kSegment) {
            EXPECT_LT(log.count, n / 4);
          }
        }
      }
    }
  }
}

// The way around slow products must round as the processor does.
TEST_P(Selection, FeedsSubnormalNumbersAsTheProcessorDoes) {
  const auto& loops = topk::table(GetParam()).f32;
  std::mt19937 generator(9);
  constexpr int64_t kNumel = 4096;
  for (const float scale : {0.9f, 0.5f, 3.0f, 1e-3f, 1e-20f, 1e-40f, 0.0f}) {
    for (const uint32_t range : {0x00000010u, 0x00800000u, 0x01800000u, 0x40000000u}) {
      std::vector<float> grad(kNumel), residual(kNumel), expected(kNumel);
      for (int64_t i = 0; i < kNumel; ++i) {
        residual[i] = bit_cast<float>(static_cast<uint32_t>(generator() % range) | (i % 2 == 0 ? 0x80000000u : 0));
        const volatile float product = scale * residual[i];
        expected[i] = product + grad[i];
      }
      loops.feed(in_place(grad, residual.data(), nullptr, scale, 0), 0, kNumel);
      ASSERT_TRUE(same_bits(residual, expected)) << scale << " times floats below " << range;
    }
  }
}

// Blocks with and without slow products take turns, the last one is not full, and the state is read from elsewhere.
TEST_P(Selection, ScansSubnormalBlocksAmongOthers) {
  constexpr int64_t kNumel = 5 * 256 + 100;
  const std::vector<float> grad = random_floats(kNumel, 10);
  std::vector<float> from = random_floats(kNumel, 11);
  for (int64_t i = 0; i < kNumel; ++i) {
    from[i] *= i / 256 % 2 == 1 && i % 3 == 0 ? 1e-39f : 1.0f;
  }
  for (const float scale : {1.0f, 0.9f}) {
    const auto scanned = [&](const topk::Kernels& kernels, std::vector<float>& to, std::vector<uint32_t>& keys) {
      std::vector<uint32_t> offsets(kNumel + 16);
      keys.resize(kNumel + 16);
      topk::Scanned<uint32_t> seen;
      const int64_t count = kernels.f32.feed_and_scan(
          {grad.data(), from.data(), nullptr, to.data(), nullptr, scale, 0}, 0, kNumel, key_of(1.5f),
          {keys.data(), offsets.data(), nullptr}, &seen);
      keys.resize(count);
      keys.insert(keys.end(), offsets.begin(), offsets.begin() + count);
      keys.push_back(seen.largest);
    };
    std::vector<float> actual(kNumel), expected(kNumel);
    std::vector<uint32_t> actual_keys, expected_keys;
    scanned(topk::table(GetParam()), actual, actual_keys);
    scanned(topk::table("portable"), expected, expected_keys);
    EXPECT_GT(expected_keys.size(), 100u);
    EXPECT_EQ(actual_keys, expected_keys);
    EXPECT_TRUE(same_bits(actual, expected));
    for (int64_t i = 0; i < kNumel; ++i) {
      const volatile float product = scale * from[i];
      const float sum = product + grad[i];
      ASSERT_EQ(expected[i], std::abs(sum) > 1.5f ? 0.0f : sum);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, Selection, ::testing::ValuesIn(testing::supported_isas()), [](const auto& info) {
  return info.param;
});

} // namespace
} // namespace moe_ext
