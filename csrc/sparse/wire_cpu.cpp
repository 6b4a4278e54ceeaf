// Wire format on CPU. Decoded indices are in range and ascending, whatever the bytes of the payload.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "common/dispatch.h"
#include "sparse/wire.h"
#include "sparse/wire_codec.h"

namespace moe_ext::wire {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

constexpr const char* kEncode = "encode_gradient";
constexpr const char* kDecode = "decode_gradient";

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
  Header header = make_header(codecs, numel, count, value_block, checksum);
  const Layout layout = set_index_bytes(header, packed.size());
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
  check_checksum(op, header, sum);
  return header;
}

// Returns numel, count, index codec, value codec, and elements that share a scale.
Tensor payload_header_cpu(Tensor payload) {
  const Header h = read_header("decode_gradient", contiguous(payload));
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
  const int64_t wrong = decode_indices(data<int64_t>(indices), bytes + layout.indices, h);
  if (wrong != kDecoded) {
    refuse_indices(codec, static_cast<uint64_t>(wrong));
  }
  Tensor codes = new_empty(in, {static_cast<int64_t>(h.code_bytes)});
  Tensor scales = new_empty(in, {static_cast<int64_t>(h.num_scales)}, ScalarType::Float);
  std::copy_n(bytes + layout.codes, h.code_bytes, data<uint8_t>(codes));
  std::copy_n(bytes + layout.scales, 4 * h.num_scales, reinterpret_cast<uint8_t*>(data<float>(scales)));
  return {indices, codes, scales};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("_encode_payload", TORCH_BOX(&encode_payload_cpu));
  m.impl("_payload_header", TORCH_BOX(&payload_header_cpu));
  m.impl("_decode_payload", TORCH_BOX(&decode_payload_cpu));
}

} // namespace moe_ext::wire
