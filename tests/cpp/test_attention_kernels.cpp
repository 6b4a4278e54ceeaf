// The kernels of block attention, emulated, against the formula in double, under every schedule.
#include <gtest/gtest.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_kernels.cuh"
#include "attention/backward_kernels.cuh"
#include "attention/merge_kernels.cuh"
#include "attention/tensor_kernels.cuh"
#include "schedules.h"

namespace moe_ext::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kHeads = 2;
constexpr int64_t kSeed = (int64_t{1} << 40) + 7;

struct Case {
  std::string name;
  int num_queries, num_keys, dim, dim_v;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  bool documents = false, key_mask = false;
  double softcap = 0, dropout_p = 0;
  bool alibi = false, shuffled = false;
  int key_heads = 1;
  int padding = 0; // unused elements between rows, which then may be unaligned
};

// [heads, rows, dim] with `padding` elements after each row.
template <typename T>
struct Matrices {
  int64_t rows, dim, stride;
  std::vector<T> values;

  Matrices(int64_t heads, int64_t rows_in, int64_t dim_in, int padding, int seed)
      : rows(rows_in), dim(dim_in), stride(dim_in + padding), values(random_values<T>(heads * rows * stride, seed)) {
  }
  double at(int64_t h, int64_t row, int64_t col) const {
    return static_cast<double>(static_cast<acc_t<T>>(values[(h * rows + row) * stride + col]));
  }
  Heads<T> view() const {
    return {values.data(), 0, rows * stride, stride, rows, static_cast<int>(dim), stride % 4 == 0};
  }
};

// One sequence of kHeads heads.
template <typename T>
struct Problem {
  using Acc = acc_t<T>;
  Case c;
  Matrices<T> q, k, v;
  Matrices<Acc> grad_out;
  std::vector<int64_t> q_positions, k_positions, q_documents, k_documents, seed = {kSeed};
  std::vector<Acc> slopes = {Acc(0.25), Acc(0.0625)}, delta;
  std::vector<char> mask;
  std::vector<TokenTile> q_tiles, k_tiles;
  BlockParams<T> params;

  explicit Problem(const Case& given)
      : c(given),
        q(kHeads, c.num_queries, c.dim, c.padding, 1),
        k(c.key_heads, c.num_keys, c.dim, c.padding, 2),
        v(c.key_heads, c.num_keys, c.dim_v, c.padding, 3),
        grad_out(kHeads, c.num_queries, c.dim_v, c.padding, 4),
        delta(random_values<Acc>(kHeads * c.num_queries, 5)),
        mask(c.num_keys, 1) {
    std::mt19937 generator(6);
    for (int i = 0; i < c.num_queries; ++i) {
      q_positions.push_back(i + c.num_keys / 2);
    }
    for (int j = 0; j < c.num_keys; ++j) {
      k_positions.push_back(j);
      mask[j] = !c.key_mask || generator() % 4 != 0;
    }
    if (c.shuffled) {
      std::shuffle(q_positions.begin(), q_positions.end(), generator);
      std::shuffle(k_positions.begin(), k_positions.end(), generator);
    }
    const auto document = [&](int64_t position) { return position * 4 / (c.num_keys + 1) - 1; };
    std::transform(q_positions.begin(), q_positions.end(), std::back_inserter(q_documents), document);
    std::transform(k_positions.begin(), k_positions.end(), std::back_inserter(k_documents), document);
    describe();
  }

  void describe() {
    q_tiles.resize(ceil_div(c.num_queries, kTile));
    k_tiles.resize(ceil_div(c.num_keys, kTile));
    const Dropout dropout = c.dropout_p > 0 ? dropout_of(c.dropout_p, 0) : Dropout{0, 0, 1.0};
    params = {
        q.view(),
        k.view(),
        v.view(),
        {q_tiles.data(), static_cast<int>(q_tiles.size()), 1},
        {k_tiles.data(), static_cast<int>(k_tiles.size()), 1},
        c.alibi ? slopes.data() : nullptr,
        seed.data(),
        Acc(0.25),
        static_cast<Acc>(c.softcap),
        effective_window(c.causal, c.window_left, c.window_right),
        dropout.threshold,
        static_cast<Acc>(dropout.inv_keep),
        1,
        kHeads,
        c.key_heads,
        3,
        5};
    const int64_t* no_documents = nullptr;
    launch_describe_tokens<true>(
        {q_positions.data(), c.documents ? q_documents.data() : no_documents, nullptr, c.num_queries}, params.queries,
        {k_positions.data(), c.documents ? k_documents.data() : no_documents,
         c.key_mask ? reinterpret_cast<const bool*>(mask.data()) : nullptr, c.num_keys},
        params.keys, nullptr);
  }

  int64_t key_head(int64_t h) const {
    return h / (kHeads / c.key_heads);
  }
  bool seen(int64_t i, int64_t j) const {
    const int64_t distance = k_positions[j] - q_positions[i];
    return mask[j] != 0 && (!c.causal || distance <= 0) && (c.window_left < 0 || distance >= -c.window_left) &&
           (c.window_right < 0 || distance <= c.window_right) && (!c.documents || q_documents[i] == k_documents[j]);
  }
  double keep(int64_t h, int64_t i, int64_t j) const {
    if (c.dropout_p == 0) {
      return 1;
    }
    const int64_t state[4] = {kSeed, h + 5, 3, 0}, token = q_positions[i], column = k_positions[j];
    const uint32_t word = token_draws({state, &token}, Stream::kDropout, 0).words(column).w[column % 4];
    return word >> 8 >= params.threshold ? 1 / (1 - c.dropout_p) : 0;
  }
};

struct Exact {
  std::vector<double> out, lse, grad_q, grad_k, grad_v;

  template <typename T>
  explicit Exact(const Problem<T>& p)
      : out(kHeads * p.c.num_queries * p.c.dim_v),
        lse(kHeads * p.c.num_queries, -kInfinity),
        grad_q(kHeads * p.c.num_queries * p.c.dim),
        grad_k(p.c.key_heads * p.c.num_keys * p.c.dim),
        grad_v(p.c.key_heads * p.c.num_keys * p.c.dim_v) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < p.c.num_queries; ++i) {
        add_row(p, h, i);
      }
    }
  }

  template <typename T>
  void add_row(const Problem<T>& p, int64_t h, int64_t i) {
    const int64_t keys = p.c.num_keys, dim = p.c.dim, dim_v = p.c.dim_v, g = p.key_head(h);
    const int64_t row = h * p.c.num_queries + i;
    std::vector<double> s(keys, -kInfinity), slope_of_cap(keys, 1);
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double product = 0;
      for (int64_t d = 0; d < dim; ++d) {
        product += p.q.at(h, i, d) * p.k.at(g, j, d);
      }
      s[j] = product * 0.25;
      if (p.c.softcap != 0) {
        slope_of_cap[j] = 1 - std::pow(std::tanh(s[j] / p.c.softcap), 2);
        s[j] = p.c.softcap * std::tanh(s[j] / p.c.softcap);
      }
      if (p.c.alibi) {
        s[j] -= static_cast<double>(p.slopes[h]) * std::abs(p.k_positions[j] - p.q_positions[i]);
      }
      s[j] = p.seen(i, j) ? s[j] : -kInfinity;
      sum += std::exp(s[j]);
    }
    lse[row] = sum > 0 ? std::log(sum) : -kInfinity;
    for (int64_t j = 0; j < keys; ++j) {
      const double weight = sum > 0 ? std::exp(s[j] - lse[row]) : 0, keep = p.keep(h, i, j);
      double grad = 0;
      for (int64_t d = 0; d < dim_v; ++d) {
        out[row * dim_v + d] += weight * keep * p.v.at(g, j, d);
        grad += p.grad_out.at(h, i, d) * p.v.at(g, j, d);
        grad_v[(g * keys + j) * dim_v + d] += weight * keep * p.grad_out.at(h, i, d);
      }
      const double ds = weight * (grad * keep - static_cast<double>(p.delta[row])) * 0.25 * slope_of_cap[j];
      for (int64_t d = 0; d < dim; ++d) {
        grad_q[row * dim + d] += ds * p.k.at(g, j, d);
        grad_k[(g * keys + j) * dim + d] += ds * p.q.at(h, i, d);
      }
    }
  }
};

// Sums of up to 200 products, and a softmax of scores of up to about 10.
template <typename Acc>
void expect_near(const std::vector<Acc>& actual, const std::vector<double>& exact, const char* what) {
  double largest = 1;
  for (double x : exact) {
    largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
  }
  const double bound = largest * (sizeof(Acc) == 8 ? 1e-13 : 1e-5);
  for (size_t i = 0; i < exact.size(); ++i) {
    if (std::isinf(exact[i])) {
      ASSERT_EQ(static_cast<double>(actual[i]), exact[i]) << what << " " << i;
    } else {
      ASSERT_NEAR(static_cast<double>(actual[i]), exact[i], bound) << what << " " << i;
    }
  }
}

class Block : public simt::ScheduleTest<Case> {
 protected:
  template <typename T, typename Launch>
  void attends(const Launch& launch) {
    using Acc = acc_t<T>;
    const Problem<T> p(param());
    const Exact exact(p);
    std::vector<Acc> out(exact.out.size(), Acc(NAN)), lse(exact.lse.size(), Acc(NAN));
    const bool aligned = p.c.dim_v % 4 == 0;
    launch(p.params, {out.data(), lse.data(), nullptr, p.c.dim_v, aligned}, nullptr);
    expect_near(out, exact.out, "out");
    expect_near(lse, exact.lse, "lse");
    // Added to itself: twice every exponential.
    const std::vector<Acc> before = lse;
    std::vector<double> twice = exact.lse;
    std::for_each(twice.begin(), twice.end(), [](double& x) { x += std::log(2.0); });
    launch(p.params, {out.data(), lse.data(), before.data(), p.c.dim_v, aligned}, nullptr);
    expect_near(out, exact.out, "out of a state");
    expect_near(lse, twice, "lse of a state");
  }

  template <typename T, typename Launch>
  void gives_gradients(const Launch& launch) {
    using Acc = acc_t<T>;
    const Problem<T> p(param());
    const Exact exact(p);
    const std::vector<Acc> lse(exact.lse.begin(), exact.lse.end());
    std::vector<Acc> grad_q(exact.grad_q.size(), Acc(NAN)), grad_k(exact.grad_k.size(), Acc(NAN));
    std::vector<Acc> grad_v(exact.grad_v.size(), Acc(NAN));
    launch(
        p.params, {p.grad_out.view(), lse.data(), p.delta.data(), grad_q.data(), grad_k.data(), grad_v.data()},
        nullptr);
    expect_near(grad_q, exact.grad_q, "grad_q");
    expect_near(grad_k, exact.grad_k, "grad_k");
    expect_near(grad_v, exact.grad_v, "grad_v");
  }
};

TEST_P(Block, Attends) {
  attends<float>(launch_forward<float>);
}

TEST_P(Block, GivesGradients) {
  gives_gradients<float>(launch_backward<float>);
}

std::vector<Case> block_cases() {
  std::vector<Case> cases = {
      {"one", 1, 1, 1, 1},      {"no_keys", 5, 0, 8, 8}, {"no_queries", 0, 5, 8, 8}, {"no_dims", 3, 4, 0, 0},
      {"tile", 64, 64, 32, 64}, {"odd", 65, 63, 33, 31}, {"wide", 33, 70, 20, 130},  {"widest", 5, 9, 136, 4},
  };
  Case causal = {"causal", 70, 129, 20, 12, true};
  cases.push_back(causal);
  cases.push_back({"window", 70, 129, 20, 12, false, 30, 7});
  cases.push_back({"documents", 70, 129, 20, 12, true, -1, -1, true});
  cases.push_back({"key_mask", 20, 70, 20, 12, false, -1, -1, false, true});
  cases.push_back({"softcap", 20, 70, 20, 12, false, -1, -1, false, false, 1.5});
  cases.push_back({"dropout", 20, 70, 20, 12, false, -1, -1, false, false, 0, 0.3});
  Case all = {"all", 70, 129, 20, 12, true, 100, -1, true, true, 2.5, 0.1, true};
  all.padding = 4;
  cases.push_back(all);
  all.name = "shuffled_unaligned";
  all.shuffled = true;
  all.key_heads = 2;
  all.padding = 1;
  cases.push_back(all);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, Block, simt::under_all_schedules(block_cases()), [](const auto& info) {
  return simt::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
});

class BlockOfEachType : public Block {};

TEST_P(BlockOfEachType, Attends) {
  attends<double>(launch_forward<double>);
  attends<c10::BFloat16>(launch_forward<c10::BFloat16>);
  attends<c10::Half>(launch_forward<c10::Half>);
}

TEST_P(BlockOfEachType, GivesGradients) {
  gives_gradients<double>(launch_backward<double>);
  gives_gradients<c10::BFloat16>(launch_backward<c10::BFloat16>);
  gives_gradients<c10::Half>(launch_backward<c10::Half>);
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, BlockOfEachType,
    simt::under_all_schedules(
        std::vector<Case>{{"aligned", 20, 70, 36, 72, true}, {"odd", 20, 70, 5, 7, true, 3, -1, true, false, 2.0}}),
    [](const auto& info) { return simt::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name; });

// Weights and gradients of scores go into products as two bfloat16, which lose up to 2^-16 of each, or 1.5e-5. The
// losses of a sum average out: results are held to the 1e-5 of the largest that float32 is.
class TensorBlock : public Block {};

TEST_P(TensorBlock, Attends) {
  attends<c10::BFloat16>(launch_tensor_forward<c10::BFloat16>);
  attends<c10::Half>(launch_tensor_forward<c10::Half>);
}

TEST_P(TensorBlock, GivesGradients) {
  gives_gradients<c10::BFloat16>(launch_tensor_backward<c10::BFloat16>);
}

std::vector<Case> tensor_cases() {
  std::vector<Case> cases = {
      {"one", 1, 1, 8, 8},
      {"no_keys", 5, 0, 8, 8},
      {"no_queries", 0, 5, 8, 8},
      {"tile", 64, 64, 32, 64},
      {"odd", 65, 63, 40, 24},
      {"widest", 33, 70, 128, 128, true},
      {"window", 70, 129, 16, 24, false, 30, 7},
  };
  Case all = {"all", 70, 129, 24, 16, true, 100, -1, true, true, 2.5, 0.1, true};
  all.padding = 8;
  cases.push_back(all);
  all.name = "shuffled";
  all.shuffled = true;
  all.key_heads = 2;
  cases.push_back(all);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Schedules, TensorBlock, simt::under_all_schedules(tensor_cases()), [](const auto& info) {
  return simt::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
});

// More columns than a block of threads keeps, and the widest queries.
class WideTensorBlock : public Block {};

TEST_P(WideTensorBlock, Attends) {
  attends<c10::BFloat16>(launch_tensor_forward<c10::BFloat16>);
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, WideTensorBlock,
    simt::under_all_schedules(
        std::vector<Case>{
            {"wide", 33, 70, 256, 72},
            {"chunks", 20, 70, 24, 200, true},
            // The last tiles of one look at the keys, and the first of the next.
            {"looks_twice", 1, 2 * kTile * kTensorThreads, 8, 8, false, 100, 100}}),
    [](const auto& info) { return simt::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name; });

TEST(TensorBlock, TakesWhatItsKernelsDo) {
  const Problem<c10::BFloat16> wide({"", 3, 4, 256, 136}), wider({"", 3, 4, 264, 8}), odd({"", 3, 4, 12, 8});
  EXPECT_TRUE(tensor_forward_takes(wide.params));
  EXPECT_FALSE(tensor_backward_takes(wide.params));
  EXPECT_FALSE(tensor_forward_takes(wider.params));
  EXPECT_FALSE(tensor_forward_takes(odd.params));
  const Problem<c10::Half> half({"", 3, 4, 8, 8});
  EXPECT_TRUE(tensor_forward_takes(half.params));
  EXPECT_FALSE(tensor_backward_takes(half.params));
  EXPECT_FALSE(tensor_forward_takes(Problem<float>({"", 3, 4, 8, 8}).params));
}

TEST(Tokens, TrapPositionsOutOfRange) {
  for (int64_t bad : {int64_t{-1}, kMostPositions}) {
    const std::vector<int64_t> good = {0}, positions = {bad};
    TokenTile tile;
    const TokenTiles tiles = {&tile, 1, 1};
    const TokenSource of_good = {good.data(), nullptr, nullptr, 1}, of_bad = {positions.data(), nullptr, nullptr, 1};
    EXPECT_THROW(launch_describe_tokens<true>(of_bad, tiles, of_good, tiles, nullptr), simt::Error);
    EXPECT_THROW(launch_describe_tokens<true>(of_good, tiles, of_bad, tiles, nullptr), simt::Error);
    launch_describe_tokens<false>(of_bad, tiles, of_good, tiles, nullptr);
  }
}

// More tiles than a block of threads looks at in one go; the query sees the key at its own position alone, the last or
// the first of a tile. A sum over another tile's values would be NaN. One query fills no warp, nor do keys of which few
// are unmasked.
TEST(Tokens, HiddenTilesAreNotComputed) {
  for (int64_t position : {64 * 299 + 63, 64 * 3}) {
    Case c = {"sparse", 1, 64 * 300, 4, 4};
    c.window_left = c.window_right = 0;
    c.key_mask = true;
    Problem<float> p(c);
    p.q_positions = {position};
    for (int64_t row = 0; row < c.num_keys; ++row) {
      p.mask[row] = row % 64 == position % 64;
      if (row / 64 != position / 64) {
        std::fill_n(&p.v.values[row * p.v.stride], 4, NAN);
      }
    }
    p.describe();
    std::vector<float> out(kHeads * 4), lse(kHeads);
    launch_forward(p.params, {out.data(), lse.data(), nullptr, 4, true}, nullptr);
    for (int64_t i = 0; i < kHeads * 4; ++i) {
      EXPECT_EQ(out[i], p.v.at(0, position, i % 4)) << position << " " << i;
    }
  }
}

class Merge : public simt::ScheduleTest<int> {
 protected:
  // Rows 0 to 4 have keys in both, b, a, neither by one convention and by the other.
  template <typename Acc>
  static std::vector<Acc> lse_of(bool first) {
    const Acc none = -std::numeric_limits<Acc>::infinity();
    return first ? std::vector<Acc>{Acc(0.5), none, Acc(2), none, -none}
                 : std::vector<Acc>{Acc(-1), Acc(3), -none, none, none};
  }

  // Two batches of three heads, with gaps between rows of the state: each of them as `expected`, which has a's rows.
  template <typename T, typename Acc>
  static void merges_in_place(
      const std::vector<Acc>& expected, const std::vector<Acc>& expected_lse, const std::vector<T>& b, int64_t dim) {
    const int64_t rows = 5, heads = 6, stride = dim + 4, gap = 2;
    const auto a = random_values<T>(rows * dim, 1);
    const auto lse_a = lse_of<Acc>(true), lse_b = lse_of<Acc>(false);
    std::vector<Acc> out(heads * rows * stride, 7), lse(heads * rows * gap, 7);
    for (int64_t row = 0; row < heads * rows; ++row) {
      lse[row * gap] = lse_a[row % rows];
      for (int64_t i = 0; i < dim; ++i) {
        out[row * stride + i] = static_cast<Acc>(a[row % rows * dim + i]);
      }
    }
    const MergeIntoArgs<T> args = {
        out.data(),
        lse.data(),
        b.data(),
        lse_b.data(),
        {3 * rows * stride, rows * stride, stride},
        {3 * rows * gap, rows * gap, gap},
        {0, 0, dim},
        {0, 0, 1},
        2,
        3,
        rows,
        dim};
    launch_merge_into(args, nullptr);
    for (int64_t row = 0; row < heads * rows; ++row) {
      ASSERT_EQ(lse[row * gap], expected_lse[row % rows]) << row;
      ASSERT_EQ(lse[row * gap + 1], Acc(7));
      for (int64_t i = 0; i < stride; ++i) {
        ASSERT_EQ(out[row * stride + i], i < dim ? expected[row % rows * dim + i] : Acc(7)) << row << " " << i;
      }
    }
  }

  template <typename T>
  void merges(bool with_b) {
    using Acc = acc_t<T>;
    const int64_t dim = param(), rows = 5;
    const auto a = random_values<T>(rows * dim, 1), b = random_values<T>(rows * dim, 2);
    const auto lse_a = lse_of<Acc>(true), lse_b = lse_of<Acc>(false);
    const auto grad = random_values<Acc>(rows * dim, 3), grad_lse = random_values<Acc>(rows, 4);
    const MergeArgs<T> args = {a.data(), with_b ? b.data() : nullptr, lse_a.data(), lse_b.data(), dim};
    std::vector<Acc> out(rows * dim, 7), lse(rows, 7), grad_lse_a(rows, 7), grad_lse_b(rows, 7);
    std::vector<T> grad_a(rows * dim, T(7)), grad_b(rows * dim, T(7));
    launch_merge(args, rows, out.data(), lse.data(), nullptr);
    launch_merge_backward(
        {grad.data(), grad_lse.data(), grad_a.data(), with_b ? grad_b.data() : nullptr, grad_lse_a.data(),
         grad_lse_b.data()},
        args, rows, nullptr);
    if (with_b) {
      merges_in_place(out, lse, b, dim);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const double ea = std::isinf(lse_a[row]) ? 0 : std::exp(lse_a[row]);
      const double eb = std::isinf(lse_b[row]) ? 0 : std::exp(lse_b[row]), sum = ea + eb;
      const double wa = sum > 0 ? ea / sum : 0, wb = sum > 0 ? eb / sum : 0;
      double product = 0;
      for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
        const double x = static_cast<Acc>(a[i]), y = with_b ? static_cast<Acc>(b[i]) : Acc(0);
        product += grad[i] * (x - y);
        ASSERT_NEAR(out[i], wa * x + wb * y, 1e-6) << i;
        ASSERT_NEAR(static_cast<Acc>(grad_a[i]), wa * grad[i], 2e-2) << i;
        ASSERT_NEAR(static_cast<Acc>(grad_b[i]), with_b ? wb * grad[i] : 7, 2e-2) << i;
      }
      if (sum > 0) {
        ASSERT_NEAR(lse[row], std::log(sum), 1e-6);
      } else {
        ASSERT_EQ(lse[row], -std::numeric_limits<Acc>::infinity());
      }
      ASSERT_NEAR(grad_lse_a[row], wa * grad_lse[row] + wa * wb * product, 1e-5 * (1 + dim));
      ASSERT_NEAR(grad_lse_b[row], wb * grad_lse[row] - wa * wb * product, 1e-5 * (1 + dim));
    }
  }
};

TEST_P(Merge, IsTheFormula) {
  for (bool with_b : {true, false}) {
    merges<float>(with_b);
    merges<double>(with_b);
    merges<c10::BFloat16>(with_b);
    merges<c10::Half>(with_b);
  }
}

TEST_P(Merge, DeltaIsTheDotProduct) {
  const int64_t dim = param(), rows = 70;
  const auto a = random_values<float>(rows * dim, 1), b = random_values<float>(rows * dim, 2);
  const auto grad_lse = random_values<float>(rows, 3);
  for (const float* of_lse : {static_cast<const float*>(nullptr), grad_lse.data()}) {
    std::vector<float> delta(rows, 7);
    launch_delta(a.data(), b.data(), of_lse, rows, dim, delta.data(), nullptr);
    for (int64_t row = 0; row < rows; ++row) {
      double sum = of_lse != nullptr ? -of_lse[row] : 0;
      for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
        sum += double{a[i]} * b[i];
      }
      ASSERT_NEAR(delta[row], sum, 1e-6 * (4 + dim)) << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, Merge, simt::under_all_schedules(std::vector<int>{0, 1, 3, 4, 64, 127, 128, 257}), [](const auto& info) {
      return simt::to_string(std::get<0>(info.param)) + "_dim" + std::to_string(std::get<1>(info.param));
    });

} // namespace
} // namespace moe_ext::attention
