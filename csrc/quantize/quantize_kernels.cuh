// Block quantisers. Half a warp encodes a block: a lane takes four neighbours of each 64 elements and keeps them in its
// own part of shared memory, from which it computes the codes once the scale is known. For a block of signs, shuffles
// add magnitudes in the order of the CPU's loops: 16 sums of every 16th element.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "common/warp.cuh"
#include "quantize/quantize_tables.h"

namespace moe_ext::quantize {

constexpr int kThreads = 128;
constexpr int kLanes = 16; // lanes that share a block
constexpr int kFour = 4;
constexpr int kStep = kLanes * kFour;
constexpr int kAhead = 2; // steps that a lane loads before it stores the first
constexpr int kBlocksPerGroup = kThreads / kLanes;
constexpr int kRowPart = kWarpSize * kFour; // columns of a row per warp
// Elements of a block of a tensor with one shared scale; small, so that shared memory holds many blocks.
constexpr int64_t kSharedPart = 256;

template <typename T>
__device__ __forceinline__ Vec<float, kFour> to_floats(const Vec<T, kFour>& x) {
  Vec<float, kFour> out;
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    out.v[j] = to_acc(x.v[j]);
  }
  return out;
}

// Loads four elements from i on, with zeros from `end` on.
template <typename T>
__device__ __forceinline__ Vec<float, kFour> load_four(const T* x, int64_t i, int64_t end, bool aligned) {
  if (aligned && i + kFour <= end) {
    return to_floats(load<kFour>(x + i));
  }
  Vec<float, kFour> out = {};
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if (i + j < end) {
      out.v[j] = to_acc(x[i + j]);
    }
  }
  return out;
}

template <typename T>
__device__ __forceinline__ void store_four(T* out, int64_t i, int64_t end, bool aligned, const Vec<T, kFour>& four) {
  if (aligned && i + kFour <= end) {
    store(out + i, four);
    return;
  }
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if (i + j < end) {
      out[i + j] = four.v[j];
    }
  }
}

// Computes a = x plus residual of the four elements from i on.
template <typename T>
__device__ __forceinline__ Vec<float, kFour> owed_four(
    const QuantizeArgs<T>& args, int64_t i, int64_t end, bool aligned) {
  Vec<float, kFour> a = load_four(args.x, i, end, aligned);
  if (args.residual_in != nullptr) {
    const Vec<float, kFour> residual = load_four(args.residual_in, i, end, aligned);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      a.v[j] = residual.v[j] + a.v[j];
    }
  }
  return a;
}

// Sums of magnitudes, equal in the lanes q, q + 4, q + 8 and q + 12: sum j adds elements 16 i + 4 q + j in order of i.
struct MagnitudeSums {
  float sums[kFour] = {};

  __device__ __forceinline__ void add(const Vec<float, kFour>& a, float factor) {
    const int lane = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const float term = bit_cast<float>(key_of(a.v[j])) * factor;
#pragma unroll
      for (int r = 0; r < kLanes; r += 4) {
        sums[j] += __shfl_sync(kFullMask, term, lane + r, kLanes);
      }
    }
  }
  // Folds the 16 sums by adding halves to halves, in the order of the CPU's loops.
  __device__ __forceinline__ float total() const {
    float folded[kFour];
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      folded[j] = sums[j] + __shfl_xor_sync(kFullMask, sums[j], 2, kLanes);
      folded[j] += __shfl_xor_sync(kFullMask, folded[j], 1, kLanes);
    }
    return (folded[0] + folded[2]) + (folded[1] + folded[3]);
  }
};

// Writes the codes of the four elements from i on. Every lane must call it. If four codes are no whole number of bytes,
// every second lane writes the codes of the next lane, too.
template <Format kFormat>
__device__ __forceinline__ void store_codes(
    uint8_t* codes, int64_t i, int64_t end, bool aligned, const int8_t (&four)[kFour]) {
  constexpr int kBits = static_cast<int>(bits_of(kFormat));
  if constexpr (kBits < 8) {
    constexpr bool kPair = kFour * kBits % 8 != 0;
    constexpr int kBytes = (kPair ? 2 : 1) * kFour * kBits / 8;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      word |= (static_cast<uint32_t>(four[j]) & ((1u << kBits) - 1)) << kBits * j;
    }
    if constexpr (kPair) {
      word |= __shfl_xor_sync(kFullMask, word, 1, kLanes) << kFour * kBits;
    }
    if (i < end && (!kPair || lane_id() % 2 == 0)) {
      const int64_t first = i * kBits / 8, last = code_bytes(end, kFormat);
#pragma unroll
      for (int b = 0; b < kBytes; ++b) {
        if (first + b < last) {
          codes[first + b] = static_cast<uint8_t>(word >> 8 * b);
        }
      }
    }
  } else {
    Vec<uint8_t, kFour> bytes;
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      bytes.v[j] = static_cast<uint8_t>(four[j]);
    }
    store_four(codes, i, end, aligned, bytes);
  }
}

// Writes the codes and, if `write` is set, the residual of a lane's four elements.
template <Format kFormat, bool kRandom, typename T>
__device__ __forceinline__ void encode_four(
    const QuantizeArgs<T>& args, const TokenDraws& draws, int64_t i, int64_t end, bool aligned, bool write,
    const Vec<float, kFour>& a, Scaling s) {
  int8_t codes[kFour] = {};
  Vec<float, kFour> rest;
  PhiloxWords words = {};
  if constexpr (kRandom) {
    words = draws.words(args.offset + i);
  }
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if constexpr (kFormat == Format::kSign) {
      codes[j] = static_cast<int8_t>(a.v[j] < 0);
      rest.v[j] = a.v[j] - (a.v[j] < 0 ? -s.scale : s.scale);
    } else {
      codes[j] = code_of<kFormat, kRandom>(a.v[j], s, words.w[j]);
      rest.v[j] = a.v[j] - value_of<kFormat>(codes[j], s.scale);
    }
  }
  store_codes<kFormat>(args.codes, i, end, aligned, codes);
  if (write) {
    store_four(args.residual, i, end, aligned, rest);
  }
}

// Quantises blocks. `refused` is null, or points to a flag: if it is set, the residual stays unchanged.
template <Format kFormat, bool kRandom, typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(QuantizeArgs<T> args, int64_t num_blocks, bool aligned, const int* __restrict__ refused) {
  MOE_DYNAMIC_SHARED(float, shared);
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  float* const own = shared + group * args.block;
  const bool write = args.residual != nullptr && (refused == nullptr || *refused == 0);
  // Both halves of a warp stay in the loop as long as one has a block, because all lanes take part in the shuffles.
  for (int64_t first = int64_t{blockIdx.x} * kBlocksPerGroup + group / 2 * 2; first < num_blocks;
       first += int64_t{gridDim.x} * kBlocksPerGroup) {
    const int64_t block = first + group % 2, begin = block * args.block;
    const int64_t end = block < num_blocks ? min(begin + args.block, args.numel) : begin;
    uint32_t most = 0;
    for (int64_t i = begin + lane * kFour; i < begin + args.block; i += kAhead * kStep) {
      Vec<float, kFour> ahead[kAhead];
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        ahead[r] = owed_four(args, i + r * kStep, end, aligned);
      }
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        if (i + r * kStep < begin + args.block) {
          store_shared(own + (i + r * kStep - begin), ahead[r]);
        }
#pragma unroll
        for (int j = 0; j < kFour; ++j) {
          most = max(most, key_of(ahead[r].v[j]));
        }
      }
    }
    most = args.largest != nullptr ? *args.largest : warp_max<kLanes>(most);
    Scaling s;
    if constexpr (kFormat == Format::kSign) {
      const float factor = sign_factor(most);
      MagnitudeSums sums;
      for (int64_t i = lane * kFour; i < args.block; i += kStep) {
        sums.add(load<kFour>(own + i), factor);
      }
      s = {sign_scale(sums.total(), end - begin, factor), 1.0f, 0.0f};
    } else {
      s = scaling_of(bit_cast<float>(most), largest_code(kFormat));
    }
    if (lane == 0 && block < (args.largest != nullptr ? 1 : num_blocks)) {
      args.scales[block] = s.scale;
    }
    TokenDraws draws = {};
    if constexpr (kRandom) {
      draws = rounding_draws(args.rng, args.offset + begin);
    }
    for (int64_t i = begin + lane * kFour; i < begin + args.block; i += kStep) {
      encode_four<kFormat, kRandom>(args, draws, i, end, aligned, write, load<kFour>(own + (i - begin)), s);
    }
  }
}

// Sets *refused to 1 if an element is not finite; with kCheck, traps instead.
template <bool kCheck, typename T>
__global__ void __launch_bounds__(kThreads)
    check_finite_kernel(QuantizeArgs<T> args, bool aligned, int* __restrict__ refused) {
  bool found = false;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kFour; i < args.numel;
       i += int64_t{gridDim.x} * kThreads * kFour) {
    const Vec<float, kFour> a = owed_four(args, i, args.numel, aligned);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      found = found || key_of(a.v[j]) >= kInfinityKey<float>;
    }
  }
  if (found) {
    if constexpr (kCheck) {
      __trap();
    }
    atomicMax(refused, 1);
  }
}

// Raises *largest to the largest key of all elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(QuantizeArgs<T> args, bool aligned, int* __restrict__ largest) {
  int most = 0;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kFour; i < args.numel;
       i += int64_t{gridDim.x} * kThreads * kFour) {
    const Vec<float, kFour> a = owed_four(args, i, args.numel, aligned);
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      most = max(most, static_cast<int>(key_of(a.v[j])));
    }
  }
  most = warp_max(most);
  if (lane_id() == 0) {
    atomicMax(largest, most);
  }
}

// Decodes eight elements from i on, whose codes are whole bytes in every format. Codes are read byte by byte if no
// single access fits.
template <Format kFormat>
__device__ __forceinline__ void decode_eight(
    const uint8_t* codes, int64_t i, int64_t numel, bool aligned, float scale, float (&values)[8]) {
  constexpr int kBits = static_cast<int>(bits_of(kFormat)); // also the bytes of eight codes
  const uint8_t* const from = codes + i / 8 * kBits;
  uint32_t bytes[kBits + 1] = {};
  constexpr bool kFits = (kBits & (kBits - 1)) == 0;
  const bool at_once = kFits && aligned && i + 8 <= numel;
  if constexpr (kFits) {
    if (at_once) {
      const auto whole = load<kBits>(from);
#pragma unroll
      for (int j = 0; j < kBits; ++j) {
        bytes[j] = whole.v[j];
      }
    }
  }
  if (!at_once) {
    const int64_t left = code_bytes(numel, kFormat) - i / 8 * kBits;
#pragma unroll
    for (int j = 0; j < kBits; ++j) {
      if (j < left) {
        bytes[j] = from[j];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int byte = j * kBits / 8, shift = j * kBits % 8;
    const uint32_t bits = (bytes[byte] | bytes[byte + 1] << 8) >> shift;
    if constexpr (kFormat == Format::kSign) {
      values[j] = bit_cast<float>(bit_cast<uint32_t>(scale) ^ (bits & 1u) << 31);
    } else if constexpr (kBits < 8) {
      values[j] = static_cast<float>(from_low_bits<kBits>(bits)) * scale;
    } else {
      values[j] = value_of<kFormat>(static_cast<int8_t>(bits), scale);
    }
  }
}

template <Format kFormat, bool kAdd, typename T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeArgs<T> args, bool aligned) {
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 8; i < args.numel;
       i += int64_t{gridDim.x} * kThreads * 8) {
    float values[8];
    const float scale = args.scales[args.shared ? 0 : i / args.block];
    decode_eight<kFormat>(args.codes, i, args.numel, aligned, scale, values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = i + half * kFour;
      Vec<float, kFour> sum = {};
      if constexpr (kAdd) {
        sum = load_four(args.out, at, args.numel, aligned);
      }
      Vec<T, kFour> out;
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        const float value = values[half * kFour + j];
        out.v[j] = from_acc<T>(kAdd ? sum.v[j] + value : value);
      }
      store_four(args.out, at, args.numel, aligned, out);
    }
  }
}

inline Launch over_elements(int64_t numel, int per_thread, cudaStream_t stream) {
  const Dim3 grid = persistent_grid(ceil_div(numel, int64_t{kThreads} * per_thread), kThreads, device_properties());
  return {grid, Dim3(kThreads), 0, stream};
}

template <typename T>
bool aligned_for(const QuantizeArgs<T>& args) {
  return is_aligned(args.x, kFour * sizeof(T)) && is_aligned(args.residual_in, kAccessBytes) &&
         is_aligned(args.residual, kAccessBytes) && is_aligned(args.codes, kFour);
}

template <bool kCheck, typename T>
void launch_check_finite(const QuantizeArgs<T>& args, int* refused, cudaStream_t stream) {
  launch(over_elements(args.numel, kFour, stream), check_finite_kernel<kCheck, T>, args, aligned_for(args), refused);
}

template <typename T>
void launch_largest(const QuantizeArgs<T>& args, int* largest, cudaStream_t stream) {
  launch(over_elements(args.numel, kFour, stream), largest_kernel<T>, args, aligned_for(args), largest);
}

template <Format kFormat, typename T>
void launch_quantize(const QuantizeArgs<T>& args, const int* refused, cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.numel, args.block);
  const Dim3 grid = persistent_grid(ceil_div(blocks, int64_t{kBlocksPerGroup}), kThreads, device_properties());
  const size_t shared = sizeof(float) * kBlocksPerGroup * static_cast<size_t>(args.block);
  auto kernel = quantize_kernel<kFormat, false, T>;
  if constexpr (kFormat != Format::kSign) {
    kernel = args.rng.state != nullptr ? quantize_kernel<kFormat, true, T> : kernel;
  }
  launch({grid, Dim3(kThreads), shared, stream}, kernel, args, blocks, aligned_for(args), refused);
}

template <typename T>
void launch_quantize(Format format, const QuantizeArgs<T>& args, const int* refused, cudaStream_t stream) {
  constexpr decltype(&launch_quantize<Format::kInt8, T>) kRun[kNumFormats] = {
      launch_quantize<Format::kInt8, T>, launch_quantize<Format::kInt4, T>, launch_quantize<Format::kFp8, T>,
      launch_quantize<Format::kSign, T>, launch_quantize<Format::kInt6, T>, launch_quantize<Format::kInt3, T>,
      launch_quantize<Format::kInt2, T>};
  kRun[static_cast<int64_t>(format)](args, refused, stream);
}

template <Format kFormat, typename T>
void launch_dequantize(const DequantizeArgs<T>& args, cudaStream_t stream) {
  const bool aligned = is_aligned(args.out, kFour * sizeof(T)) && is_aligned(args.codes, 8);
  const auto kernel = args.add ? dequantize_kernel<kFormat, true, T> : dequantize_kernel<kFormat, false, T>;
  launch(over_elements(args.numel, 8, stream), kernel, args, aligned);
}

template <typename T>
void launch_dequantize(Format format, const DequantizeArgs<T>& args, cudaStream_t stream) {
  constexpr decltype(&launch_dequantize<Format::kInt8, T>) kRun[kNumFormats] = {
      launch_dequantize<Format::kInt8, T>, launch_dequantize<Format::kInt4, T>, launch_dequantize<Format::kFp8, T>,
      launch_dequantize<Format::kSign, T>, launch_dequantize<Format::kInt6, T>, launch_dequantize<Format::kInt3, T>,
      launch_dequantize<Format::kInt2, T>};
  kRun[static_cast<int64_t>(format)](args, stream);
}

__device__ __forceinline__ int64_t first_part() {
  return int64_t{blockIdx.x} * (kThreads / kWarpSize) + warp_id();
}

__device__ __forceinline__ int64_t part_stride() {
  return int64_t{gridDim.x} * (kThreads / kWarpSize);
}

// Encodes rows that carry their scales. A warp has 128 columns of a row, and a lane four of them. The whole warp shares
// a scale, or eight lanes do (kMx).
template <RowFormat kRow, typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(QuantizeRowsArgs<T> args, int64_t num_parts, bool aligned) {
  constexpr int64_t kBlock = row_block(kRow);
  constexpr int kSharing = static_cast<int>(kBlock) / kFour;
  const int64_t parts = ceil_div(args.dim, int64_t{kRowPart});
  for (int64_t part = first_part(); part < num_parts; part += part_stride()) {
    const int64_t row = part / parts, i = part % parts * kRowPart + lane_id() * kFour;
    uint8_t* const out = args.rows + row * row_bytes(args.dim, kRow);
    const Vec<float, kFour> a = load_four(args.x + row * args.dim, i, args.dim, aligned);
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      most = max(most, key_of(a.v[j]));
    }
    most = warp_max<kSharing>(most);
    const Scaling s = row_scaling<kRow>(most);
    Vec<uint8_t, kFour> codes;
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const int8_t code = code_of<code_format(kRow), false>(a.v[j], s, 0);
      codes.v[j] = most < kInfinityKey<float> ? static_cast<uint8_t>(code) : uint8_t{0};
    }
    store_four(out, i, args.dim, aligned, codes);
    if (lane_id() % kSharing == 0 && i < args.dim) {
      put_row_scale<kRow>(out + args.dim + i / kBlock * scale_bytes(kRow), most, s.scale);
    }
  }
}

template <RowFormat kRow, typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_rows_kernel(DequantizeRowsArgs<T> args, int64_t num_parts, bool aligned) {
  constexpr int64_t kBlock = row_block(kRow);
  const int64_t parts = ceil_div(args.dim, int64_t{kRowPart});
  for (int64_t part = first_part(); part < num_parts; part += part_stride()) {
    const int64_t row = part / parts, i = part % parts * kRowPart + lane_id() * kFour;
    if (i >= args.dim) {
      continue;
    }
    const uint8_t* const from = args.rows + row * row_bytes(args.dim, kRow);
    const float scale = get_row_scale<kRow>(from + args.dim + i / kBlock * scale_bytes(kRow));
    Vec<uint8_t, kFour> codes = {};
    if (aligned) {
      codes = load<kFour>(from + i);
    } else {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        codes.v[j] = i + j < args.dim ? from[i + j] : uint8_t{0};
      }
    }
    Vec<T, kFour> out;
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const float value = value_of<code_format(kRow)>(static_cast<int8_t>(codes.v[j]), scale);
      out.v[j] = from_acc<T>(within<kRow, T>(value));
    }
    store_four(args.out + row * args.dim, i, args.dim, aligned, out);
  }
}

// True if the addresses allow one access for a lane's four elements, and one for its four codes, in every row.
template <RowFormat kRow, typename T>
bool rows_fit(const T* x, const uint8_t* rows, int64_t dim) {
  return dim % kFour == 0 && row_bytes(dim, kRow) % kFour == 0 && is_aligned(x, kFour * sizeof(T)) &&
         is_aligned(rows, kFour);
}

template <typename Kernel, typename Args>
void launch_rows(Kernel kernel, const Args& args, int64_t num_rows, bool aligned, cudaStream_t stream) {
  const int64_t parts = num_rows * ceil_div(args.dim, int64_t{kRowPart});
  if (parts > 0) {
    launch(over_elements(parts * kRowPart, kFour, stream), kernel, args, parts, aligned);
  }
}

template <RowFormat kRow, typename T>
void launch_quantize_rows(const QuantizeRowsArgs<T>& args, int64_t num_rows, cudaStream_t stream) {
  launch_rows(quantize_rows_kernel<kRow, T>, args, num_rows, rows_fit<kRow>(args.x, args.rows, args.dim), stream);
}

template <typename T>
void launch_quantize_rows(RowFormat format, const QuantizeRowsArgs<T>& args, int64_t num_rows, cudaStream_t stream) {
  constexpr decltype(&launch_quantize_rows<RowFormat::kMx, T>) kRun[kNumRowFormats] = {
      launch_quantize_rows<RowFormat::kInt8, T>, launch_quantize_rows<RowFormat::kFp8, T>,
      launch_quantize_rows<RowFormat::kMx, T>};
  kRun[static_cast<int64_t>(format)](args, num_rows, stream);
}

template <RowFormat kRow, typename T>
void launch_dequantize_rows(const DequantizeRowsArgs<T>& args, int64_t num_rows, cudaStream_t stream) {
  launch_rows(dequantize_rows_kernel<kRow, T>, args, num_rows, rows_fit<kRow>(args.out, args.rows, args.dim), stream);
}

template <typename T>
void launch_dequantize_rows(
    RowFormat format, const DequantizeRowsArgs<T>& args, int64_t num_rows, cudaStream_t stream) {
  constexpr decltype(&launch_dequantize_rows<RowFormat::kMx, T>) kRun[kNumRowFormats] = {
      launch_dequantize_rows<RowFormat::kInt8, T>, launch_dequantize_rows<RowFormat::kFp8, T>,
      launch_dequantize_rows<RowFormat::kMx, T>};
  kRun[static_cast<int64_t>(format)](args, num_rows, stream);
}

} // namespace moe_ext::quantize
