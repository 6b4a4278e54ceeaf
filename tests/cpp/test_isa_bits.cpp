// The loops of every instruction set that this processor has give the bits of the portable ones.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "activation/activation_tables.h"
#include "attention/attention_tables.h"
#include "gating/gating_tables.h"
#include "isa.h"
#include "permutation/permutation_tables.h"

namespace moe_ext {

namespace activation {
MOE_EXT_TABLES(Kernels)
} // namespace activation
namespace attention {
MOE_EXT_TABLES(Kernels)
} // namespace attention
namespace gating {
MOE_EXT_TABLES(Kernels)
} // namespace gating
namespace permutation {
MOE_EXT_TABLES(Kernels)
} // namespace permutation

namespace {

// The bytes of everything that a variant made, one array after the other.
class Bits {
 public:
  template <typename T>
  void add(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const char*>(values.data());
    bytes_.insert(bytes_.end(), bytes, bytes + values.size() * sizeof(T));
  }
  template <typename T>
  void add(T value) {
    add(std::vector<T>{value});
  }
  friend bool operator==(const Bits&, const Bits&) = default;

 private:
  std::vector<char> bytes_;
};

template <typename Make>
void expect_the_same(Make&& make) {
  const Bits expected = make("portable");
  for (const std::string& isa : testing::supported_isas()) {
    EXPECT_TRUE(make(isa) == expected) << isa;
  }
}

template <typename T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::vector<T> values;
  for (float value : testing::random_floats(n, seed)) {
    values.push_back(from_acc<T>(3 * value));
  }
  return values;
}

template <typename T>
struct IsaBits : ::testing::Test {};
using Types = ::testing::Types<float, double, BFloat16, Half>;
TYPED_TEST_SUITE(IsaBits, Types, );

TYPED_TEST(IsaBits, Gating) {
  using namespace gating;
  using Acc = acc_t<TypeParam>;
  constexpr int64_t kTokens = 256, kExperts = 37, kTopK = 5;
  const auto logits = random_values<TypeParam>(kTokens * kExperts, 1);
  const auto grad_weights = random_values<Acc>(kTokens * kTopK, 2), grad_sum = random_values<Acc>(kExperts, 3);
  for (ScoreFn fn : {ScoreFn::kSoftmax, ScoreFn::kSigmoid, ScoreFn::kSqrtSoftplus}) {
    for (bool renormalize : {false, true}) {
      const GateOptions options{kExperts, kTopK, 1, 1, fn, renormalize, 2.5};
      expect_the_same([&](const std::string& isa) {
        const auto& kernels = table(isa).of<TypeParam>();
        std::vector<Acc> weights(kTokens * kTopK), score_sum(kExperts), scratch(scratch_size(options));
        std::vector<int64_t> idx(kTokens * kTopK), counts(kExperts);
        kernels.gate(
            {logits.data(), nullptr, nullptr, weights.data(), idx.data(), options}, 0, kTokens, score_sum.data(),
            counts.data(), scratch.data());
        std::vector<TypeParam> grad(logits.size());
        kernels.gate_backward(
            {grad.data(), logits.data(), idx.data(), grad_weights.data(), grad_sum.data(), options}, 0, kTokens,
            scratch.data());
        Bits bits;
        bits.add(weights);
        bits.add(idx);
        bits.add(score_sum);
        bits.add(grad);
        return bits;
      });
    }
  }
  expect_the_same([&](const std::string& isa) {
    const auto& kernels = table(isa).of<TypeParam>();
    std::vector<Acc> scratch(scratch_size(z_loss_options(kExperts)));
    std::vector<TypeParam> grad(logits.size());
    const ZLossArgs<TypeParam> args{logits.data(), nullptr, kExperts};
    Bits bits;
    bits.add(kernels.z_loss(args, 0, kTokens, scratch.data()));
    kernels.z_loss_backward(args, grad.data(), Acc(0.3), 0, kTokens, scratch.data());
    bits.add(grad);
    return bits;
  });
}

TYPED_TEST(IsaBits, Activation) {
  using namespace activation;
  using Acc = acc_t<TypeParam>;
  constexpr int64_t kDim = 1037;
  const auto x = random_values<TypeParam>(2 * kDim, 1), grad = random_values<TypeParam>(kDim, 2);
  for (Kind kind : {Kind::kSilu, Kind::kGelu, Kind::kGeluTanh, Kind::kRelu, Kind::kReluSquared}) {
    for (Layout layout : {Layout::kConcatenated, Layout::kInterleaved}) {
      expect_the_same([&](const std::string& isa) {
        const auto& loops = table(isa).of<TypeParam>();
        std::vector<TypeParam> out(kDim), grad_x(2 * kDim), of_one(kDim);
        Bits bits;
        loops.gated(kind, layout, out.data(), x.data(), Acc(0.7), kDim, kDim);
        bits.add(loops.gated_backward_weighted(kind, layout, grad_x.data(), grad.data(), x.data(), Acc(0.7), kDim));
        loops.activation_backward(kind, of_one.data(), grad.data(), x.data(), kDim);
        bits.add(out);
        bits.add(grad_x);
        bits.add(of_one);
        return bits;
      });
    }
  }
}

TYPED_TEST(IsaBits, Permutation) {
  using Acc = acc_t<TypeParam>;
  constexpr int64_t kDim = 333;
  const auto rows = random_values<TypeParam>(3 * kDim, 1);
  const std::vector<Acc> weights{Acc(0.3), Acc(0.1), Acc(0.6)};
  const std::vector<int64_t> row_idx{2, 0, 1};
  expect_the_same([&](const std::string& isa) {
    const auto& kernels = permutation::table(isa).of<TypeParam>();
    std::vector<TypeParam> sum(kDim), scaled(kDim);
    kernels.combine(sum.data(), rows.data(), row_idx.data(), nullptr, weights.data(), 3, kDim, false);
    Bits bits;
    bits.add(kernels.scale_dot(scaled.data(), rows.data(), rows.data() + kDim, nullptr, weights[0], kDim, false));
    bits.add(sum);
    bits.add(scaled);
    return bits;
  });
}

TEST(IsaBits, Attention) {
  using namespace attention;
  constexpr int64_t kRows = 3, kCols = 45, kStride = 48, kDim = 19;
  const std::vector<int32_t> q_positions{10, 30, 60}, documents(kStride, 0);
  std::vector<int32_t> k_positions(kStride, kMaskedKey);
  for (int64_t col = 0; col < kCols; ++col) {
    k_positions[col] = static_cast<int32_t>(col);
  }
  for (float softcap : {0.0f, 5.0f}) {
    for (float slope : {0.0f, 0.25f}) {
      const TileArgs<float> args{
          kRows,
          kCols,
          kStride,
          {0.125f, softcap, slope},
          {-1, 0},
          true,
          true,
          q_positions.data(),
          documents.data(),
          k_positions.data(),
          documents.data(),
          k_positions.data(),
          dropout_of(0.1, 7),
          0,
          0};
      expect_the_same([&](const std::string& isa) {
        const auto& kernels = table(isa).block<float>();
        auto scores = testing::random_floats(kRows * kStride, 1), grads = testing::random_floats(kRows * kStride, 2);
        auto again = scores, out = testing::random_floats(kRows * kDim, 3), other = out;
        std::vector<float> most(kRows, -kInf), sum(kRows), lse(kRows), delta(kRows);
        const RowState<float> state{most.data(), sum.data(), out.data(), kDim};
        kernels.softmax(scores.data(), args, state);
        kernels.finish(lse.data(), state, kRows);
        kernels.delta(delta.data(), out.data(), other.data(), nullptr, kRows, kDim);
        kernels.backward(again.data(), grads.data(), args, lse.data(), delta.data());
        std::vector<float> merged(kRows * kDim), merged_lse(kRows);
        table(isa).merge.of<float>().merge(
            merged.data(), merged_lse.data(), {out.data(), other.data(), lse.data(), delta.data(), kDim}, 0, kRows);
        Bits bits;
        for (const auto& values : {scores, again, grads, out, lse, delta, merged, merged_lse}) {
          bits.add(values);
        }
        return bits;
      });
    }
  }
}

} // namespace
} // namespace moe_ext
