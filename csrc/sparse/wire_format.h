// The wire format, version 1: a header of 64 bytes, then indices, value codes and scales. Each part begins at a
// multiple of 16 bytes. Little-endian. Torch-free.
#pragma once

#include <bit>
#include <cstdint>

#include "common/host_device.h"

namespace moe_ext::wire {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian");

enum class IndexCodec : int64_t {
  kDense = 0,  // no indices: every element has a value
  kBitmap = 1, // one bit per element, the first in the lowest bit
  kU16 = 2,    // uint32 counts of each run of 65536 elements, then uint16 offsets within the run
  kDelta = 3,  // difference to the previous index minus one, in groups of seven bits, the lowest first
};
constexpr int64_t kNumIndexCodecs = 4;

enum class ValueCodec : int64_t { kFp32 = 0, kBf16 = 1, kFp8 = 2, kInt8 = 3, kInt4 = 4, kSign = 5 };
constexpr int64_t kNumValueCodecs = 6;

constexpr uint16_t kMagic = 0x584D; // "MX"
constexpr uint8_t kVersion = 1;
constexpr uint8_t kHasChecksum = 1;
constexpr int64_t kRun = 65536;
constexpr int64_t kLongestGap = 9; // most bytes of a gap, as gaps are below 2^63

struct Header {
  uint16_t magic;
  uint8_t version;
  uint8_t index_codec;
  uint8_t value_codec;
  uint8_t flags;
  uint16_t value_block; // elements that share a scale; 0 for values without scales
  uint64_t numel;
  uint64_t count;
  uint64_t index_bytes;
  uint64_t code_bytes;
  uint64_t num_scales;
  uint64_t total_bytes;
  uint32_t checksum; // CRC-32C of the payload with these four bytes zero; 0 if there is none
  uint32_t reserved;
};
static_assert(sizeof(Header) == 64);

MOE_HD constexpr uint64_t aligned(uint64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

MOE_HD constexpr bool has_scales(ValueCodec codec) {
  return codec >= ValueCodec::kFp8;
}

MOE_HD constexpr uint64_t code_bytes(ValueCodec codec, uint64_t count) {
  switch (codec) {
    case ValueCodec::kFp32:
      return 4 * count;
    case ValueCodec::kBf16:
      return 2 * count;
    case ValueCodec::kInt4:
      return count / 2 + count % 2;
    case ValueCodec::kSign:
      return count / 8 + (count % 8 != 0);
    default:
      return count;
  }
}

MOE_HD constexpr uint64_t num_scales(ValueCodec codec, uint64_t count, uint64_t block) {
  return has_scales(codec) ? ceil_div(count, block) : 0;
}

MOE_HD constexpr uint64_t num_runs(uint64_t numel) {
  return numel / kRun + (numel % kRun != 0);
}

// Offsets of the parts of a payload in bytes.
struct Layout {
  uint64_t indices, codes, scales, end;
};

MOE_HD constexpr Layout layout_of(uint64_t index_bytes, uint64_t code_bytes, uint64_t num_scales) {
  const uint64_t indices = sizeof(Header), codes = indices + aligned(index_bytes);
  const uint64_t scales = codes + aligned(code_bytes);
  return {indices, codes, scales, scales + aligned(4 * num_scales)};
}

} // namespace moe_ext::wire
