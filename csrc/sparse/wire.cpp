#include "sparse/wire.h"

#include <algorithm>

#include "common/library.h"
#include "sparse/wire_codec.h"

namespace moe_ext::wire {

MOE_EXT_SCHEMAS(m) {
  m.def(
      "_encode_payload(Tensor indices, Tensor codes, Tensor scales, SymInt numel, SymInt count, str index_codec, "
      "str value_codec, SymInt value_block, bool checksum=False) -> Tensor");
  m.def("_payload_header(Tensor payload) -> Tensor");
  m.def("_decode_payload(Tensor payload) -> (Tensor indices, Tensor codes, Tensor scales)");
}

namespace {

constexpr const char* kValueNames[kNumValueCodecs] = {"fp32", "bf16", "fp8", "int8", "int4", "sign"};

int64_t find_name(const char* const* names, int64_t count, const std::string& name) {
  return std::find(names, names + count, name) - names;
}

} // namespace

Codecs check_encode_payload(
    const Tensor& indices, // [K]; [0] for dense
    const Tensor& codes, const Tensor& scales, int64_t numel, int64_t count, const std::string& index_codec,
    const std::string& value_codec, int64_t value_block) {
  const char* op = "encode_gradient";
  const int64_t index = find_name(kIndexNames, kNumIndexCodecs, index_codec);
  MOE_CHECK(index < kNumIndexCodecs, op, ": expected index_codec to be dense, bitmap, u16 or delta, got ", index_codec);
  const int64_t value = find_name(kValueNames, kNumValueCodecs, value_codec);
  MOE_CHECK(
      value < kNumValueCodecs, op, ": expected value_codec to be fp32, bf16, fp8, int8, int4 or sign, got ",
      value_codec);
  const Codecs codecs{static_cast<IndexCodec>(index), static_cast<ValueCodec>(value)};
  MOE_CHECK(
      has_scales(codecs.value) ? is_block(value_block) : value_block == 0, op, ": expected value_block to be ",
      has_scales(codecs.value) ? "a power of two from 64 to 1024" : "0 for values without scales", ", got ",
      value_block);
  MOE_CHECK(
      numel >= 0 && numel <= static_cast<int64_t>(kMostElements), op, ": expected numel to be in [0, 2^62], got ",
      numel);
  MOE_CHECK(count >= 0 && count <= numel, op, ": expected count to be in [0, ", numel, "], got ", count);
  check_dtype(op, "indices", indices, ScalarType::Long);
  check_same_device(op, "codes", codes, "indices", indices);
  check_same_device(op, "scales", scales, "indices", indices);
  check_dtype(op, "codes", codes, ScalarType::Byte);
  check_dtype(op, "scales", scales, ScalarType::Float);
  check_dim(op, "indices", indices, 1, "[K]");
  check_dim(op, "codes", codes, 1, "of bytes");
  check_dim(op, "scales", scales, 1, "of blocks");
  const bool dense = codecs.index == IndexCodec::kDense;
  MOE_CHECK(!dense || count == numel, op, ": expected count to be numel, ", numel, ", for dense, got ", count);
  check_size(op, "indices", indices, 0, dense ? 0 : count, dense ? "dense has none" : "one for each value");
  check_size(op, "codes", codes, 0, static_cast<int64_t>(code_bytes(codecs.value, count)), "the bytes of the values");
  check_size(
      op, "scales", scales, 0, static_cast<int64_t>(num_scales(codecs.value, count, value_block)),
      "the blocks of values");
  return codecs;
}

void check_payload(const char* op, const Tensor& payload) {
  check_dtype(op, "payload", payload, ScalarType::Byte);
  check_dim(op, "payload", payload, 1, "of bytes");
  MOE_CHECK(
      payload.size(0) >= static_cast<int64_t>(sizeof(Header)), op, ": expected payload to have at least ",
      sizeof(Header), " bytes, got ", payload.size(0));
}

void check_header(const char* op, const Header& h, uint64_t size) {
  MOE_CHECK(
      h.magic == kMagic, op, ": expected payload to begin with MX, got the bytes ", h.magic & 0xFF, " and ",
      h.magic >> 8);
  MOE_CHECK(h.version == kVersion, op, ": expected payload to be of version ", int{kVersion}, ", got ", int{h.version});
  MOE_CHECK(
      h.index_codec < kNumIndexCodecs && h.value_codec < kNumValueCodecs && h.flags <= kHasChecksum && h.reserved == 0,
      op, ": expected payload to use codecs and flags of version ", int{kVersion}, ", got index codec ",
      int{h.index_codec}, ", value codec ", int{h.value_codec}, ", flags ", int{h.flags});
  MOE_CHECK(
      h.total_bytes == size, op, ": expected payload to have the ", h.total_bytes, " bytes that its header says, got ",
      size);
  MOE_CHECK(
      is_consistent(h, size), op, ": expected payload to have a consistent header, got ", h.count, " of ", h.numel,
      " elements in ", h.index_bytes, " bytes of indices, ", h.code_bytes, " of values and ", h.num_scales, " scales");
}

void check_checksum(const char* op, const Header& h, uint32_t sum) {
  MOE_CHECK(sum == h.checksum, op, ": expected payload to have the checksum ", h.checksum, " of its header, got ", sum);
}

void refuse_indices(IndexCodec codec, uint64_t at) {
  fail(
      "decode_gradient: expected payload to hold as many ", kIndexNames[static_cast<int64_t>(codec)],
      " indices as its header says, ascending and in range, got others from value ", at, " on");
}

Header make_header(Codecs codecs, int64_t numel, int64_t count, int64_t value_block, bool checksum) {
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.index_codec = static_cast<uint8_t>(codecs.index);
  header.value_codec = static_cast<uint8_t>(codecs.value);
  header.flags = checksum ? kHasChecksum : 0;
  header.value_block = static_cast<uint16_t>(value_block);
  header.numel = static_cast<uint64_t>(numel);
  header.count = static_cast<uint64_t>(count);
  header.code_bytes = code_bytes(codecs.value, header.count);
  header.num_scales = num_scales(codecs.value, header.count, header.value_block);
  return header;
}

Layout set_index_bytes(Header& header, uint64_t bytes) {
  header.index_bytes = bytes;
  const Layout layout = layout_of(bytes, header.code_bytes, header.num_scales);
  header.total_bytes = layout.end;
  return layout;
}

} // namespace moe_ext::wire
