// Coding of exponents on CUDA, on the current stream. The host waits for the length of an encoded payload and, in
// decoding, for the sizes of the blocks and the check that none is damaged. With rows the host never waits.
#include <cstring>

#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/new_on_cpu.h"
#include "common/read_back.h"
#include "common/torch_cuda.cuh"
#include "common/vec.cuh"
#include "exponent/exponent.h"
#include "exponent/exponent_kernels.cuh"

namespace moe_ext::exponent {
namespace {

using torch::stable::narrow;
using torch::stable::new_empty;

// Calls f.operator()<Parts>() for the kind.
template <typename F>
void dispatch_kind(Kind kind, F&& f) {
  switch (kind) {
    case kBFloat16:
      return f.template operator()<BFloat16Parts>();
    case kHalf:
      return f.template operator()<HalfParts>();
    default:
      return f.template operator()<FloatParts>();
  }
}

// Scratch memory of encoding: blocks at the places where they would begin if none were compressed, and the places to
// which they are moved.
struct Scratch {
  Tensor coded;  // [blocks * stride]
  Tensor starts; // [blocks + 1]
  int64_t stride;

  Scratch(const Tensor& x, int64_t numel)
      : coded(new_empty(x, {num_blocks(numel) * raw_block_bytes(item(x))}, ScalarType::Byte)),
        starts(new_empty(x, {num_blocks(numel) + 1}, ScalarType::Long)),
        stride(raw_block_bytes(item(x))) {
  }

  static int64_t item(const Tensor& x) {
    return static_cast<int64_t>(x.element_size());
  }

  // Encodes x[first : first + numel] into `coded`, and fills `starts`.
  void encode(const Tensor& x, int64_t first, int64_t numel, Kind kind, const DeviceScope& device) const {
    const int64_t blocks = num_blocks(numel);
    dispatch_kind(kind, [&]<typename Parts>() {
      launch(
          over_element_blocks(blocks, device.stream()), encode_blocks_kernel<Parts>,
          data<const typename Parts::Bits>(x) + first, numel, stride, data<uint8_t>(coded), data<int64_t>(starts));
    });
    launch_scan_counts(data<int64_t>(starts), 1, blocks, data<int64_t>(starts) + blocks, device.stream());
  }

  void move_to(uint8_t* payload, int64_t numel, Kind kind, int64_t* num_bytes, const DeviceScope& device) const {
    const int64_t blocks = num_blocks(numel);
    launch(
        over_element_blocks(blocks, device.stream()), move_blocks_kernel, data<const uint8_t>(coded), stride,
        data<const int64_t>(starts), blocks, Header{kMagic, kind, static_cast<uint64_t>(numel)}, table_bytes(numel),
        payload, num_bytes);
  }
};

Tensor encode_exponents_cuda(Tensor x) {
  const Kind kind = check_elements("encode_exponents", "x", x);
  const DeviceScope device(x);
  const int64_t numel = x.numel(), blocks = num_blocks(numel);
  Scratch scratch(x, numel);
  scratch.encode(x, 0, numel, kind, device);
  // NOTE: device-to-host sync: the sum of the sizes is the length of the payload.
  const int64_t bytes = *data<const int64_t>(read_back(narrow(scratch.starts, 0, blocks, 1)));
  Tensor payload = new_empty(x, {table_bytes(numel) + bytes}, ScalarType::Byte);
  scratch.move_to(data<uint8_t>(payload), numel, kind, nullptr, device);
  return payload;
}

std::tuple<Tensor, Tensor> encode_exponent_rows_cuda(
    Tensor x, // [N]
    int64_t num_rows, int64_t left_out) {
  const Kind kind = check_rows(x, num_rows);
  const DeviceScope device(x);
  const int64_t each = row_numel(x.numel(), num_rows);
  Tensor rows = new_empty(x, {num_rows, most_bytes(each, Scratch::item(x))}, ScalarType::Byte);
  Tensor num_bytes = torch::stable::new_zeros(x, {num_rows}, ScalarType::Long);
  const Scratch scratch(x, each);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (row != left_out) {
      const int64_t numel = numel_of_row(x.numel(), num_rows, row);
      scratch.encode(x, std::min(x.numel(), row * each), numel, kind, device);
      scratch.move_to(data<uint8_t>(rows) + row * rows.size(1), numel, kind, data<int64_t>(num_bytes) + row, device);
    }
  }
  return {rows, num_bytes};
}

void launch_decode(
    const Tensor& out, const uint8_t* payload, const int64_t* starts, unsigned long long* wrong, Kind kind,
    const DeviceScope& device) {
  dispatch_kind(kind, [&]<typename Parts>() {
    launch(
        over_element_blocks(num_blocks(out.numel()), device.stream()), decode_blocks_kernel<Parts>,
        data<typename Parts::Bits>(out), out.numel(), payload, starts, wrong);
  });
}

Tensor aligned(const Tensor& payload) {
  return is_aligned(payload.data_ptr(), 8) ? payload : torch::stable::clone(payload);
}

void decode_exponents_cuda(Tensor out, Tensor payload) {
  const char* op = "decode_exponents_";
  const Kind kind = check_elements(op, "out", out);
  check_payload(op, payload, out);
  const DeviceScope device(out);
  const int64_t numel = out.numel(), blocks = num_blocks(numel);
  check_length(op, payload, numel);
  // NOTE: device-to-host sync: sizes are checked before blocks are read.
  const Tensor head = read_back(narrow(payload, 0, 0, table_bytes(numel)));
  const std::vector<int64_t> places = block_starts(op, data<const uint8_t>(head), payload, out, kind);
  // The element after the starts holds the lowest damaged block; `blocks` means none.
  Tensor told = new_on_cpu({blocks + 2}, ScalarType::Long);
  std::memcpy(told.data_ptr(), places.data(), places.size() * sizeof(int64_t));
  data<int64_t>(told)[blocks + 1] = blocks;
  Tensor starts = torch::stable::to(told, out.device());
  const Tensor from = aligned(payload);
  launch_decode(
      out, data<const uint8_t>(from), data<const int64_t>(starts), data<unsigned long long>(starts) + blocks + 1, kind,
      device);
  // NOTE: device-to-host sync: a damaged block must raise.
  const int64_t wrong = *data<const int64_t>(read_back(narrow(starts, 0, blocks + 1, 1)));
  MOE_CHECK(wrong == blocks, op, ": expected payload to be as encoded, got a damaged block ", wrong);
}

void decode_exponent_row_cuda(Tensor out, Tensor row, Tensor damaged) {
  const Kind kind = check_row(out, row, damaged);
  const DeviceScope device(out);
  const int64_t numel = out.numel(), blocks = num_blocks(numel), table = table_bytes(numel);
  const Tensor starts = new_empty(out, {blocks + 1}, ScalarType::Long), from = aligned(row);
  launch(
      over_threads(blocks, device.stream()), read_head_kernel, data<const uint8_t>(from), blocks,
      Header{kMagic, kind, static_cast<uint64_t>(numel)}, data<int64_t>(starts), data<unsigned long long>(damaged));
  launch_scan_counts(data<int64_t>(starts), 1, blocks, data<int64_t>(starts) + blocks, device.stream());
  launch(
      over_threads(blocks + 1, device.stream()), clip_starts_kernel, data<int64_t>(starts), blocks,
      row.numel() - table);
  launch_decode(
      out, data<const uint8_t>(from) + table, data<const int64_t>(starts), data<unsigned long long>(damaged), kind,
      device);
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("encode_exponents", TORCH_BOX(&encode_exponents_cuda));
  m.impl("decode_exponents_", TORCH_BOX(&decode_exponents_cuda));
  m.impl("encode_exponent_rows", TORCH_BOX(&encode_exponent_rows_cuda));
  m.impl("decode_exponent_row_", TORCH_BOX(&decode_exponent_row_cuda));
}

} // namespace moe_ext::exponent
