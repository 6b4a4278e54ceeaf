// Loops of the block quantisers, compiled once per instruction set. A block is read once into a buffer that stays in
// the first cache; its largest element or the sum of its magnitudes is taken there, and its codes are made from there.
#include "compression/quantize_tables.h"

namespace moe_ext::compression::quantize::MOE_ISA {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kAhead = 2048;

// Adds x and what is owed, and pads with zeros to whole vectors. Returns the size.
template <typename T>
MOE_INLINE int64_t load_block(const QuantizeArgs<T>& args, int64_t block, float* __restrict a) {
  const int64_t begin = block * args.block;
  const int64_t n = args.numel - begin < args.block ? args.numel - begin : args.block;
  const T* __restrict x = args.x + begin;
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(x + kAhead + i);
  }
  if (args.residual != nullptr) {
    const float* __restrict residual = args.residual + begin;
    for (int64_t i = 0; i < n; ++i) {
      a[i] = residual[i] + to_acc(x[i]);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      a[i] = to_acc(x[i]);
    }
  }
  for (int64_t i = n; i % kLanes != 0; ++i) {
    a[i] = 0;
  }
  return n;
}

// Of n elements, a multiple of kLanes.
MOE_INLINE uint32_t largest_key(const float* a, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = static_cast<int32_t>(key_of(a[i]));
    most = key > most ? key : most;
  }
  return static_cast<uint32_t>(most);
}

// Sum of |a| * factor in the same order for every instruction set.
MOE_INLINE float magnitude_sum(const float* a, int64_t n, float factor) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += bit_cast<float>(key_of(a[i + lane])) * factor;
    }
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// A word for each of n elements from `begin` on, rounded up to four.
MOE_INLINE void draw(uint32_t* words, const RngSource& rng, int64_t begin, int64_t n) {
  TokenDraws draws = token_draws(rng, Stream::kRounding, 0);
  draws.c1 ^= static_cast<uint32_t>(begin >> 34) << 20;
  for (int64_t i = 0; i < n; i += 4) {
    const PhiloxWords four = draws.words(begin + i);
    for (int j = 0; j < 4; ++j) {
      words[i + j] = four.w[j];
    }
  }
}

// Codes as floats (as bits of a byte for e4m3), and the values that they stand for.
template <Format kFormat, bool kRandom>
MOE_INLINE void encode(
    const float* __restrict a, const uint32_t* words, Scaling s, int64_t n, int8_t* codes, float* values) {
  constexpr float kBound = largest_code(kFormat);
  for (int64_t i = 0; i < n; ++i) {
    const float scaled = (a[i] * s.lift) * s.inverse;
    if constexpr (kFormat == Format::kFp8) {
      const uint32_t code = to_e4m3(clamped(scaled, kBound), kRandom, kRandom ? words[i] : 0u);
      codes[i] = static_cast<int8_t>(code);
      values[i] = from_e4m3(code) * s.scale;
    } else {
      const float whole = kRandom ? round_random(scaled, to_uniform(words[i])) : round_even(scaled);
      const float code = clamped(whole, kBound);
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(code));
      values[i] = code * s.scale;
    }
  }
}

template <Format kFormat>
MOE_INLINE void pack(uint8_t* __restrict out, const int8_t* __restrict codes, int64_t n) {
  if constexpr (kFormat != Format::kInt4) {
    __builtin_memcpy(out, codes, n);
    return;
  }
  for (int64_t i = 0; i < (n + 1) / 2; ++i) {
    const uint32_t low = static_cast<uint8_t>(codes[2 * i]), high = static_cast<uint8_t>(codes[2 * i + 1]);
    out[i] = static_cast<uint8_t>((low & 15u) | high << 4);
  }
}

// Bit i % 8 of byte i / 8 is the sign of element i; zeros are positive.
MOE_INLINE void pack_signs(uint8_t* out, const float* a, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    uint8_t below[8];
    for (int64_t j = 0; j < 8; ++j) {
      below[j] = a[i + j] < 0;
    }
    uint32_t bits = 0;
    for (int64_t j = 0; j < 8; ++j) {
      bits |= static_cast<uint32_t>(below[j]) << j;
    }
    out[i / 8] = static_cast<uint8_t>(bits);
  }
}

MOE_INLINE void keep_rest(float* __restrict residual, const float* __restrict a, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    residual[i] = a[i] - values[i];
  }
}

template <typename T, Format kFormat>
uint32_t quantize(const QuantizeArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) float a[kLargestBlock], values[kLargestBlock];
  alignas(64) uint32_t words[kLargestBlock];
  alignas(64) int8_t codes[kLargestBlock];
  uint32_t most = 0;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t n = load_block(args, block, a), padded = (n + kLanes - 1) / kLanes * kLanes;
    const uint32_t key = largest_key(a, padded);
    most = key > most ? key : most;
    const Scaling s = scaling_of(bit_cast<float>(key), largest_code(kFormat));
    if (args.rng.state != nullptr) {
      draw(words, args.rng, block * args.block, n);
      encode<kFormat, true>(a, words, s, padded, codes, values);
    } else {
      encode<kFormat, false>(a, words, s, padded, codes, values);
    }
    args.scales[block] = s.scale;
    pack<kFormat>(args.codes + block * args.block / elements_per_byte(kFormat), codes, n);
    if (args.residual != nullptr) {
      keep_rest(args.residual + block * args.block, a, values, n);
    }
  }
  return most;
}

// The mean magnitude of each block. Far above one the terms are scaled down first: their sum might not be finite.
template <typename T>
uint32_t quantize_signs(const QuantizeArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) float a[kLargestBlock], values[kLargestBlock];
  uint32_t most = 0;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t n = load_block(args, block, a), padded = (n + kLanes - 1) / kLanes * kLanes;
    const uint32_t key = largest_key(a, padded);
    most = key > most ? key : most;
    const float factor = bit_cast<float>(key) > 0x1p100f ? 0x1p-32f : 1.0f;
    const float scale = magnitude_sum(a, padded, factor) / static_cast<float>(n) / factor;
    args.scales[block] = scale;
    pack_signs(args.codes + block * args.block / 8, a, (n + 7) / 8 * 8);
    if (args.residual != nullptr) {
      for (int64_t i = 0; i < padded; ++i) {
        values[i] = a[i] < 0 ? -scale : scale;
      }
      keep_rest(args.residual + block * args.block, a, values, n);
    }
  }
  return most;
}

template <typename T>
uint32_t largest(const QuantizeArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) float a[kLargestBlock];
  uint32_t most = 0;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t n = load_block(args, block, a);
    const uint32_t key = largest_key(a, (n + kLanes - 1) / kLanes * kLanes);
    most = key > most ? key : most;
  }
  return most;
}

template <Format kFormat>
MOE_INLINE void decode(float* __restrict values, const uint8_t* __restrict codes, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (kFormat == Format::kInt8) {
      values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
    } else if constexpr (kFormat == Format::kFp8) {
      values[i] = from_e4m3(codes[i]) * scale;
    } else if constexpr (kFormat == Format::kInt4) {
      values[i] = static_cast<float>(from_nibble(codes[i / 2] >> 4 * (i % 2))) * scale;
    } else {
      values[i] = (codes[i / 8] >> i % 8 & 1) != 0 ? -scale : scale;
    }
  }
}

template <typename T, Format kFormat>
void dequantize(const DequantizeArgs<T>& args, int64_t begin, int64_t end) {
  alignas(64) float values[kLargestBlock];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * args.block;
    const int64_t n = args.numel - first < args.block ? args.numel - first : args.block;
    decode<kFormat>(values, args.codes + first / elements_per_byte(kFormat), args.scales[block], n);
    T* __restrict out = args.out + first;
    if (args.add) {
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_acc<T>(to_acc(out[i]) + values[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_acc<T>(values[i]);
      }
    }
  }
}

template <typename T>
constexpr QuantizeKernels<T> kTable = {
    {quantize<T, Format::kInt8>, quantize<T, Format::kInt4>, quantize<T, Format::kFp8>, quantize_signs<T>},
    largest<T>,
    {dequantize<T, Format::kInt8>, dequantize<T, Format::kInt4>, dequantize<T, Format::kFp8>,
     dequantize<T, Format::kSign>}};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kTable<float>, kTable<BFloat16>, kTable<Half>};

} // namespace moe_ext::compression::quantize::MOE_ISA
