// CPU side of packing by mask. The elements are cut into pieces of a fixed size, whose marks are counted first: so each
// piece knows its place among the packed ones, and is moved by one thread.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "sparse/mask.h"
#include "sparse/mask_tables.h"

namespace moe_ext::mask {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::new_empty;
using torch::stable::parallel_for;

constexpr int64_t kPiece = 32768; // elements, a multiple of 64

template <typename Bits>
const MaskKernels<Bits>& table_of() {
  if constexpr (sizeof(Bits) == 1) {
    return kernels().b8;
  } else if constexpr (sizeof(Bits) == 2) {
    return kernels().b16;
  } else if constexpr (sizeof(Bits) == 4) {
    return kernels().b32;
  } else {
    return kernels().b64;
  }
}

Tensor pack_bits_cpu(Tensor x) {
  check_pack_bits(x);
  const int64_t numel = x.numel(), pieces = (numel + kPiece - 1) / kPiece;
  Tensor bitmap = new_empty(x, {num_bitmap_bytes(numel)}, ScalarType::Byte);
  dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    const MaskKernels<Bits>& table = table_of<Bits>();
    parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
      const int64_t start = begin * kPiece, stop = std::min(numel, end * kPiece);
      table.pack_bits(data<uint8_t>(bitmap) + start / 8, data<const Bits>(x) + start, stop - start);
    });
  });
  return bitmap;
}

// Marks before each piece, and their number last; refuses others than packed has room for.
std::vector<int64_t> places(const char* op, const Tensor& bitmap, int64_t numel, const Tensor& packed) {
  const int64_t pieces = (numel + kPiece - 1) / kPiece, num_bytes = num_bitmap_bytes(numel);
  const uint8_t* bytes = data<const uint8_t>(bitmap);
  MOE_CHECK(
      numel % 8 == 0 || bytes[num_bytes - 1] >> (numel % 8) == 0, op,
      ": expected bitmap to have no bits past the last element, got ", static_cast<int>(bytes[num_bytes - 1]),
      " as its last byte");
  std::vector<int64_t> found(pieces + 1, 0);
  parallel_for(0, pieces, 8, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece * kPiece / 8;
      found[piece + 1] = kernels().count(bytes + first, std::min(num_bytes - first, kPiece / 8));
    }
  });
  for (int64_t piece = 0; piece < pieces; ++piece) {
    found[piece + 1] += found[piece];
  }
  MOE_CHECK(
      found[pieces] == packed.numel(), op, ": expected packed to have an element for each of the ", found[pieces],
      " bits that are set, got ", packed.numel());
  return found;
}

void pack_masked_cpu(Tensor packed, Tensor x, Tensor bitmap) {
  const char* op = "pack_masked_";
  check_mask(op, "x", x, packed, bitmap);
  const int64_t numel = x.numel();
  const std::vector<int64_t> place = places(op, bitmap, numel, packed);
  dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    const MaskKernels<Bits>& table = table_of<Bits>();
    parallel_for(0, static_cast<int64_t>(place.size()) - 1, 1, [&](int64_t begin, int64_t end) {
      const int64_t start = begin * kPiece, n = std::min(numel, end * kPiece) - start;
      table.pack(
          data<Bits>(packed) + place[begin], data<const Bits>(x) + start, data<const uint8_t>(bitmap) + start / 8, n);
    });
  });
}

void unpack_masked_cpu(Tensor out, Tensor packed, Tensor bitmap) {
  const char* op = "unpack_masked_";
  check_mask(op, "out", out, packed, bitmap);
  const int64_t numel = out.numel();
  const std::vector<int64_t> place = places(op, bitmap, numel, packed);
  dispatch_size(static_cast<int64_t>(out.element_size()), [&]<typename Bits>() {
    const MaskKernels<Bits>& table = table_of<Bits>();
    parallel_for(0, static_cast<int64_t>(place.size()) - 1, 1, [&](int64_t begin, int64_t end) {
      const int64_t start = begin * kPiece, n = std::min(numel, end * kPiece) - start;
      table.unpack(
          data<Bits>(out) + start, data<const Bits>(packed) + place[begin], data<const uint8_t>(bitmap) + start / 8, n);
    });
  });
}

// Rows are divided between threads, a block of kRows at a time: their first values are counted before.
constexpr int64_t kRows = 16;

template <typename T, typename Bits>
void multiply(
    const Tensor& out, const Tensor& values, const Tensor& bitmap, const Tensor& x, const std::vector<int64_t>& first,
    void (*rows)(const RowsArgs& args, const Bits* values)) {
  const int64_t num_tokens = x.size(0), dim = x.size(1), num_rows = bitmap.size(0);
  std::vector<float> wide(num_tokens * dim + kReadBehind);
  const T* tokens = data<const T>(x);
  const uint8_t* of_rows = data<const uint8_t>(bitmap);
  const Bits* kept = data<const Bits>(values);
  T* results = data<T>(out);
  for (int64_t i = 0; i < num_tokens * dim; ++i) {
    wide[i] = to_acc(tokens[i]);
  }
  parallel_for(0, static_cast<int64_t>(first.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    const int64_t start = begin * kRows, count = std::min(num_rows, end * kRows) - start;
    std::vector<float> sums(count * num_tokens);
    rows({of_rows + start * (dim / 8), wide.data(), sums.data(), count, num_tokens, dim}, kept + first[begin]);
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t t = 0; t < num_tokens; ++t) {
        results[t * num_rows + start + m] = from_acc<T>(sums[m * num_tokens + t]);
      }
    }
  });
}

Tensor masked_mm_cpu(
    Tensor x,      // [T, K]
    Tensor values, // [n]
    Tensor bitmap) // [M, K / 8]
{
  check_masked_mm(x, values, bitmap);
  const Tensor tokens = as_contiguous(x), packed = as_contiguous(values), bits = as_contiguous(bitmap);
  const int64_t num_rows = bits.size(0), row_bytes = bits.size(1), blocks = (num_rows + kRows - 1) / kRows;
  std::vector<int64_t> first(blocks + 1, 0);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t rows = std::min(kRows, num_rows - b * kRows);
    first[b + 1] = first[b] + kernels().count(data<const uint8_t>(bits) + b * kRows * row_bytes, rows * row_bytes);
  }
  MOE_CHECK(
      first[blocks] == packed.numel(), "masked_mm: expected values to have an element for each of the ", first[blocks],
      " bits that are set, got ", packed.numel());
  Tensor out = new_empty(tokens, {tokens.size(0), num_rows});
  if (tokens.scalar_type() == ScalarType::BFloat16) {
    multiply<BFloat16, uint16_t>(out, packed, bits, tokens, first, kernels().rows_bf16);
  } else {
    multiply<float, uint32_t>(out, packed, bits, tokens, first, kernels().rows_f32);
  }
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("pack_bits", TORCH_BOX(&pack_bits_cpu));
  m.impl("pack_masked_", TORCH_BOX(&pack_masked_cpu));
  m.impl("unpack_masked_", TORCH_BOX(&unpack_masked_cpu));
  m.impl("masked_mm", TORCH_BOX(&masked_mm_cpu));
}

} // namespace moe_ext::mask
