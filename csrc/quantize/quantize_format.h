// Formats of the block quantisers and the bytes of their codes. Torch-free.
#pragma once

#include <cstdint>
#include <string_view>

namespace moe_ext::quantize {

enum class Format : int64_t { kInt8 = 0, kInt4 = 1, kFp8 = 2, kSign = 3, kInt6 = 4, kInt3 = 5, kInt2 = 6 };
constexpr int64_t kNumFormats = 7;
constexpr const char* kFormatNames[kNumFormats] = {"int8", "int4", "fp8", "sign", "int6", "int3", "int2"};

// kNumFormats where there is none of that name.
constexpr int64_t find_format(std::string_view name) {
  int64_t found = 0;
  while (found < kNumFormats && name != kFormatNames[found]) {
    ++found;
  }
  return found;
}

// Code i has the bits from bits_of * i on, the lowest first.
constexpr int64_t bits_of(Format format) {
  constexpr int64_t kBits[kNumFormats] = {8, 4, 8, 1, 6, 3, 2};
  return kBits[static_cast<int64_t>(format)];
}

constexpr int64_t code_bytes(int64_t numel, Format format) {
  return (numel * bits_of(format) + 7) / 8;
}

// A block of 0 is the whole tensor.
constexpr int64_t num_scales(int64_t numel, int64_t block) {
  return block == 0 ? numel > 0 : numel / block + (numel % block != 0);
}

// The largest number that a scaled element takes.
constexpr float largest_code(Format format) {
  return format == Format::kFp8 ? 448.0f : static_cast<float>((1 << (bits_of(format) - 1)) - 1);
}

} // namespace moe_ext::quantize
