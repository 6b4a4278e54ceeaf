// The CUDA kernels of coding exponents, emulated, against the loops of the CPU, under every schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "exponent/exponent_kernels.cuh"
#include "schedules.h"

namespace moe_ext::exponent {

// Defined in test_exponent_decoder.cpp.
namespace sanitized {
extern const Kernels kernel_table;
}

namespace {

// Elements of a normal distribution to a power, whose exponents differ the more the higher it is; random bits for 0.
struct Case {
  int n;
  int power;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.n << " to the power of " << c.power;
}

template <typename Bits>
std::vector<Bits> elements(Case c) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  std::vector<Bits> x(c.n);
  for (Bits& bits : x) {
    const uint32_t wide = c.power == 0 ? static_cast<uint32_t>(generator())
                                       : simt::bits<uint32_t>(std::pow(normal(generator), static_cast<float>(c.power)));
    bits = static_cast<Bits>(wide >> (32 - 8 * sizeof(Bits)));
  }
  return x;
}

class Exponents : public simt::ScheduleTest<Case> {};

template <typename Parts, Kind kKindOf>
void check(Case c) {
  using Bits = typename Parts::Bits;
  const std::vector<Bits> x = elements<Bits>(c);
  const int64_t numel = c.n, blocks = ceil_div(numel, kBlock);
  constexpr int64_t kStrideOf = kBlockHeader + kBlock * static_cast<int64_t>(sizeof(Bits));
  std::vector<uint8_t> coded(blocks * kStrideOf, 0xA5), block(kStrideOf);
  std::vector<int64_t> starts(blocks + 1);
  launch(
      over_element_blocks(blocks, nullptr), encode_blocks_kernel<Parts>, x.data(), numel, kStrideOf, coded.data(),
      starts.data());
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t n = std::min(kBlock, numel - i * kBlock);
    const int64_t size = sanitized::kernel_table.encode[kKindOf](block.data(), x.data() + i * kBlock, n);
    ASSERT_EQ(starts[i], size);
    ASSERT_TRUE(std::equal(block.begin(), block.begin() + size, coded.begin() + i * kStrideOf)) << i;
  }
  launch_scan_counts(starts.data(), 1, blocks, starts.data() + blocks, nullptr);
  const int64_t head = kHeader + ceil_div(blocks, 2) * 8;
  std::vector<uint8_t> payload(head + starts.back());
  int64_t num_bytes = 0;
  launch(
      over_element_blocks(blocks, nullptr), move_blocks_kernel, coded.data(), kStrideOf, starts.data(), blocks,
      Header{kMagic, kKindOf, static_cast<uint64_t>(numel)}, head, payload.data(), &num_bytes);
  EXPECT_EQ(num_bytes, static_cast<int64_t>(payload.size()));
  unsigned long long wrong = 99;
  // A head of another number of elements has no sizes.
  for (const int64_t other : {int64_t{1}, int64_t{0}}) {
    std::vector<int64_t> read(blocks + 1, 7);
    const Header expected{kMagic, kKindOf, static_cast<uint64_t>(numel + other)};
    launch(over_threads(blocks, nullptr), read_head_kernel, payload.data(), blocks, expected, read.data(), &wrong);
    EXPECT_EQ(wrong, other == 0 ? 99u : 0u);
    launch_scan_counts(read.data(), 1, blocks, read.data() + blocks, nullptr);
    EXPECT_EQ(read, other == 0 ? starts : std::vector<int64_t>(blocks + 1, 0));
    wrong = 99;
  }
  for (int64_t& start : starts) {
    start += head;
  }
  std::vector<Bits> out(c.n);
  const auto decode = [&] {
    launch(
        over_element_blocks(blocks, nullptr), decode_blocks_kernel<Parts>, out.data(), numel, payload.data(),
        starts.data(), &wrong);
  };
  decode();
  EXPECT_EQ(wrong, 99u);
  EXPECT_EQ(out, x);
  // The last block is not read where it goes past the end, which AddressSanitizer would see.
  const std::vector<int64_t> whole = starts;
  const std::vector<uint8_t> cut(payload.begin(), payload.end() - 8);
  launch(over_threads(blocks + 1, nullptr), clip_starts_kernel, starts.data(), blocks, num_bytes - 8);
  launch(
      over_element_blocks(blocks, nullptr), decode_blocks_kernel<Parts>, out.data(), numel, cut.data(), starts.data(),
      &wrong);
  EXPECT_EQ(wrong, static_cast<unsigned long long>(blocks == 0 ? 99 : blocks - 1));
  starts = whole;
  // Any bytes in the place of a plan, symbols, planes and escapes.
  std::mt19937 generator(3);
  for (int turn = 0; turn < 6; ++turn) {
    payload[head + generator() % (turn % 2 == 0 ? 1 : payload.size() - head)] = static_cast<uint8_t>(generator());
    const int64_t n = std::min(kBlock, numel);
    std::vector<Bits> wanted(n);
    wrong = 99;
    decode();
    if (sanitized::kernel_table.decode[kKindOf](wanted.data(), payload.data() + head, starts[1] - head, n)) {
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), out.begin()));
    } else {
      EXPECT_EQ(wrong, 0u);
    }
  }
}

TEST_P(Exponents, AreCodedAsOnTheCpuAndComeBack) {
  check<BFloat16Parts, kBFloat16>(param());
  check<HalfParts, kHalf>(param());
  check<FloatParts, kFloat>(param());
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Exponents,
    simt::under_all_schedules<Case>({{1, 1}, {63, 1}, {65, 3}, {1000, 0}, {1001, 5}, {8192, 1}, {8257, 9}}));

} // namespace
} // namespace moe_ext::exponent
