// CPU side of the wire format. What a decoder returns is in range and in order whatever bytes it was given.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <tuple>
#include <vector>

#include "common/dispatch.h"
#include "compression/wire.h"

namespace moe_ext::compression::wire {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

constexpr const char* kEncode = "encode_payload";
constexpr const char* kDecode = "decode_payload";

// CRC-32C (Castagnoli), a byte at a time: for debugging.
uint32_t crc32c(uint32_t crc, const uint8_t* bytes, uint64_t size) {
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

uint32_t checksum_of(Header header, const uint8_t* payload) {
  header.checksum = 0;
  const uint32_t crc = crc32c(0, reinterpret_cast<const uint8_t*>(&header), sizeof(header));
  return crc32c(crc, payload + sizeof(header), header.total_bytes - sizeof(header));
}

void check_ascending(const int64_t* indices, int64_t count, int64_t numel) {
  for (int64_t i = 0; i < count; ++i) {
    MOE_CHECK(
        indices[i] >= 0 && indices[i] < numel, kEncode, ": expected indices to be in [0, ", numel, "), got ",
        indices[i], " at ", i);
    MOE_CHECK(
        i == 0 || indices[i - 1] < indices[i], kEncode, ": expected indices to be ascending and all different, got ",
        indices[i], " after ", indices[i - 1], " at ", i);
  }
}

std::vector<uint8_t> encode_bitmap(const int64_t* indices, int64_t count, int64_t numel) {
  std::vector<uint8_t> out(numel / 8 + (numel % 8 != 0));
  for (int64_t i = 0; i < count; ++i) {
    out[indices[i] / 8] |= static_cast<uint8_t>(1 << indices[i] % 8);
  }
  return out;
}

std::vector<uint8_t> encode_u16(const int64_t* indices, int64_t count, int64_t numel) {
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

std::vector<uint8_t> encode_delta(const int64_t* indices, int64_t count) {
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

std::vector<uint8_t> encode_indices(IndexCodec codec, const int64_t* indices, int64_t count, int64_t numel) {
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

void append(uint8_t* payload, uint64_t at, const void* bytes, uint64_t size) {
  if (size > 0) {
    std::memcpy(payload + at, bytes, size);
  }
  std::memset(payload + at + size, 0, aligned(size) - size);
}

Tensor encode_payload_cpu(
    Tensor indices, // [K]
    Tensor codes, Tensor scales, int64_t numel, int64_t count, std::string index_codec, std::string value_codec,
    int64_t value_block, bool checksum) {
  const Codecs codecs =
      check_encode_payload(indices, codes, scales, numel, count, index_codec, value_codec, value_block);
  const Tensor idx = contiguous(indices), values = contiguous(codes), factors = contiguous(scales);
  check_ascending(data<const int64_t>(idx), idx.size(0), numel);
  const std::vector<uint8_t> packed = encode_indices(codecs.index, data<const int64_t>(idx), idx.size(0), numel);
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.index_codec = static_cast<uint8_t>(codecs.index);
  header.value_codec = static_cast<uint8_t>(codecs.value);
  header.flags = checksum ? kHasChecksum : 0;
  header.value_block = static_cast<uint16_t>(value_block);
  header.numel = static_cast<uint64_t>(numel);
  header.count = static_cast<uint64_t>(count);
  header.index_bytes = packed.size();
  header.code_bytes = static_cast<uint64_t>(values.numel());
  header.num_scales = static_cast<uint64_t>(factors.numel());
  const Layout layout = layout_of(header.index_bytes, header.code_bytes, header.num_scales);
  header.total_bytes = layout.end;
  Tensor payload = new_empty(idx, {static_cast<int64_t>(layout.end)}, ScalarType::Byte);
  uint8_t* out = data<uint8_t>(payload);
  append(out, layout.indices, packed.data(), packed.size());
  append(out, layout.codes, values.data_ptr(), header.code_bytes);
  append(out, layout.scales, factors.data_ptr(), 4 * header.num_scales);
  if (checksum) {
    header.checksum = checksum_of(header, out);
  }
  std::memcpy(out, &header, sizeof(header));
  return payload;
}

Header read_header(const char* op, const Tensor& payload) {
  check_payload(op, payload);
  Header header;
  std::memcpy(&header, payload.data_ptr(), sizeof(header));
  check_header(op, header, static_cast<uint64_t>(payload.size(0)));
  const uint32_t sum = (header.flags & kHasChecksum) != 0 ? checksum_of(header, data<const uint8_t>(payload)) : 0;
  MOE_CHECK(
      sum == header.checksum, op, ": expected payload to have the checksum ", header.checksum, " of its header, got ",
      sum);
  return header;
}

[[noreturn]] void refuse_indices(const char* codec, uint64_t at) {
  fail(
      kDecode, ": expected payload to hold as many ", codec,
      " indices as its header says, ascending and in range, got others from value ", at, " on");
}

void decode_bitmap(int64_t* indices, const uint8_t* bytes, const Header& h) {
  uint64_t found = 0;
  for (uint64_t byte = 0; byte < h.index_bytes; ++byte) {
    for (uint32_t bits = bytes[byte]; bits != 0; bits &= bits - 1) {
      const uint64_t index = 8 * byte + std::countr_zero(bits);
      if (found == h.count || index >= h.numel) {
        refuse_indices("bitmap", found);
      }
      indices[found++] = static_cast<int64_t>(index);
    }
  }
  if (found != h.count) {
    refuse_indices("bitmap", found);
  }
}

void decode_u16(int64_t* indices, const uint8_t* bytes, const Header& h) {
  const uint64_t runs = num_runs(h.numel);
  const uint8_t* offsets = bytes + 4 * runs;
  uint64_t found = 0;
  for (uint64_t run = 0; run < runs; ++run) {
    uint32_t count;
    std::memcpy(&count, bytes + 4 * run, sizeof(count));
    if (count > h.count - found) {
      refuse_indices("u16", found);
    }
    for (uint32_t i = 0; i < count; ++i, ++found) {
      uint16_t offset;
      std::memcpy(&offset, offsets + 2 * found, sizeof(offset));
      const uint64_t index = run * kRun + offset;
      if (index >= h.numel || (i > 0 && static_cast<int64_t>(index) <= indices[found - 1])) {
        refuse_indices("u16", found);
      }
      indices[found] = static_cast<int64_t>(index);
    }
  }
  if (found != h.count) {
    refuse_indices("u16", found);
  }
}

void decode_delta(int64_t* indices, const uint8_t* bytes, const Header& h) {
  const uint8_t* end = bytes + h.index_bytes;
  uint64_t next = 0;
  for (uint64_t i = 0; i < h.count; ++i) {
    uint64_t gap = 0;
    bool more = true;
    for (int64_t group = 0; more; ++group) {
      if (bytes == end || group == kLongestGap) {
        refuse_indices("delta", i);
      }
      const uint64_t byte = *bytes++;
      gap |= (byte & 127) << 7 * group;
      more = byte >= 128;
      // A last group of zero would make two encodings of one gap.
      if (!more && byte == 0 && group > 0) {
        refuse_indices("delta", i);
      }
    }
    if (gap >= h.numel || next >= h.numel - gap) {
      refuse_indices("delta", i);
    }
    indices[i] = static_cast<int64_t>(next + gap);
    next += gap + 1;
  }
  if (bytes != end) {
    refuse_indices("delta", h.count);
  }
}

// numel, count, index codec, value codec, elements that share a scale.
Tensor payload_header_cpu(Tensor payload) {
  const Header h = read_header("payload_header", contiguous(payload));
  Tensor out = new_empty(payload, {5}, ScalarType::Long);
  const int64_t fields[5] = {
      static_cast<int64_t>(h.numel), static_cast<int64_t>(h.count), h.index_codec, h.value_codec, h.value_block};
  std::copy(fields, fields + 5, data<int64_t>(out));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> decode_payload_cpu(Tensor payload) {
  const Tensor in = contiguous(payload);
  const Header h = read_header(kDecode, in);
  const uint8_t* bytes = data<const uint8_t>(in);
  const Layout layout = layout_of(h.index_bytes, h.code_bytes, h.num_scales);
  const IndexCodec codec = static_cast<IndexCodec>(h.index_codec);
  const int64_t count = codec == IndexCodec::kDense ? 0 : static_cast<int64_t>(h.count);
  Tensor indices = new_empty(in, {count}, ScalarType::Long);
  if (codec == IndexCodec::kBitmap) {
    decode_bitmap(data<int64_t>(indices), bytes + layout.indices, h);
  } else if (codec == IndexCodec::kU16) {
    decode_u16(data<int64_t>(indices), bytes + layout.indices, h);
  } else if (codec == IndexCodec::kDelta) {
    decode_delta(data<int64_t>(indices), bytes + layout.indices, h);
  }
  Tensor codes = new_empty(in, {static_cast<int64_t>(h.code_bytes)});
  Tensor scales = new_empty(in, {static_cast<int64_t>(h.num_scales)}, ScalarType::Float);
  std::copy_n(bytes + layout.codes, h.code_bytes, data<uint8_t>(codes));
  std::copy_n(bytes + layout.scales, 4 * h.num_scales, reinterpret_cast<uint8_t*>(data<float>(scales)));
  return {indices, codes, scales};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("encode_payload", TORCH_BOX(&encode_payload_cpu));
  m.impl("payload_header", TORCH_BOX(&payload_header_cpu));
  m.impl("decode_payload", TORCH_BOX(&decode_payload_cpu));
}

} // namespace moe_ext::compression::wire
