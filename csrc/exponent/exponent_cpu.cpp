// CPU side of coding exponents. Threads encode runs of blocks where these would begin if none were smaller than its
// elements, and the runs are then moved together; a single thread has one run, and nothing to move.
#include "exponent/exponent.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"

namespace moe_ext::exponent {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::parallel_for;

constexpr int64_t kGrain = 16; // blocks of a run at least

Tensor encode_exponents_cpu(Tensor x) {
  const Kind kind = check_elements("encode_exponents", "x", x);
  const int64_t numel = x.numel(), item = static_cast<int64_t>(x.element_size()), blocks = num_blocks(numel);
  Tensor payload = new_on_cpu({most_bytes(numel, item)}, ScalarType::Byte);
  uint8_t* bytes = data<uint8_t>(payload);
  const Header header = {kMagic, kind, static_cast<uint64_t>(numel)};
  std::memcpy(bytes, &header, sizeof(header));
  const int64_t first = table_bytes(numel);
  std::vector<uint32_t> sizes((first - kHeader) / 4, 0);
  std::vector<int64_t> run_bytes(blocks, 0); // of the run that begins with a block
  const uint8_t* elements = static_cast<const uint8_t*>(x.data_ptr());
  parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) {
    uint8_t* start = bytes + first + begin * raw_block_bytes(item);
    uint8_t* at = start;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t n = std::min(kBlock, numel - block * kBlock);
      const int64_t size = kernels().encode[kind](at, elements + block * kBlock * item, n);
      sizes[block] = static_cast<uint32_t>(size);
      at += size;
    }
    run_bytes[begin] = at - start;
  });
  int64_t total = first;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t from = first + block * raw_block_bytes(item);
    if (run_bytes[block] != 0) {
      if (from != total) {
        std::memmove(bytes + total, bytes + from, run_bytes[block]);
      }
      total += run_bytes[block];
    }
  }
  std::memcpy(bytes + kHeader, sizes.data(), 4 * sizes.size());
  return torch::stable::narrow(payload, 0, 0, total);
}

void decode_exponents_cpu(Tensor out, Tensor payload) {
  const char* op = "decode_exponents_";
  const Kind kind = check_elements(op, "out", out);
  check_payload(op, payload, out, "out");
  const int64_t numel = out.numel(), item = static_cast<int64_t>(out.element_size()), blocks = num_blocks(numel);
  const uint8_t* bytes = data<const uint8_t>(payload);
  check_length(op, payload, numel);
  const std::vector<int64_t> place = block_starts(op, bytes, payload, out, kind);
  std::atomic<int64_t> wrong = -1;
  uint8_t* elements = static_cast<uint8_t*>(out.data_ptr());
  parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t n = std::min(kBlock, numel - block * kBlock), size = place[block + 1] - place[block];
      if (!kernels().decode[kind](elements + block * kBlock * item, bytes + place[block], size, n)) {
        wrong = block;
      }
    }
  });
  MOE_CHECK(wrong < 0, op, ": expected payload to be as encoded, got a damaged block ", wrong.load());
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("encode_exponents", TORCH_BOX(&encode_exponents_cpu));
  m.impl("decode_exponents_", TORCH_BOX(&decode_exponents_cpu));
}

} // namespace moe_ext::exponent
