// Format of the payload of a delta, on the host and on a device. Torch-free.
//
// A payload is a sequence of chunks of kChunk elements, of which the last may be shorter. Each chunk has
//   u32 count      number of elements that changed
//   u32 num_gaps   number of entries of the list of gaps
//   u8  wide       1 if an entry has two bytes, 0 if it has one
//   u8[3]          zero
//   gaps           num_gaps entries: each is the number of unchanged elements in a row before a changed element. The
//                  largest number that an entry holds stands for as many unchanged elements and no changed one.
//   values         count elements, in the order of their places
// and nothing else. The list of gaps has the width that takes fewer bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace moe_ext::delta {

constexpr int64_t kChunk = int64_t{1} << 18; // elements
constexpr int64_t kHeader = 12;              // bytes

MOE_HD int64_t num_chunks(int64_t numel) {
  return ceil_div(numel, kChunk);
}

struct Header {
  uint32_t count, num_gaps;
  uint8_t wide, zeros[3];
};
static_assert(sizeof(Header) == kHeader);

// The entry of the list of gaps that stands for unchanged elements only.
MOE_HD constexpr uint32_t skip_entry(bool wide) {
  return wide ? 0xFFFFu : 0xFFu;
}

// Hash of one element at a place: the finaliser of SplitMix64 on both (Steele et al., Fast Splittable Pseudorandom
// Number Generators, OOPSLA 2014). The hash of a tensor is the sum over its elements, so that an update needs only the
// changed elements.
MOE_HD uint64_t hash_of(uint64_t seed, uint64_t place, uint64_t bits) {
  uint64_t z = seed + place * 0x9E3779B97F4A7C15u + (bits + 1) * 0xD1B54A32D192ED03u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// One chunk of a payload. Its parts lie inside the payload.
struct Chunk {
  const uint8_t* gaps;
  const uint8_t* values;
  uint32_t count, num_gaps;
  bool wide;

  // Calls f(place in the chunk, address of the value) for each change, in order.
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

// Defects of a payload.
enum Fault : int64_t { kSound = 0, kEnds = 1, kNoHeader = 2, kTooLong = 3, kPlaces = 4 };

struct Verdict {
  int64_t fault = kSound;
  int64_t number = 0; // the faulty chunk, or the number of surplus bytes
};

// Calls found(i, chunk) for each chunk of a payload for numel elements, up to the first fault. Checks lengths, but not
// places.
template <typename F>
MOE_HD Verdict for_each_chunk(const uint8_t* bytes, int64_t size, int64_t numel, int64_t item_bytes, F&& found) {
  int64_t at = 0;
  for (int64_t i = 0; i < num_chunks(numel); ++i) {
    if (size - at < kHeader) {
      return {kEnds, i};
    }
    Header header;
    memcpy(&header, bytes + at, kHeader);
    at += kHeader;
    if (header.wide > 1 || header.zeros[0] != 0 || header.zeros[1] != 0 || header.zeros[2] != 0 ||
        header.count > kChunk || header.num_gaps < header.count) {
      return {kNoHeader, i};
    }
    const int64_t gap_bytes = int64_t{header.num_gaps} * (1 + header.wide), value_bytes = header.count * item_bytes;
    if (size - at < gap_bytes + value_bytes) {
      return {kEnds, i};
    }
    found(i, Chunk{bytes + at, bytes + at + gap_bytes, header.count, header.num_gaps, header.wide != 0});
    at += gap_bytes + value_bytes;
  }
  return at == size ? Verdict{} : Verdict{kTooLong, size - at};
}

} // namespace moe_ext::delta
