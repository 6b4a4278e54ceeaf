// The decoder of coded exponents on damaged and truncated blocks, under AddressSanitizer and
// UndefinedBehaviorSanitizer: blocks and results lie in memory of exactly their size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

// The loops themselves: other test programs have them without sanitizers.
#define MOE_ISA sanitized
#include "exponent/exponent_simd.cpp"

namespace moe_ext::exponent {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kItems[kNumKinds] = {2, 2, 4};

Bytes encoded(Kind kind, const Bytes& elements, int64_t n) {
  Bytes block(kBlockHeader + (elements.size() + 7) / 8 * 8);
  block.resize(sanitized::kernel_table.encode[kind](block.data(), elements.data(), n));
  return block;
}

// From memory of exactly the block's size into memory of exactly the elements'.
bool decode(Kind kind, const Bytes& block, int64_t n, Bytes* result) {
  const std::unique_ptr<uint8_t[]> src(new uint8_t[block.size()]);
  std::copy(block.begin(), block.end(), src.get());
  const std::unique_ptr<uint8_t[]> out(new uint8_t[n * kItems[kind]]);
  const bool decoded =
      sanitized::kernel_table.decode[kind](out.get(), src.get(), static_cast<int64_t>(block.size()), n);
  if (decoded) {
    result->assign(out.get(), out.get() + n * kItems[kind]);
  }
  return decoded;
}

// Exponents of one value, of a few, and of all that there are.
Bytes elements_of(Kind kind, int64_t n, int spread, std::mt19937& generator) {
  Bytes bytes(n * kItems[kind]);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool high = (i + 1) % kItems[kind] == 0;
    bytes[i] = static_cast<uint8_t>(high ? 60 + generator() % spread : generator());
  }
  return bytes;
}

TEST(ExponentDecoder, RefusesOrStaysWithinBounds) {
  std::mt19937 generator(0);
  int64_t refused = 0, decoded = 0;
  for (const Kind kind : {kBFloat16, kHalf, kFloat}) {
    for (const int64_t n : {1, 63, 64, 65, 1000, 8192}) {
      for (const int spread : {1, 6, 190}) {
        const Bytes elements = elements_of(kind, n, spread, generator);
        const Bytes block = encoded(kind, elements, n);
        Bytes found;
        ASSERT_TRUE(decode(kind, block, n, &found));
        ASSERT_EQ(found, elements);
        for (int turn = 0; turn < 60; ++turn) {
          Bytes wrong = block;
          const size_t end = turn % 3 == 0 ? kBlockHeader : wrong.size();
          for (int changes = 0; changes < 1 + turn % 4; ++changes) {
            wrong[generator() % end] = turn % 5 == 0 ? 0xFF : static_cast<uint8_t>(generator());
          }
          if (turn % 4 == 3) {
            wrong.resize(generator() % wrong.size());
          }
          ++(decode(kind, wrong, n, &found) ? decoded : refused);
        }
      }
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(decoded, 500);
}

} // namespace
} // namespace moe_ext::exponent
