// Deltas of tensors: the argument checks, the format of a payload, and the loops that both ends share.
//
// A payload is a sequence of chunks of kChunk elements, the last one shorter, each
//   u32 count      elements that changed
//   u32 num_gaps   entries of the list of gaps
//   u8  wide       1 where an entry has two bytes, else it has one
//   u8[3]          zero
//   gaps           num_gaps entries: as many elements in a row that did not change, before one that did; the largest
//                  number that an entry holds stands for as many that did not change and none that did
//   values         count elements, in the order of their places
// and nothing else. The list is written by whichever width takes fewer bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "common/check.h"

namespace moe_ext::delta {

constexpr int64_t kChunk = int64_t{1} << 18; // elements
constexpr int64_t kHeader = 12;              // bytes

inline int64_t num_chunks(int64_t numel) {
  return (numel + kChunk - 1) / kChunk;
}

struct Header {
  uint32_t count, num_gaps;
  uint8_t wide, zeros[3];
};
static_assert(sizeof(Header) == kHeader);

// Hash of one element at a place: the finaliser of SplitMix64 on both (Steele et al., Fast Splittable Pseudorandom
// Number Generators, OOPSLA 2014). The hash of a tensor is the sum over its elements, so that a change costs what it
// changes.
inline uint64_t hash_of(uint64_t seed, uint64_t place, uint64_t bits) {
  uint64_t z = seed + place * 0x9E3779B97F4A7C15u + (bits + 1) * 0xD1B54A32D192ED03u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// One chunk of a payload, whose parts have been checked against each other and against its `num_elements`.
struct Chunk {
  const uint8_t* gaps;
  const uint8_t* values;
  uint32_t count, num_gaps;
  bool wide;

  // Calls f(place in the chunk, address of the value), in order.
  template <typename F>
  void for_each(int64_t item_bytes, F&& f) const {
    wide ? each<uint16_t>(item_bytes, f) : each<uint8_t>(item_bytes, f);
  }

  template <typename Entry, typename F>
  void each(int64_t item_bytes, F&& f) const {
    constexpr int64_t kSkip = static_cast<Entry>(-1);
    const uint8_t* value = values;
    int64_t place = 0;
    for (uint32_t i = 0; i < num_gaps; ++i) {
      Entry gap;
      std::memcpy(&gap, gaps + i * sizeof(Entry), sizeof(Entry));
      place += gap;
      if (gap != kSkip) {
        f(place++, value);
        value += item_bytes;
      }
    }
  }
};

void check_encode(const Tensor& x, const Tensor& base);
void check_apply(const char* op, const Tensor& target, const Tensor& payload);
void check_hash(const Tensor& x, const std::optional<Tensor>& places);
void check_pack(const Tensor& places, const Tensor& values, int64_t numel);
void check_unpack(const Tensor& payload, const Tensor& like, int64_t numel);

} // namespace moe_ext::delta
