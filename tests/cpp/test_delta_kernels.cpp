// The CUDA kernels of deltas, emulated, against a serial writer and reader, under every schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "delta/delta_kernels.cuh"
#include "schedules.h"

namespace moe_ext::delta {
namespace {

// Places that changed: random ones, one in `one_in`, of the stretch that begins at `from`.
struct Case {
  int64_t numel;
  unsigned one_in;
  int64_t from;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "one in " << c.one_in << " from " << c.from << " of " << c.numel;
}

using Bytes = std::vector<uint8_t>;

// As csrc/delta/delta_format.h has it, an element at a time.
Bytes written(const std::vector<uint16_t>& x, const std::vector<uint16_t>& base) {
  const int64_t numel = static_cast<int64_t>(x.size());
  Bytes payload;
  for (int64_t start = 0; start < numel; start += kChunk) {
    Bytes lists[2], values;
    uint32_t count = 0;
    int64_t next = start;
    for (int64_t i = start; i < std::min(numel, start + kChunk); ++i) {
      if (x[i] == base[i]) {
        continue;
      }
      for (const bool wide : {false, true}) {
        const auto put = [&](int64_t entry) {
          lists[wide].push_back(static_cast<uint8_t>(entry));
          if (wide) {
            lists[wide].push_back(static_cast<uint8_t>(entry >> 8));
          }
        };
        int64_t gap = i - next;
        for (; gap >= skip_entry(wide); gap -= skip_entry(wide)) {
          put(skip_entry(wide));
        }
        put(gap);
      }
      values.push_back(static_cast<uint8_t>(x[i]));
      values.push_back(static_cast<uint8_t>(x[i] >> 8));
      ++count;
      next = i + 1;
    }
    const bool wide = lists[1].size() < lists[0].size();
    const Header header{
        count, static_cast<uint32_t>(lists[wide].size() / (1 + wide)), static_cast<uint8_t>(wide), {0, 0, 0}};
    const auto* bytes = reinterpret_cast<const uint8_t*>(&header);
    payload.insert(payload.end(), bytes, bytes + kHeader);
    payload.insert(payload.end(), lists[wide].begin(), lists[wide].end());
    payload.insert(payload.end(), values.begin(), values.end());
  }
  return payload;
}

struct Versions {
  std::vector<uint16_t> x, base;
};

Versions versions(Case c) {
  std::mt19937 generator(7);
  Versions made{std::vector<uint16_t>(c.numel), {}};
  std::generate(made.x.begin(), made.x.end(), [&] { return static_cast<uint16_t>(generator()); });
  made.base = made.x;
  for (int64_t i = c.from; i < c.numel; ++i) {
    made.base[i] ^= static_cast<uint16_t>(generator() % c.one_in == 0);
  }
  return made;
}

class Deltas : public simt::ScheduleTest<Case> {};

TEST_P(Deltas, AreThoseOfASerialWriterAndComeBack) {
  const auto [x, base] = versions(param());
  const int64_t numel = param().numel;
  std::vector<uint32_t> changed(num_segments(numel) * kThreads, 5);
  std::vector<Segment> segments(num_segments(numel));
  std::vector<Header> headers(num_chunks(numel));
  std::vector<int64_t> starts(num_chunks(numel) + 1);
  const Draft draft{changed.data(), segments.data(), headers.data(), starts.data()};
  launch_compare(x.data(), base.data(), numel, draft.changed, nullptr);
  launch_plan(draft, numel, 2, nullptr);
  Bytes payload(starts.back(), 0xA5);
  launch_write<uint16_t>(draft, numel, NewValues<uint16_t>{x.data(), nullptr}, payload.data(), nullptr);
  ASSERT_EQ(payload, written(x, base));

  std::vector<int64_t> places;
  std::vector<uint16_t> values;
  for (int64_t i = 0; i < numel; ++i) {
    if (x[i] != base[i]) {
      places.push_back(i);
      values.push_back(x[i]);
    }
  }
  const int64_t count = static_cast<int64_t>(places.size());
  unsigned long long wrong = 1'000'000;
  std::fill(changed.begin(), changed.end(), 0);
  launch(over_threads(count, nullptr), mark_places_kernel, places.data(), count, numel, draft.changed, &wrong);
  EXPECT_EQ(wrong, 1'000'000u);
  launch_plan(draft, numel, 2, nullptr);
  std::fill(payload.begin(), payload.end(), 0xA5);
  launch_write<uint16_t>(
      draft, numel, GivenValues<uint16_t>{values.data(), places.data(), count}, payload.data(), nullptr);
  ASSERT_EQ(payload, written(x, base));

  Verdict verdict;
  wrong = 0;
  std::vector<Chunk> chunks(num_chunks(numel));
  launch_read(
      payload.data(), static_cast<int64_t>(payload.size()), numel, 2, {&verdict, &wrong, chunks.data(), starts.data()},
      nullptr);
  ASSERT_EQ(verdict.fault, kSound);
  ASSERT_EQ(wrong, 0u);
  std::vector<uint16_t> target = base;
  launch(over_blocks(num_chunks(numel), nullptr), apply_kernel<uint16_t>, target.data(), numel, chunks.data(), false);
  EXPECT_EQ(target, x);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Deltas,
    simt::under_all_schedules<Case>(
        {{1, 1, 0}, {257, 2, 0}, {8193, 1, 0}, {20000, 300, 0}, {100000, 9000, 8000}, {kChunk + 70, 1, kChunk - 3}}));

// Bytes from elsewhere: found wrong, or read within bounds, which AddressSanitizer guards.
TEST(Deltas, ThatAreDamagedAreTold) {
  const Case c{9000, 20, 0};
  const auto [x, base] = versions(c);
  const Bytes sound = written(x, base);
  std::mt19937 generator(3);
  int refused = 0;
  for (int turn = 0; turn < 40; ++turn) {
    Bytes payload = sound;
    if (turn % 2 == 0) {
      payload.resize(generator() % sound.size());
    } else {
      // Headers half of the time.
      payload[generator() % (turn % 4 == 1 ? kHeader : sound.size())] = static_cast<uint8_t>(generator());
    }
    Verdict verdict;
    unsigned long long wrong = 0;
    Chunk chunk{};
    int64_t starts[2];
    launch_read(
        payload.data(), static_cast<int64_t>(payload.size()), c.numel, 2, {&verdict, &wrong, &chunk, starts}, nullptr);
    if (verdict.fault != kSound || wrong != 0) {
      ++refused;
      continue;
    }
    std::vector<uint16_t> target = base;
    launch(over_blocks(1, nullptr), apply_kernel<uint16_t>, target.data(), c.numel, &chunk, true);
  }
  EXPECT_GE(refused, 25);
}

} // namespace
} // namespace moe_ext::delta
