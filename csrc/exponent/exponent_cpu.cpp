// Coding of exponents on CPU. Each thread encodes a run of blocks at the place where the run would begin if no block
// were compressed, and the runs are then moved together. A single thread has one run and moves nothing.
#include "exponent/exponent.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"

namespace moe_ext::exponent {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::parallel_for;

constexpr int64_t kGrain = 16; // least number of blocks of a run

// Writes a payload to `bytes`, which has room for most_bytes(numel, item), and returns its size.
int64_t encode(uint8_t* bytes, const uint8_t* elements, int64_t numel, int64_t item, Kind kind) {
  const int64_t blocks = num_blocks(numel), first = table_bytes(numel);
  const Header header = {kMagic, kind, static_cast<uint64_t>(numel)};
  std::memcpy(bytes, &header, sizeof(header));
  std::vector<uint32_t> sizes((first - kHeader) / 4, 0);
  std::vector<int64_t> run_bytes(blocks, 0); // bytes of the run that begins at a block, otherwise 0
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
  return total;
}

Tensor encode_exponents_cpu(Tensor x) {
  const Kind kind = check_elements("encode_exponents", "x", x);
  const int64_t numel = x.numel(), item = static_cast<int64_t>(x.element_size());
  Tensor payload = new_on_cpu({most_bytes(numel, item)}, ScalarType::Byte);
  const int64_t total = encode(data<uint8_t>(payload), static_cast<const uint8_t*>(x.data_ptr()), numel, item, kind);
  return torch::stable::narrow(payload, 0, 0, total);
}

// Decodes all blocks. Returns the lowest damaged block, or -1. A block that reaches beyond the payload is damaged.
int64_t decode(
    const Tensor& out, const uint8_t* bytes, int64_t num_bytes, const std::vector<int64_t>& place, Kind kind) {
  const int64_t numel = out.numel(), item = static_cast<int64_t>(out.element_size());
  std::atomic<int64_t> wrong = -1;
  uint8_t* elements = static_cast<uint8_t*>(out.data_ptr());
  parallel_for(0, num_blocks(numel), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t n = std::min(kBlock, numel - block * kBlock), size = place[block + 1] - place[block];
      if (place[block + 1] > num_bytes ||
          !kernels().decode[kind](elements + block * kBlock * item, bytes + place[block], size, n)) {
        int64_t lowest = wrong;
        while ((lowest < 0 || block < lowest) && !wrong.compare_exchange_weak(lowest, block)) {
        }
      }
    }
  });
  return wrong;
}

void decode_exponents_cpu(Tensor out, Tensor payload) {
  const char* op = "decode_exponents_";
  const Kind kind = check_elements(op, "out", out);
  check_payload(op, payload, out);
  const uint8_t* bytes = data<const uint8_t>(payload);
  check_length(op, payload, out.numel());
  const int64_t wrong = decode(out, bytes, payload.numel(), block_starts(op, bytes, payload, out, kind), kind);
  MOE_CHECK(wrong < 0, op, ": expected payload to be as encoded, got a damaged block ", wrong);
}

std::tuple<Tensor, Tensor> encode_exponent_rows_cpu(
    Tensor x, // [N]
    int64_t num_rows, int64_t left_out) {
  const Kind kind = check_rows(x, num_rows);
  const int64_t numel = x.numel(), item = static_cast<int64_t>(x.element_size()), each = row_numel(numel, num_rows);
  Tensor rows = new_on_cpu({num_rows, most_bytes(each, item)}, ScalarType::Byte);
  Tensor num_bytes = new_on_cpu({num_rows}, ScalarType::Long);
  const auto* elements = static_cast<const uint8_t*>(x.data_ptr());
  for (int64_t row = 0; row < num_rows; ++row) {
    data<int64_t>(num_bytes)[row] =
        row == left_out ? 0
                        : encode(
                              data<uint8_t>(rows) + row * rows.size(1), elements + std::min(numel, row * each) * item,
                              numel_of_row(numel, num_rows, row), item, kind);
  }
  return {rows, num_bytes};
}

void decode_exponent_row_cpu(Tensor out, Tensor row, Tensor damaged) {
  const Kind kind = check_row(out, row, damaged);
  const uint8_t* bytes = data<const uint8_t>(row);
  const std::vector<int64_t> place = places(bytes, out.numel(), kind);
  int64_t& lowest = *data<int64_t>(damaged);
  const int64_t wrong = place.empty() ? 0 : decode(out, bytes, row.numel(), place, kind);
  lowest = wrong < 0 ? lowest : std::min(lowest, wrong);
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("encode_exponents", TORCH_BOX(&encode_exponents_cpu));
  m.impl("decode_exponents_", TORCH_BOX(&decode_exponents_cpu));
  m.impl("encode_exponent_rows", TORCH_BOX(&encode_exponent_rows_cpu));
  m.impl("decode_exponent_row_", TORCH_BOX(&decode_exponent_row_cpu));
}

} // namespace moe_ext::exponent
