// CUDA side of coding exponents: allocates, launches, and waits for what the host must know: the length of a payload,
// the sizes of the blocks of one that is read, and that none is damaged.
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

// Calls f.operator()<Parts>().
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

Tensor encode_exponents_cuda(Tensor x) {
  const Kind kind = check_elements("encode_exponents", "x", x);
  const DeviceScope device(x);
  const int64_t numel = x.numel(), blocks = num_blocks(numel), head = table_bytes(numel);
  const int64_t stride = raw_block_bytes(static_cast<int64_t>(x.element_size()));
  const Tensor coded = new_empty(x, {blocks * stride}, ScalarType::Byte);
  Tensor starts = new_empty(x, {blocks + 1}, ScalarType::Long);
  const Launch grid = over_element_blocks(blocks, device.stream());
  dispatch_kind(kind, [&]<typename Parts>() {
    launch(
        grid, encode_blocks_kernel<Parts>, data<const typename Parts::Bits>(x), numel, stride, data<uint8_t>(coded),
        data<int64_t>(starts));
  });
  launch_scan_counts(data<int64_t>(starts), 1, blocks, data<int64_t>(starts) + blocks, device.stream());
  // NOTE: device-to-host sync.
  const int64_t bytes = *data<const int64_t>(read_back(narrow(starts, 0, blocks, 1)));
  Tensor payload = new_empty(x, {head + bytes}, ScalarType::Byte);
  launch(
      grid, move_blocks_kernel, data<const uint8_t>(coded), stride, data<const int64_t>(starts), blocks,
      Header{kMagic, kind, static_cast<uint64_t>(numel)}, head, data<uint8_t>(payload));
  return payload;
}

void decode_exponents_cuda(Tensor out, Tensor payload) {
  const char* op = "decode_exponents_";
  const Kind kind = check_elements(op, "out", out);
  check_payload(op, payload, out, "out");
  const DeviceScope device(out);
  const int64_t numel = out.numel(), blocks = num_blocks(numel);
  check_length(op, payload, numel);
  // NOTE: device-to-host sync.
  const Tensor head = read_back(narrow(payload, 0, 0, table_bytes(numel)));
  const std::vector<int64_t> places = block_starts(op, data<const uint8_t>(head), payload, out, kind);
  // Behind them the lowest damaged block.
  Tensor told = new_on_cpu({blocks + 2}, ScalarType::Long);
  std::memcpy(told.data_ptr(), places.data(), places.size() * sizeof(int64_t));
  data<int64_t>(told)[blocks + 1] = blocks;
  Tensor starts = torch::stable::to(told, out.device());
  const Tensor aligned = is_aligned(payload.data_ptr(), 8) ? payload : torch::stable::clone(payload);
  dispatch_kind(kind, [&]<typename Parts>() {
    launch(
        over_element_blocks(blocks, device.stream()), decode_blocks_kernel<Parts>, data<typename Parts::Bits>(out),
        numel, data<const uint8_t>(aligned), data<const int64_t>(starts),
        data<unsigned long long>(starts) + blocks + 1);
  });
  // NOTE: device-to-host sync.
  const int64_t wrong = *data<const int64_t>(read_back(narrow(starts, 0, blocks + 1, 1)));
  MOE_CHECK(wrong == blocks, op, ": expected payload to be as encoded, got a damaged block ", wrong);
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("encode_exponents", TORCH_BOX(&encode_exponents_cuda));
  m.impl("decode_exponents_", TORCH_BOX(&decode_exponents_cuda));
}

} // namespace moe_ext::exponent
