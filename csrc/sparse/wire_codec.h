// Encoders and decoders of indices, and checks of header and checksum, of the wire format. Whatever the bytes, a
// decoder does not read past their end, and decoded indices are in range and ascending. Host code, torch-free.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "sparse/wire_format.h"

namespace moe_ext::wire {

constexpr const char* kIndexNames[kNumIndexCodecs] = {"dense", "bitmap", "u16", "delta"};
constexpr uint64_t kMostElements = uint64_t{1} << 62;
constexpr int64_t kDecoded = -1;

inline bool is_block(uint64_t block) {
  return block >= 64 && block <= 1024 && (block & (block - 1)) == 0;
}

// True if the bytes of the indices fit the codec; only bounds for kDelta, whose size depends on the indices.
inline bool index_bytes_fit(const Header& h) {
  switch (static_cast<IndexCodec>(h.index_codec)) {
    case IndexCodec::kDense:
      return h.index_bytes == 0 && h.count == h.numel;
    case IndexCodec::kBitmap:
      return h.index_bytes == h.numel / 8 + (h.numel % 8 != 0);
    case IndexCodec::kU16:
      return h.index_bytes == 4 * num_runs(h.numel) + 2 * h.count;
    default:
      return h.index_bytes >= h.count && h.index_bytes <= kLongestGap * h.count;
  }
}

// True if the header describes a payload of `size` bytes.
inline bool is_consistent(const Header& h, uint64_t size) {
  const ValueCodec codec = static_cast<ValueCodec>(h.value_codec);
  // The order matters: each bound keeps the sums and products of the following conditions from wrapping around.
  return h.numel <= kMostElements && h.count <= h.numel && h.count / 8 <= size && h.index_bytes <= size &&
         (has_scales(codec) ? is_block(h.value_block) : h.value_block == 0) &&
         h.code_bytes == code_bytes(codec, h.count) && h.num_scales == num_scales(codec, h.count, h.value_block) &&
         index_bytes_fit(h) && layout_of(h.index_bytes, h.code_bytes, h.num_scales).end == size &&
         ((h.flags & kHasChecksum) != 0 || h.checksum == 0);
}

// CRC-32C (Castagnoli), one byte at a time. Checksums are meant for debugging, so speed does not matter.
inline uint32_t crc32c(uint32_t crc, const uint8_t* bytes, uint64_t size) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) {
        value = (value >> 1) ^ ((value & 1) != 0 ? 0x82F63B78u : 0u);
      }
      made[i] = value;
    }
    return made;
  }();
  crc = ~crc;
  for (uint64_t i = 0; i < size; ++i) {
    crc = table[(crc ^ bytes[i]) & 0xFF] ^ (crc >> 8);
  }
  return ~crc;
}

inline uint32_t checksum_of(Header header, const uint8_t* payload) {
  header.checksum = 0;
  const uint32_t crc = crc32c(0, reinterpret_cast<const uint8_t*>(&header), sizeof(header));
  return crc32c(crc, payload + sizeof(header), header.total_bytes - sizeof(header));
}

inline std::vector<uint8_t> encode_bitmap(const int64_t* indices, int64_t count, int64_t numel) {
  std::vector<uint8_t> out(numel / 8 + (numel % 8 != 0));
  for (int64_t i = 0; i < count; ++i) {
    out[indices[i] / 8] |= static_cast<uint8_t>(1 << indices[i] % 8);
  }
  return out;
}

inline std::vector<uint8_t> encode_u16(const int64_t* indices, int64_t count, int64_t numel) {
  const int64_t runs = static_cast<int64_t>(num_runs(numel));
  std::vector<uint32_t> counts(runs);
  std::vector<uint8_t> out(4 * runs + 2 * count);
  for (int64_t i = 0; i < count; ++i) {
    ++counts[indices[i] / kRun];
    const uint16_t offset = static_cast<uint16_t>(indices[i] % kRun);
    std::memcpy(out.data() + 4 * runs + 2 * i, &offset, sizeof(offset));
  }
  if (runs > 0) {
    std::memcpy(out.data(), counts.data(), 4 * runs);
  }
  return out;
}

inline std::vector<uint8_t> encode_delta(const int64_t* indices, int64_t count) {
  std::vector<uint8_t> out;
  out.reserve(2 * count);
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t gap = static_cast<uint64_t>(indices[i] - last - 1);
    for (; gap >= 128; gap >>= 7) {
      out.push_back(static_cast<uint8_t>(gap | 128));
    }
    out.push_back(static_cast<uint8_t>(gap));
    last = indices[i];
  }
  return out;
}

inline std::vector<uint8_t> encode_indices(IndexCodec codec, const int64_t* indices, int64_t count, int64_t numel) {
  switch (codec) {
    case IndexCodec::kBitmap:
      return encode_bitmap(indices, count, numel);
    case IndexCodec::kU16:
      return encode_u16(indices, count, numel);
    case IndexCodec::kDelta:
      return encode_delta(indices, count);
    default:
      return {};
  }
}

inline int64_t decode_bitmap(int64_t* indices, const uint8_t* bytes, const Header& h) {
  uint64_t found = 0;
  for (uint64_t byte = 0; byte < h.index_bytes; ++byte) {
    for (uint32_t bits = bytes[byte]; bits != 0; bits &= bits - 1) {
      const uint64_t index = 8 * byte + std::countr_zero(bits);
      if (found == h.count || index >= h.numel) {
        return static_cast<int64_t>(found);
      }
      indices[found++] = static_cast<int64_t>(index);
    }
  }
  if (found != h.count) {
    return static_cast<int64_t>(found);
  }
  return kDecoded;
}

inline int64_t decode_u16(int64_t* indices, const uint8_t* bytes, const Header& h) {
  const uint64_t runs = num_runs(h.numel);
  const uint8_t* offsets = bytes + 4 * runs;
  uint64_t found = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    uint32_t count;
    std::memcpy(&count, bytes + 4 * run, sizeof(count));
    if (count > h.count - found) {
      return static_cast<int64_t>(found);
    }
    for (uint32_t i = 0; i < count; ++i, ++found) {
      uint16_t offset;
      std::memcpy(&offset, offsets + 2 * found, sizeof(offset));
      const uint64_t index = run * kRun + offset;
      if (index >= h.numel || (i > 0 && static_cast<int64_t>(index) <= indices[found - 1])) {
        return static_cast<int64_t>(found);
      }
      indices[found] = static_cast<int64_t>(index);
    }
  }
  if (found != h.count) {
    return static_cast<int64_t>(found);
  }
  return kDecoded;
}

inline int64_t decode_delta(int64_t* indices, const uint8_t* bytes, const Header& h) {
  const uint8_t* end = bytes + h.index_bytes;
  uint64_t next = 0;
  for (uint64_t i = 0; i < h.count; ++i) {
    uint64_t gap = 0;
    bool more = true;
    for (int64_t group = 0; more; ++group) {
      if (bytes == end || group == kLongestGap) {
        return static_cast<int64_t>(i);
      }
      const uint64_t byte = *bytes++;
      gap |= (byte & 127) << 7 * group;
      more = byte >= 128;
      // A last group of zero is refused: it would be a second encoding of the same gap.
      if (!more && byte == 0 && group > 0) {
        return static_cast<int64_t>(i);
      }
    }
    if (gap >= h.numel || next >= h.numel - gap) {
      return static_cast<int64_t>(i);
    }
    indices[i] = static_cast<int64_t>(next + gap);
    next += gap + 1;
  }
  if (bytes != end) {
    return static_cast<int64_t>(h.count);
  }
  return kDecoded;
}

// Writes h.count indices, none for dense. Returns kDecoded, or the number of the first value whose index is wrong.
inline int64_t decode_indices(int64_t* indices, const uint8_t* bytes, const Header& h) {
  switch (static_cast<IndexCodec>(h.index_codec)) {
    case IndexCodec::kBitmap:
      return decode_bitmap(indices, bytes, h);
    case IndexCodec::kU16:
      return decode_u16(indices, bytes, h);
    case IndexCodec::kDelta:
      return decode_delta(indices, bytes, h);
    default:
      return kDecoded;
  }
}

} // namespace moe_ext::wire
