// Packing by mask on CPU. The elements are cut into pieces of a fixed size. The marks of all pieces are counted first,
// so that the place of each piece in `packed` is known and different threads can move different pieces.
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

constexpr int64_t kPiece = 32768; // elements of a piece, a multiple of 64

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

// Returns the number of marks before each piece, and last the number of all marks. Refuses a bitmap whose number of
// marks is not the size of `packed`.
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

// Rows of a block that one thread multiplies. `places_of_rows` counts the values before each block.
constexpr int64_t kRows = 16;

// Returns the place in `values` of each block of kRows rows, and last of the end; `begin` is that of the first row.
std::vector<int64_t> places_of_rows(const uint8_t* bitmap, int64_t num_rows, int64_t row_bytes, int64_t begin) {
  std::vector<int64_t> first{begin};
  for (int64_t row = 0; row < num_rows; row += kRows) {
    const int64_t count = std::min(kRows, num_rows - row);
    first.push_back(first.back() + kernels().count(bitmap + row * row_bytes, count * row_bytes));
  }
  return first;
}

// Computes out [num_tokens, num_rows] from x [num_tokens, dim] and the marks of bitmap [num_rows, dim / 8]. `first` is
// the result of `places_of_rows`.
template <typename T, typename Bits>
void multiply(
    T* out, const T* x, const Bits* values, const uint8_t* bitmap, int64_t num_tokens, int64_t dim, int64_t num_rows,
    const std::vector<int64_t>& first, void (*rows)(const RowsArgs& args, const Bits* values)) {
  std::vector<float> wide(num_tokens * dim + kReadBehind);
  for (int64_t i = 0; i < num_tokens * dim; ++i) {
    wide[i] = to_acc(x[i]);
  }
  parallel_for(0, static_cast<int64_t>(first.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    const int64_t start = begin * kRows, count = std::min(num_rows, end * kRows) - start;
    std::vector<float> sums(count * num_tokens);
    rows({bitmap + start * (dim / 8), wide.data(), sums.data(), count, num_tokens, dim}, values + first[begin]);
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t t = 0; t < num_tokens; ++t) {
        out[t * num_rows + start + m] = from_acc<T>(sums[m * num_tokens + t]);
      }
    }
  });
}

Tensor masked_mm_cpu(
    Tensor x,      // [T, K]
    Tensor values, // [n]
    Tensor bitmap, // [M, K / 8]
    std::optional<Tensor> expert_offsets) {
  const char* op = "masked_mm";
  check_masked_mm(x, values, bitmap, expert_offsets);
  const Tensor tokens = as_contiguous(x), packed = as_contiguous(values), bits = as_contiguous(bitmap);
  const int64_t num_tokens = x.size(0), dim = x.size(1), num_rows = bits.size(0), row_bytes = bits.size(1);
  const uint8_t* marks = data<const uint8_t>(bits);
  // Without expert_offsets, all tokens belong to a single expert.
  const int64_t all[2] = {0, num_tokens};
  const Tensor of_experts = expert_offsets ? as_offsets(*expert_offsets) : Tensor();
  const int64_t* begin = expert_offsets ? data<const int64_t>(of_experts) : all;
  const int64_t num_experts = expert_offsets ? of_experts.size(0) - 1 : 1, each = num_rows / num_experts;
  check_offsets(op, begin, num_experts, num_tokens);
  std::vector<std::vector<int64_t>> first;
  for (int64_t e = 0; e < num_experts; ++e) {
    first.push_back(places_of_rows(marks + e * each * row_bytes, each, row_bytes, e == 0 ? 0 : first.back().back()));
  }
  MOE_CHECK(
      first.back().back() == packed.numel(), op, ": expected values to have an element for each of the ",
      first.back().back(), " bits that are set, got ", packed.numel());
  Tensor out =
      expert_offsets ? torch::stable::new_zeros(tokens, {num_tokens, each}) : new_empty(tokens, {num_tokens, each});
  const auto run = [&]<typename T, typename Bits>(void (*rows)(const RowsArgs& args, const Bits* values)) {
    for (int64_t e = 0; e < num_experts; ++e) {
      if (const int64_t count = begin[e + 1] - begin[e]; count > 0) {
        multiply<T, Bits>(
            data<T>(out) + begin[e] * each, data<const T>(tokens) + begin[e] * dim, data<const Bits>(packed),
            marks + e * each * row_bytes, count, dim, each, first[e], rows);
      }
    }
  };
  if (tokens.scalar_type() == ScalarType::BFloat16) {
    run.template operator()<BFloat16, uint16_t>(kernels().rows_bf16);
  } else {
    run.template operator()<float, uint32_t>(kernels().rows_f32);
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
