// The loops over tiles of scores, the merge, and the parts of tiles that masks leave.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention_tables.h"
#include "attention/attention_tiles.h"
#include "isa.h"

namespace moe_ext::attention {

MOE_EXT_TABLES(Kernels)

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// exp and the sums over at most 300 numbers in [0, 1], relative to the largest.
constexpr double kTolerance = 2e-5;

std::vector<float> numbers(int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(n);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

int64_t padded(int64_t cols) {
  return (cols + kLanes - 1) / kLanes * kLanes;
}

// A tile of scores whose columns come in two documents, with its masks in the open.
struct Tile {
  static constexpr int64_t kRows = 5, kDim = 7;
  int64_t cols, stride;
  std::vector<int32_t> q_positions, q_documents, k_positions, k_documents;
  std::vector<float> products;
  TileArgs<float> args;

  Tile(int64_t cols, bool masked, double softcap, double slope, double dropout_p)
      : cols(cols),
        stride(padded(cols) + kLanes),
        k_positions(padded(cols), kMaskedKey),
        k_documents(padded(cols), 0),
        products(numbers(kRows * stride, 1, 2.0f)) {
    for (int64_t row = 0; row < kRows; ++row) {
      q_positions.push_back(static_cast<int32_t>(20 * row));
      q_documents.push_back(masked ? static_cast<int32_t>(row % 2) : 0);
    }
    for (int64_t col = 0; col < cols; ++col) {
      k_positions[col] = static_cast<int32_t>(3 + col);
      k_documents[col] = masked ? static_cast<int32_t>(col / 3 % 2) : 0;
    }
    const Window window = {masked ? 50 : -1, masked ? 8 : -1};
    const Score<float> score = {0.5f, static_cast<float>(softcap), static_cast<float>(slope)};
    args = {
        kRows,
        cols,
        stride,
        score,
        window,
        masked,
        true,
        q_positions.data(),
        q_documents.data(),
        k_positions.data(),
        k_documents.data(),
        k_positions.data(),
        dropout_of(dropout_p, 77),
        2,
        3};
  }

  bool seen(int64_t row, int64_t col) const {
    const int64_t distance = k_positions[col] - q_positions[row];
    return !args.masked || (distance >= -50 && distance <= 8 && q_documents[row] == k_documents[col]);
  }
  double score(int64_t row, int64_t col) const {
    double s = 0.5 * products[row * stride + col];
    if (args.score.softcap != 0) {
      s = std::tanh(s / args.score.softcap) * args.score.softcap;
    }
    s -= args.score.slope * std::abs(static_cast<double>(k_positions[col] - q_positions[row]));
    return seen(row, col) ? s : -kInfinity;
  }
  double keep(int64_t row, int64_t col) const {
    if (args.dropout.threshold == 0) {
      return 1;
    }
    const int64_t state[4] = {77, 3, 2, 0}, token = q_positions[row];
    const TokenDraws draws = token_draws({state, &token}, Stream::kDropout, 0);
    const uint32_t word = draws.words(k_positions[col]).w[k_positions[col] % 4];
    return word >> 8 >= args.dropout.threshold ? args.dropout.inv_keep : 0;
  }
  double lse(int64_t row) const {
    double sum = 0;
    for (int64_t col = 0; col < cols; ++col) {
      sum += std::exp(score(row, col));
    }
    return sum > 0 ? std::log(sum) : -kInfinity;
  }
};

using TileCase = std::tuple<std::string, int64_t, bool, double, double, double>;

class Tiles : public ::testing::TestWithParam<TileCase> {
 protected:
  const Kernels& kernels = table(std::get<0>(GetParam()));
  Tile tile{
      std::get<1>(GetParam()), std::get<2>(GetParam()), std::get<3>(GetParam()), std::get<4>(GetParam()),
      std::get<5>(GetParam())};
};

// The state starts as that of one key with score 0.25 and the value 1 in every column.
TEST_P(Tiles, SoftmaxMovesTheStateOn) {
  std::vector<float> scores = tile.products;
  std::vector<float> max(Tile::kRows, 0.25f), sum(Tile::kRows, 1.0f), out(Tile::kRows * Tile::kDim, 1.0f);
  kernels.f32.softmax(scores.data(), tile.args, {max.data(), sum.data(), out.data(), Tile::kDim});
  for (int64_t row = 0; row < Tile::kRows; ++row) {
    double most = 0.25;
    for (int64_t col = 0; col < tile.cols; ++col) {
      most = std::max(most, tile.score(row, col));
    }
    EXPECT_NEAR(max[row], most, kTolerance);
    EXPECT_NEAR(sum[row], std::exp(0.25 - most) + std::exp(tile.lse(row) - most), kTolerance * tile.cols);
    EXPECT_NEAR(out[row * Tile::kDim], std::exp(0.25 - most), kTolerance);
    for (int64_t col = 0; col < tile.cols; ++col) {
      const double p = std::exp(tile.score(row, col) - most) * tile.keep(row, col);
      ASSERT_NEAR(scores[row * tile.stride + col], p, kTolerance) << row << " " << col;
    }
  }
}

TEST_P(Tiles, BackwardIsTheFormula) {
  std::vector<float> scores = tile.products, grads = numbers(scores.size(), 2);
  const std::vector<float> products = grads, delta = numbers(Tile::kRows, 3);
  std::vector<float> lse;
  for (int64_t row = 0; row < Tile::kRows; ++row) {
    lse.push_back(static_cast<float>(tile.lse(row)));
  }
  kernels.f32.backward(scores.data(), grads.data(), tile.args, lse.data(), delta.data());
  for (int64_t row = 0; row < Tile::kRows; ++row) {
    for (int64_t col = 0; col < tile.cols; ++col) {
      const int64_t i = row * tile.stride + col;
      const double p = tile.seen(row, col) ? std::exp(tile.score(row, col) - tile.lse(row)) : 0;
      double ds = p * (products[i] * tile.keep(row, col) - delta[row]) * 0.5;
      if (tile.args.score.softcap != 0) {
        const double t = std::tanh(0.5 * tile.products[i] / tile.args.score.softcap);
        ds *= 1 - t * t;
      }
      ASSERT_NEAR(scores[i], p * tile.keep(row, col), kTolerance);
      ASSERT_NEAR(grads[i], ds, kTolerance);
    }
  }
}

std::string tile_case_name(const ::testing::TestParamInfo<TileCase>& info) {
  const auto& [isa, cols, masked, softcap, slope, dropout_p] = info.param;
  return isa + "_cols" + std::to_string(cols) + (masked ? "_masked" : "") + (softcap > 0 ? "_softcap" : "") +
         (slope > 0 ? "_alibi" : "") + (dropout_p > 0 ? "_dropout" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Isas, Tiles,
    ::testing::Combine(
        ::testing::ValuesIn(testing::supported_isas()), ::testing::Values(1, 15, 16, 17, 255, 256, 257),
        ::testing::Bool(), ::testing::Values(0.0, 1.5), ::testing::Values(0.0, 0.125), ::testing::Values(0.0, 0.25)),
    tile_case_name);

class Rows : public ::testing::TestWithParam<std::string> {
 protected:
  const Kernels& kernels = table(GetParam());
};

// One key at a time, in any order: the same words as for neighbours.
TEST_P(Rows, DropoutOfScatteredKeys) {
  Tile tile(37, false, 0, 0, 0.5);
  std::vector<float> neighbours = tile.products, scattered = tile.products;
  std::vector<float> max(Tile::kRows, 0), sum(Tile::kRows, 0), out(Tile::kRows * Tile::kDim, 0);
  std::vector<float> max2 = max, sum2 = sum, out2 = out;
  kernels.f32.softmax(neighbours.data(), tile.args, {max.data(), sum.data(), out.data(), Tile::kDim});
  tile.args.consecutive = false;
  kernels.f32.softmax(scattered.data(), tile.args, {max2.data(), sum2.data(), out2.data(), Tile::kDim});
  EXPECT_EQ(neighbours, scattered);
}

TEST_P(Rows, FinishOfNothingAndOfSomething) {
  std::vector<double> out = {1, 2, 3, 4}, max = {-kInfinity, 5}, sum = {0, 2}, lse(2);
  kernels.f64.finish(lse.data(), {max.data(), sum.data(), out.data(), 2}, 2);
  EXPECT_EQ(lse, (std::vector<double>{-kInfinity, 5 + std::log(2.0)}));
  EXPECT_EQ(out, (std::vector<double>{0, 0, 1.5, 2}));
}

TEST_P(Rows, MergeOfEveryKindOfEmptyRow) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> a = {1, nan, 1, nan}, b = {3, 3, nan, nan};
  const std::vector<double> lse_a = {0, -kInfinity, 2, kInfinity}, lse_b = {0, 1, kInfinity, -kInfinity};
  std::vector<double> out(4), lse(4);
  kernels.merge.f64.merge(out.data(), lse.data(), {a.data(), b.data(), lse_a.data(), lse_b.data(), 1}, 0, 4);
  EXPECT_EQ(out, (std::vector<double>{2, 3, 1, 0}));
  EXPECT_EQ(lse, (std::vector<double>{std::log(2.0), 1, 2, -kInfinity}));
}

INSTANTIATE_TEST_SUITE_P(Isas, Rows, ::testing::ValuesIn(testing::supported_isas()), [](const auto& info) {
  return info.param;
});

TEST(Tanh, IsCloseForAnyMagnitude) {
  for (float x = 1e-6f; x < 100.0f; x *= 1.01f) {
    ASSERT_NEAR(tanh_acc(x) / std::tanh(static_cast<double>(x)), 1.0, 3e-7) << x;
    ASSERT_EQ(tanh_acc(-x), -tanh_acc(x));
  }
  EXPECT_EQ(tanh_acc(0.0f), 0.0f);
  EXPECT_TRUE(std::isnan(tanh_acc(std::nanf(""))));
}

// What visible_tile cuts off may hold nothing that is seen, and `masked` is false only where all is seen.
TEST(VisibleTile, AgreesWithEveryPair) {
  std::mt19937 random(5);
  const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % below); };
  int num_cut = 0, num_full = 0;
  for (int repeat = 0; repeat < 2000; ++repeat) {
    Tokens queries, keys;
    const bool sorted = repeat % 2 == 0;
    for (Tokens* tokens : {&queries, &keys}) {
      const int32_t n = 1 + draw(12), begin = draw(20);
      for (int32_t i = 0; i < n; ++i) {
        const int32_t position = sorted ? begin + i : draw(40);
        tokens->positions.push_back(position);
        tokens->documents.push_back(repeat % 3 == 0 ? position / 8 : 0);
      }
    }
    bool mask[16];
    for (bool& key : mask) {
      key = draw(4) > 0;
    }
    const bool* key_mask = repeat % 5 == 0 ? mask : nullptr;
    const Window window = {draw(3) == 0 ? -1 : draw(20), draw(3) == 0 ? -1 : draw(20)};
    const VisibleTile tile = visible_tile(
        queries, keys, key_mask, window, {0, queries.size(), 0, keys.size(), true},
        extent_of(queries, 0, queries.size()), extent_of(keys, 0, keys.size()));
    for (int64_t row = 0; row < queries.size(); ++row) {
      for (int64_t col = 0; col < keys.size(); ++col) {
        const bool seen = visible_positions(queries.positions[row], window).has(keys.positions[col]) &&
                          queries.documents[row] == keys.documents[col] && (key_mask == nullptr || key_mask[col]);
        const bool inside =
            !tile.empty() && row >= tile.row_begin && row < tile.row_end && col >= tile.col_begin && col < tile.col_end;
        ASSERT_TRUE(inside || !seen) << repeat;
        ASSERT_TRUE(!inside || tile.masked || seen) << repeat;
        num_cut += !inside;
        num_full += inside && !tile.masked;
      }
    }
  }
  EXPECT_GT(num_cut, 0);
  EXPECT_GT(num_full, 0);
}

} // namespace
} // namespace moe_ext::attention
