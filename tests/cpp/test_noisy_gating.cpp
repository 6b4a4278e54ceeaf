// Philox against published vectors, and the loops of the noisy gates against serial ones, for every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gating/gating_tables.h"
#include "isa.h"
#include "noisy_gating/noisy_gating_math.h"
#include "noisy_gating/noisy_gating_tables.h"
#include "noisy_serial.h"

namespace moe_ext::noisy_gating {

MOE_EXT_TABLES(Kernels)

namespace {

const int64_t kState[4] = {0x0123456789ABCDEF, 5, 77, 1000};

// The vectors that come with Random123, the authors' library.
TEST(Philox, MatchesPublishedVectors) {
  struct Vector {
    PhiloxWords counter;
    PhiloxKey key;
    PhiloxWords words;
  };
  const Vector vectors[] = {
      {{{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {{0xffffffff, 0xffffffff}},
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {{0xa4093822, 0x299f31d0}},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}};
  for (const Vector& vector : vectors) {
    const PhiloxWords words = philox4x32(vector.counter, vector.key);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(words.w[i], vector.words.w[i]);
    }
  }
}

TEST(Philox, CounterHoldsEveryPartOfTheState) {
  const int64_t token[] = {(int64_t{0xAB} << 32) + 0xCD};
  const TokenDraws draws = token_draws({kState, token}, Stream::kNoise, 0);
  EXPECT_EQ(draws.c1, 0xCDu);
  EXPECT_EQ(draws.c2, 77u);
  EXPECT_EQ(draws.c3, 5u << 16 | 2u << 8 | 0xABu);
  EXPECT_EQ(draws.key.k[0], 0x89ABCDEFu);
  EXPECT_EQ(draws.key.k[1], 0x01234567u);
  EXPECT_EQ(token_draws({kState, nullptr}, Stream::kNoise, 3).c1, 1003u);
}

// Box-Muller in float, beside double: some ten roundings of a radius below 6.
TEST(Philox, NormalsMatchDouble) {
  std::mt19937 generator(1);
  double sum = 0, squares = 0;
  constexpr int kPairs = 200000;
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t a = i == 0 ? 0 : i == 1 ? 0xFFFFFFFF : generator(), b = i < 4 ? 0x20000000u * i : generator();
    const NormalPair pair = to_normals(a, b);
    const double radius = std::sqrt(-2 * std::log(((a >> 8) + 1) * 0x1p-24)), angle = b * (2 * M_PI * 0x1p-32);
    ASSERT_NEAR(pair.first, radius * std::cos(angle), 1e-6);
    ASSERT_NEAR(pair.second, radius * std::sin(angle), 1e-6);
    sum += pair.first + pair.second;
    squares += pair.first * pair.first + pair.second * pair.second;
  }
  // Five standard errors.
  EXPECT_NEAR(sum / (2 * kPairs), 0, 5 / std::sqrt(2.0 * kPairs));
  EXPECT_NEAR(squares / (2 * kPairs), 1, 5 * std::sqrt(2 / (2.0 * kPairs)));
}

TEST(Maths, LogAndSoftplusHaveSmallRelativeErrors) {
  for (double x = 0x1p-126; x < 1e38; x *= 1.37) {
    const double expected = std::log(static_cast<double>(static_cast<float>(x)));
    ASSERT_NEAR(log_positive(static_cast<float>(x)), expected, 2e-7 * std::max(1e-3, std::abs(expected))) << x;
  }
  for (double x = -80; x < 100; x += 0.0371) {
    const double wide = static_cast<float>(x), expected = std::log1p(std::exp(wide));
    ASSERT_NEAR(gating::softplus(static_cast<float>(x)), expected, 8e-7 * expected) << x;
    ASSERT_NEAR(gating::softplus(wide), expected, 1e-14 * expected) << x;
  }
}

struct Size {
  int num_experts;
  int top_k;
};

class NoisyLoops : public ::testing::TestWithParam<std::tuple<std::string, Size, int>> {
 protected:
  const Kernels& kernels() const {
    return table(std::get<0>(GetParam()));
  }
  Size size() const {
    return std::get<1>(GetParam());
  }
  int num_tokens() const {
    return std::get<2>(GetParam());
  }
};

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(n);
  for (T& value : values) {
    value = from_acc<T>(normal(generator));
  }
  return values;
}

template <typename T>
std::vector<double> row(const std::vector<T>& values, int64_t t, int n) {
  std::vector<double> out;
  for (int e = 0; e < n; ++e) {
    out.push_back(to_acc(values[t * n + e]));
  }
  return out;
}

// Sums of T and E numbers of order one, in float.
constexpr double kTolerance = 2e-5;

TEST_P(NoisyLoops, UniformsAreTheWords) {
  const int n = size().num_experts;
  std::vector<float> out(num_tokens() * n, 7);
  const RngSource rng{kState, nullptr};
  kernels().uniform(out.data(), n, Stream::kDropPriority, rng, 0, num_tokens());
  for (int t = 0; t < num_tokens(); ++t) {
    for (int c = 0; c < n; ++c) {
      ASSERT_EQ(out[t * n + c], serial::uniform(rng, Stream::kDropPriority, t, c));
    }
  }
}

template <typename T>
void jitter_matches(const Kernels& kernels, int num_tokens, int dim) {
  const auto x = random_values<T>(num_tokens * dim, 1);
  std::vector<T> out(x.size());
  const RngSource rng{kState, nullptr};
  const JitterArgs<T> args{out.data(), x.data(), dim, 0.25, rng};
  kernels.of<T>().jitter(args, 0, num_tokens);
  const double unit = std::is_same_v<T, BFloat16> ? 0x1p-8 : std::is_same_v<T, Half> ? 0x1p-11 : 0x1p-23;
  const double least = std::is_same_v<T, Half> ? 0x1p-24 : 0; // Half's smallest step.
  for (int t = 0; t < num_tokens; ++t) {
    for (int c = 0; c < dim; ++c) {
      const double in = to_acc(x[t * dim + c]), factor = 0.75 + 0.5 * serial::uniform(rng, Stream::kJitter, t, c);
      ASSERT_NEAR(to_acc(out[t * dim + c]), in * factor, 2 * unit * std::abs(in) + least) << t << ", " << c;
    }
  }
}

TEST_P(NoisyLoops, JitterMatches) {
  jitter_matches<float>(kernels(), num_tokens(), size().num_experts);
  jitter_matches<double>(kernels(), num_tokens(), size().num_experts);
  jitter_matches<BFloat16>(kernels(), num_tokens(), size().num_experts);
  jitter_matches<Half>(kernels(), num_tokens(), size().num_experts);
}

int64_t scratch_size(const NoisyOptions& o) {
  return 2 * gating::scratch_size({o.num_experts, o.num_ranked(), 1, 1, gating::ScoreFn::kSoftmax, true, 1.0});
}

template <typename T>
void gshard_matches(const Kernels& kernels, int num_tokens, int n, bool random) {
  using Acc = acc_t<T>;
  const auto x = random_values<T>(num_tokens * n, 2);
  std::vector<Acc> weights(2 * num_tokens), sums(n), scratch(scratch_size({n, 1, 0, 1}));
  std::vector<int64_t> idx(2 * num_tokens), counts(2 * n);
  const RngSource rng{random ? kState : nullptr, nullptr};
  const GShardArgs<T> args{x.data(), nullptr, weights.data(), idx.data(), n, 2.0, rng};
  ASSERT_EQ(kernels.of<T>().gshard(args, 0, num_tokens, sums.data(), counts.data(), scratch.data()), -1);
  std::vector<double> expected_sums(n);
  std::vector<int64_t> expected_counts(2 * n);
  for (int t = 0; t < num_tokens; ++t) {
    const serial::Token token = serial::gshard(row(x, t, n), rng, t);
    for (int k = 0; k < 2; ++k) {
      ASSERT_EQ(idx[2 * t + k], token.idx[k]);
      ASSERT_NEAR(weights[2 * t + k], 2 * token.weights[k], kTolerance);
      if (token.idx[k] >= 0) {
        ++expected_counts[token.idx[k]];
      }
    }
    ++expected_counts[n + token.idx[0]];
    for (int e = 0; e < n; ++e) {
      expected_sums[e] += token.sums[e];
    }
  }
  EXPECT_EQ(counts, expected_counts);
  for (int e = 0; e < n; ++e) {
    ASSERT_NEAR(sums[e], expected_sums[e], kTolerance * (1 + expected_sums[e]));
  }
}

TEST_P(NoisyLoops, GShardMatches) {
  for (bool random : {false, true}) {
    if (size().num_experts > 1) {
      gshard_matches<float>(kernels(), num_tokens(), size().num_experts, random);
      gshard_matches<double>(kernels(), num_tokens(), size().num_experts, random);
      gshard_matches<BFloat16>(kernels(), num_tokens(), size().num_experts, random);
    }
  }
}

template <typename T>
void noisy_matches(const Kernels& kernels, int num_tokens, Size size) {
  using Acc = acc_t<T>;
  const int n = size.num_experts, top_k = size.top_k;
  const auto clean = random_values<T>(num_tokens * n, 2), noise = random_values<T>(num_tokens * n, 3);
  const NoisyOptions options{n, top_k, 0.01, 2.0};
  std::vector<Acc> weights(top_k * num_tokens), sums(2 * n), scratch(scratch_size(options));
  std::vector<int64_t> idx(top_k * num_tokens), counts(n);
  const RngSource rng{kState, nullptr};
  const NoisyArgs<T> args{clean.data(), noise.data(), nullptr, weights.data(), idx.data(), options, rng};
  ASSERT_EQ(kernels.of<T>().noisy(args, 0, num_tokens, sums.data(), counts.data(), scratch.data()), -1);
  std::vector<double> expected(2 * n);
  for (int t = 0; t < num_tokens; ++t) {
    const serial::Token token = serial::noisy(row(clean, t, n), row(noise, t, n), rng, t, top_k, 0.01);
    for (int k = 0; k < top_k; ++k) {
      ASSERT_EQ(idx[top_k * t + k], token.idx[k]) << "token " << t << ", choice " << k;
      ASSERT_NEAR(weights[top_k * t + k], 2 * token.weights[k], kTolerance);
    }
    for (int e = 0; e < n; ++e) {
      expected[e] += token.sums[e];
      expected[n + e] += token.loads[e];
    }
  }
  for (int i = 0; i < 2 * n; ++i) {
    ASSERT_NEAR(sums[i], expected[i], kTolerance * (1 + expected[i]));
  }
}

TEST_P(NoisyLoops, NoisyMatches) {
  noisy_matches<float>(kernels(), num_tokens(), size());
  noisy_matches<double>(kernels(), num_tokens(), size());
  noisy_matches<Half>(kernels(), num_tokens(), size());
}

INSTANTIATE_TEST_SUITE_P(
    Isas, NoisyLoops,
    ::testing::Combine(
        ::testing::ValuesIn(testing::supported_isas()),
        ::testing::Values(Size{1, 1}, Size{2, 2}, Size{7, 3}, Size{16, 2}, Size{65, 8}, Size{64, 64}),
        ::testing::Values(0, 1, 17, 64)),
    [](const auto& info) {
      const Size size = std::get<1>(info.param);
      return std::get<0>(info.param) + "_experts" + std::to_string(size.num_experts) + "_k" +
             std::to_string(size.top_k) + "_tokens" + std::to_string(std::get<2>(info.param));
    });

} // namespace
} // namespace moe_ext::noisy_gating
