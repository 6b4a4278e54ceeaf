// Wire format on CUDA, on the current stream. Encoding makes the host wait only for the index codec "delta", whose size
// depends on the data. Decoding makes it wait twice: for the header, which holds the sizes to allocate, and for the
// check of the indices.
#include <array>
#include <cstddef>
#include <cstring>
#include <tuple>

#include "common/dispatch_cuda.cuh"
#include "common/new_on_cpu.h"
#include "common/read_back.h"
#include "common/torch_cuda.cuh"
#include "sparse/checksum_kernels.cuh"
#include "sparse/decode_kernels.cuh"
#include "sparse/wire.h"

namespace moe_ext::wire {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::new_zeros;

constexpr int64_t kChecksumAt = offsetof(Header, checksum);

// Writes the checksum of the payload, whose own four bytes count as zeros, to `to`.
void compute_checksum(const Tensor& payload, uint32_t* to, cudaStream_t stream) {
  const int64_t size = payload.size(0);
  const Tensor partial = new_empty(payload, {num_checksum_words(size)}, ScalarType::Int);
  launch_checksum(data<const uint8_t>(payload), size, kChecksumAt, data<uint32_t>(partial), to, stream);
}

// Allocates the payload and writes the indices; all other bytes are zeros. Sets the sizes in `header`.
Tensor encode_delta(const Tensor& idx, Header& header, cudaStream_t stream) {
  const int64_t count = idx.size(0), segments = num_segments(count);
  const Tensor longs = new_zeros(idx, {segments + 1});
  int64_t *const total = data<int64_t>(longs), *const sizes = total + 1;
  if (count > 0) {
    launch_place_gaps(data<const int64_t>(idx), count, sizes, total, stream);
    // NOTE: device-to-host sync: the bytes of the gaps depend on the data.
    const Tensor bytes = read_back(torch::stable::narrow(const_cast<Tensor&>(longs), 0, 0, 1));
    set_index_bytes(header, static_cast<uint64_t>(*data<const int64_t>(bytes)));
  } else {
    set_index_bytes(header, 0);
  }
  Tensor payload = new_zeros(idx, {static_cast<int64_t>(header.total_bytes)}, ScalarType::Byte);
  if (count > 0) {
    launch(
        over_segments(count, stream), encode_delta_kernel, data<const int64_t>(idx), count, sizes,
        data<uint8_t>(payload) + sizeof(Header));
  }
  return payload;
}

Tensor encode_static(IndexCodec codec, const Tensor& idx, Header& header, cudaStream_t stream) {
  const uint64_t runs = num_runs(header.numel);
  set_index_bytes(
      header, codec == IndexCodec::kBitmap ? header.numel / 8 + (header.numel % 8 != 0)
              : codec == IndexCodec::kU16  ? 4 * runs + 2 * header.count
                                           : 0);
  Tensor payload = new_empty(idx, {static_cast<int64_t>(header.total_bytes)}, ScalarType::Byte);
  launch_encode_indices(
      codec, data<const int64_t>(idx), idx.size(0), static_cast<int64_t>(header.numel),
      static_cast<int64_t>(header.index_bytes), data<uint8_t>(payload) + sizeof(Header), stream);
  return payload;
}

Tensor encode_payload_cuda(
    Tensor indices, // [K]
    Tensor codes, Tensor scales, int64_t numel, int64_t count, std::string index_codec, std::string value_codec,
    int64_t value_block, bool checksum) {
  const Codecs codecs =
      check_encode_payload(indices, codes, scales, numel, count, index_codec, value_codec, value_block);
  const DeviceScope device(indices);
  const Tensor idx = contiguous(indices), values = contiguous(codes), factors = contiguous(scales);
  if (kCheckIndices && idx.size(0) > 0) {
    launch(
        over_threads(idx.size(0), device.stream()), check_ascending_kernel, data<const int64_t>(idx), idx.size(0),
        numel);
  }
  Header header = make_header(codecs, numel, count, value_block, checksum);
  const Tensor payload = codecs.index == IndexCodec::kDelta ? encode_delta(idx, header, device.stream())
                                                            : encode_static(codecs.index, idx, header, device.stream());
  const Layout layout = layout_of(header.index_bytes, header.code_bytes, header.num_scales);
  uint8_t* const out = data<uint8_t>(payload);
  const auto append = [&](uint64_t at, const void* from, uint64_t size) {
    launch_copy_padded(
        from, static_cast<int64_t>(size), out + at, static_cast<int64_t>(aligned(size)), device.stream());
  };
  append(layout.codes, values.data_ptr(), header.code_bytes);
  append(layout.scales, factors.data_ptr(), 4 * header.num_scales);
  launch_store(header, out, device.stream());
  if (checksum) {
    compute_checksum(payload, reinterpret_cast<uint32_t*>(out + kChecksumAt), device.stream());
  }
  return payload;
}

// NOTE: device-to-host sync, to read the header, and another one if there is a checksum.
Header read_header(const char* op, const Tensor& payload, cudaStream_t stream) {
  check_payload(op, payload);
  const Tensor first = read_back(torch::stable::narrow(const_cast<Tensor&>(payload), 0, 0, sizeof(Header)));
  Header header;
  std::memcpy(&header, first.data_ptr(), sizeof(header));
  check_header(op, header, static_cast<uint64_t>(payload.size(0)));
  uint32_t sum = 0;
  if ((header.flags & kHasChecksum) != 0) {
    const Tensor computed = new_empty(payload, {1}, ScalarType::Int);
    compute_checksum(payload, data<uint32_t>(computed), stream);
    sum = *data<const uint32_t>(read_back(computed));
  }
  check_checksum(op, header, sum);
  return header;
}

// Returns the payload, or a copy that is contiguous and begins at a multiple of 16 bytes.
Tensor aligned_payload(const Tensor& payload) {
  const Tensor in = contiguous(payload);
  return is_aligned(in.data_ptr(), kAccessBytes) ? in : torch::stable::clone(in);
}

// Returns numel, count, index codec, value codec, and elements that share a scale. The result is on the CPU, to which
// the header was read; torch.compile leaves operators with CPU results out of CUDA graphs.
Tensor payload_header_cuda(Tensor payload) {
  const DeviceScope device(payload);
  const Header h = read_header("decode_gradient", contiguous(payload), device.stream());
  Tensor out = new_on_cpu({5}, ScalarType::Long);
  const std::array<int64_t, 5> fields{
      static_cast<int64_t>(h.numel), static_cast<int64_t>(h.count), h.index_codec, h.value_codec, h.value_block};
  std::memcpy(out.data_ptr(), fields.data(), sizeof(fields));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> decode_payload_cuda(Tensor payload) {
  const char* op = "decode_gradient";
  check_payload(op, payload);
  const DeviceScope device(payload);
  const Tensor in = aligned_payload(payload);
  const Header h = read_header(op, in, device.stream());
  const Layout layout = layout_of(h.index_bytes, h.code_bytes, h.num_scales);
  const IndexCodec codec = static_cast<IndexCodec>(h.index_codec);
  const int64_t count = codec == IndexCodec::kDense ? 0 : static_cast<int64_t>(h.count);
  const uint8_t* const bytes = data<const uint8_t>(in);
  Tensor indices = new_empty(in, {count}, ScalarType::Long);
  const int64_t index_bytes = static_cast<int64_t>(h.index_bytes), numel = static_cast<int64_t>(h.numel);
  const Tensor longs = new_zeros(in, {1 + num_decode_longs(codec, index_bytes, count, numel)}, ScalarType::Long);
  launch_decode_indices(
      codec,
      {bytes + layout.indices, index_bytes, count, numel, data<int64_t>(indices), data<unsigned long long>(longs)},
      data<uint64_t>(longs) + 1, device.stream());
  Tensor codes = new_empty(in, {static_cast<int64_t>(h.code_bytes)});
  Tensor scales = new_empty(in, {static_cast<int64_t>(h.num_scales)}, ScalarType::Float);
  const auto copy = [&](uint64_t at, int64_t size, const Tensor& to) {
    launch_copy_padded(bytes + at, size, to.data_ptr(), size, device.stream());
  };
  copy(layout.codes, codes.size(0), codes);
  copy(layout.scales, 4 * scales.size(0), scales);
  // NOTE: device-to-host sync: wrong indices must raise before they are returned.
  const Tensor wrong = read_back(torch::stable::narrow(const_cast<Tensor&>(longs), 0, 0, 1));
  const uint64_t first = *data<const uint64_t>(wrong);
  if (first != 0) {
    refuse_indices(codec, kWrongFrom - first);
  }
  return {indices, codes, scales};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("_encode_payload", TORCH_BOX(&encode_payload_cuda));
  m.impl("_payload_header", TORCH_BOX(&payload_header_cuda));
  m.impl("_decode_payload", TORCH_BOX(&decode_payload_cuda));
}

} // namespace moe_ext::wire
