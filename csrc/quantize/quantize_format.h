// Formats of the block quantisers and the bytes of their codes. Torch-free.
#pragma once

#include <cstdint>
#include <string_view>

namespace moe_ext::quantize {

enum class Format : int64_t { kInt8 = 0, kInt4 = 1, kFp8 = 2, kSign = 3, kInt6 = 4, kInt3 = 5, kInt2 = 6 };
constexpr int64_t kNumFormats = 7;
constexpr const char* kFormatNames[kNumFormats] = {"int8", "int4", "fp8", "sign", "int6", "int3", "int2"};

// Index of `name` in `names`, or kCount if it is not among them.
template <int64_t kCount>
constexpr int64_t find_format(std::string_view name, const char* const (&names)[kCount]) {
  int64_t found = 0;
  while (found < kCount && name != names[found]) {
    ++found;
  }
  return found;
}

// Bits of a code. Code i begins at bit bits_of(format) * i of a block, the lowest bit first.
constexpr int64_t bits_of(Format format) {
  constexpr int64_t kBits[kNumFormats] = {8, 4, 8, 1, 6, 3, 2};
  return kBits[static_cast<int64_t>(format)];
}

constexpr int64_t code_bytes(int64_t numel, Format format) {
  return (numel * bits_of(format) + 7) / 8;
}

// Number of scales. With block 0 the whole tensor is one block.
constexpr int64_t num_scales(int64_t numel, int64_t block) {
  return block == 0 ? numel > 0 : numel / block + (numel % block != 0);
}

// Largest magnitude of an element divided by its scale.
constexpr float largest_code(Format format) {
  return format == Format::kFp8 ? 448.0f : static_cast<float>((1 << (bits_of(format) - 1)) - 1);
}

// Formats of rows that carry their scales: the codes of the row, then one scale for each of its blocks.
enum class RowFormat : int64_t { kInt8 = 0, kFp8 = 1, kMx = 2 };
constexpr int64_t kNumRowFormats = 3;
constexpr const char* kRowFormatNames[kNumRowFormats] = {"int8", "fp8", "mx"};

constexpr Format code_format(RowFormat format) {
  return format == RowFormat::kInt8 ? Format::kInt8 : Format::kFp8;
}

// Number of neighbouring elements of a row that share a scale.
constexpr int64_t row_block(RowFormat format) {
  return format == RowFormat::kMx ? 32 : 128;
}

// Bytes of a scale: the exponent of a power of two for kMx, otherwise a float.
constexpr int64_t scale_bytes(RowFormat format) {
  return format == RowFormat::kMx ? 1 : 4;
}

constexpr int64_t row_bytes(int64_t dim, RowFormat format) {
  return dim + num_scales(dim, row_block(format)) * scale_bytes(format);
}

} // namespace moe_ext::quantize
