// Products of all experts in one launch, by offsets on the device. As many blocks as the device holds walk over the
// tiles of all experts' products, so that the host need not know the number of rows of an expert.
//   A tile is 128 x 128 of the output (64 x 64 for float32 and float64), a quarter for each warp; a step takes 16 or 32
//   terms of the sums. Operands are loaded by asynchronous copies, kStages - 1 steps ahead. Shared memory is swizzled
//   by 16 bytes, so that eight rows of a column lie in different banks. Rows that are no multiples of 16 bytes are
//   loaded element by element. 16 bits: mma.m16n8k16 with float32 sums. float32: x = high + middle + low, three
//   bfloat16 (exact above 2^-110). The three smallest of their nine products, below 2^-23 |x| |w|, are left out. The
//   other six are summed for each 16 terms alone, smallest first, and ordinary additions add these sums. Tensor cores
//   truncate instead of rounding, an error that would grow with the number of terms. float64: no tensor cores.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/launch.cuh"
#include "common/simd.h"
#include "common/tensor_cores.cuh"
#include "common/vec.cuh"
#include "common/warp.cuh"
#include "grouped_gemm/grouped_gemm_kernels.cuh"

namespace moe_ext::grouped_gemm {

constexpr int kProductThreads = 128; // 2 x 2 warps

template <typename T>
struct Tiling {
  using Part = T; // type of the numbers that are multiplied
  static constexpr int kSize = 128, kDepth = 32, kStages = 3, kParts = 1;
};
template <>
struct Tiling<float> {
  using Part = c10::BFloat16;
  static constexpr int kSize = 64, kDepth = 16, kStages = 2, kParts = 3;
};
template <>
struct Tiling<double> {
  using Part = double;
  static constexpr int kSize = 64, kDepth = 16, kStages = 2, kParts = 1;
};

// Arguments of a product. With kAlongA, out[r] = a[r] b[e]^T + bias[e] for each row r of an expert e, and zeros for the
// rows of no expert; otherwise out[e] = a_e^T b_e, sums over an expert's rows. With kAlongB, b is stored as [cols,
// depth], otherwise as [depth, cols]. With kAdd, only without kAlongA, out[e] += a_e^T b_e: the product is first
// rounded to T, so that the bits are those of a separate addition. An expert without rows keeps its sum.
template <typename T>
struct GroupedProduct {
  ExpertBounds experts;
  int64_t num_rows;                            // N, at most 2^31 - 1
  const T* a;                                  // [N, depth] or [N, rows]
  const T* b;                                  // [E, cols, depth], [E, depth, cols] or [N, cols]
  int64_t a_stride, b_stride, b_expert_stride; // between rows and experts, in elements
  const T* bias;                               // [E, cols] or null
  T* out;                                      // [N, cols] or [E, rows, cols]
  int rows, cols;                              // size of an expert's output; `rows` is not used with kAlongA
  int depth;                                   // terms of a sum with kAlongA; otherwise these are the expert's rows
  bool aligned; // all rows of a and b begin at multiples of 16 bytes and are multiples of 16 bytes long
  bool checked; // trap on offsets that decrease or leave the rows
};

template <typename T, int kNumRows, int kNumCols>
struct SharedTile {
  static constexpr int kPerChunk = kAccessBytes / sizeof(T), kChunks = kNumCols / kPerChunk;
  static constexpr int kRows = kNumRows, kCols = kNumCols, kElements = kNumRows * kNumCols;

  // Place of element (row, col).
  __device__ __forceinline__ static int at(int row, int col) {
    const int swizzle = kChunks >= 8 ? row % 8 : row / (8 / kChunks) % kChunks;
    return row * kNumCols + ((col / kPerChunk) ^ swizzle) * kPerChunk + col % kPerChunk;
  }
};

// A tile of an operand, for kSize rows or columns of the output and kDepth terms.
template <typename T, typename Of, bool kAlong>
using OperandTile =
    SharedTile<T, kAlong ? Tiling<Of>::kSize : Tiling<Of>::kDepth, kAlong ? Tiling<Of>::kDepth : Tiling<Of>::kSize>;

// Starts copies of rows that are `stride` apart to a tile, with zeros beyond num_rows and num_cols.
template <typename Tile, typename T>
__device__ __forceinline__ void fetch(const T* from, int64_t stride, int num_rows, int num_cols, bool aligned, T* to) {
  const int row = static_cast<int>(threadIdx.x) / Tile::kChunks;
  const int col = static_cast<int>(threadIdx.x) % Tile::kChunks * Tile::kPerChunk;
  constexpr int kStep = kProductThreads / Tile::kChunks;
  if (aligned) {
    const T* place = from + row * stride + col;
#pragma unroll
    for (int i = 0; i < Tile::kRows; i += kStep) {
      const bool real = row + i < num_rows && col < num_cols;
      copy_async(to + Tile::at(row + i, col), real ? place : from, real);
      place += kStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int i = row; i < Tile::kRows; i += kStep) {
    Vec<T, Tile::kPerChunk> values;
#pragma unroll
    for (int j = 0; j < Tile::kPerChunk; ++j) {
      values.v[j] = i < num_rows && col + j < num_cols ? from[i * stride + col + j] : static_cast<T>(0.0f);
    }
    store_shared(to + Tile::at(i, col), values);
  }
}

// Splits a tile of float32 into three consecutive tiles of bfloat16.
template <typename From, typename To>
__device__ __forceinline__ void split(const float* from, c10::BFloat16* to) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < To::kElements / 8; i += kProductThreads) {
    const int row = i / To::kChunks, col = i % To::kChunks * 8;
    Vec<c10::BFloat16, 8> parts[3];
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      const Vec<float, 4> x = load<4>(from + From::at(row, col + half));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float rest = x.v[j];
#pragma unroll
        for (auto& part : parts) {
          part.v[half + j] = static_cast<c10::BFloat16>(rest);
          rest -= static_cast<float>(part.v[half + j]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      store_shared(to + p * To::kElements + To::at(row, col), parts[p]);
    }
  }
}

// Row, and below column, at which a lane's 16 bytes of 16 x 16 stored elements begin for load_matrices. multiply_add
// takes the quarters of a down the columns first, so a and b differ.
template <bool kOfA, bool kAlong>
__device__ __forceinline__ int lane_row() {
  return kOfA == kAlong ? lane_id() % 16 : lane_id() % 8 + lane_id() / 16 * 8;
}
template <bool kOfA, bool kAlong>
__device__ __forceinline__ int lane_col() {
  return kOfA == kAlong ? lane_id() / 16 * 8 : lane_id() / 8 % 2 * 8;
}

template <typename Tile, bool kOfA, bool kAlong, typename Part>
__device__ __forceinline__ void load_operand(uint32_t (&to)[4], const Part* tile, int first, int term) {
  const int row = lane_row<kOfA, kAlong>() + (kAlong ? first : term);
  const int col = lane_col<kOfA, kAlong>() + (kAlong ? term : first);
  load_matrices<!kAlong>(to, tile + Tile::at(row, col));
}

// Sums of a warp, for a quarter of the block's tile.
template <typename T, bool kAlongA, bool kAlongB>
struct Sums {
  using Part = typename Tiling<T>::Part;
  using TileA = OperandTile<Part, T, kAlongA>;
  using TileB = OperandTile<Part, T, kAlongB>;
  static constexpr int kParts = Tiling<T>::kParts;
  static constexpr int kSide = Tiling<T>::kSize / 2;
  // By sixteen rows, by eight columns, and the four sums of them that multiply_add gives to a thread.
  float v[kSide / 16][kSide / 8][4] = {};

  __device__ __forceinline__ static int first_row() {
    return warp_id() / 2 * kSide;
  }
  __device__ __forceinline__ static int first_col() {
    return warp_id() % 2 * kSide;
  }

  __device__ __forceinline__ void add(const Part* a, const Part* b) {
#pragma unroll
    for (int term = 0; term < Tiling<T>::kDepth; term += 16) {
      uint32_t y[kParts][kSide / 16][4];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int n = 0; n < kSide / 16; ++n) {
          load_operand<TileB, false, kAlongB>(y[p][n], b + p * TileB::kElements, first_col() + 16 * n, term);
        }
      }
#pragma unroll
      for (int m = 0; m < kSide / 16; ++m) {
        uint32_t x[kParts][4];
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          load_operand<TileA, true, kAlongA>(x[p], a + p * TileA::kElements, first_row() + 16 * m, term);
        }
#pragma unroll
        for (int n = 0; n < kSide / 8; ++n) {
          float (&sum)[4] = v[m][n];
          const auto add_product = [&](float (&to)[4], int p, int q) {
            const uint32_t (&of_y)[4] = y[q][n / 2];
            multiply_add<Part>(to[0], to[1], to[2], to[3], x[p], of_y[n % 2 * 2], of_y[n % 2 * 2 + 1]);
          };
          if constexpr (kParts == 1) {
            add_product(sum, 0, 0);
          } else {
            float of_terms[4] = {};
#pragma unroll
            for (int order = kParts - 1; order >= 0; --order) {
#pragma unroll
              for (int p = 0; p <= order; ++p) {
                add_product(of_terms, p, order - p);
              }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              sum[e] += of_terms[e];
            }
          }
        }
      }
    }
  }

  // A thread has kPairs pairs of neighbouring columns in each of kRows rows.
  static constexpr int kRows = kSide / 8, kPairs = kSide / 8, kPairStep = 8, kRowStep = 8;

  __device__ __forceinline__ static int row() {
    return first_row() + lane_id() / 4;
  }
  __device__ __forceinline__ static int col() {
    return first_col() + lane_id() % 4 * 2;
  }
  __device__ __forceinline__ float value(int m, int pair, int i) const {
    return v[m / 2][pair][m % 2 * 2 + i];
  }
};

// Sums of a warp for float64, 32 x 32, without tensor cores.
template <bool kAlongA, bool kAlongB>
struct Sums<double, kAlongA, kAlongB> {
  using TileA = OperandTile<double, double, kAlongA>;
  using TileB = OperandTile<double, double, kAlongB>;
  static constexpr int kRows = 8, kPairs = 2, kPairStep = 16, kRowStep = 1;
  double v[8][kPairs][2] = {};

  __device__ __forceinline__ static int first_row() {
    return warp_id() / 2 * 32;
  }
  __device__ __forceinline__ static int first_col() {
    return warp_id() % 2 * 32;
  }
  __device__ __forceinline__ static int row() {
    return first_row() + lane_id() / 8 * 8;
  }
  __device__ __forceinline__ static int col() {
    return first_col() + lane_id() % 8 * 2;
  }

  __device__ __forceinline__ void add(const double* a, const double* b) {
#pragma unroll 1
    for (int term = 0; term < Tiling<double>::kDepth; ++term) {
      double y[2 * kPairs];
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        const int at = col() + n / 2 * kPairStep + n % 2;
        y[n] = b[kAlongB ? TileB::at(at, term) : TileB::at(term, at)];
      }
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const double x = a[kAlongA ? TileA::at(row() + m, term) : TileA::at(term, row() + m)];
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n) {
          v[m][n / 2][n % 2] += x * y[n];
        }
      }
    }
  }

  __device__ __forceinline__ double value(int m, int pair, int i) const {
    return v[m][pair][i];
  }
};

// Search of a warp in the consecutive tiles of all experts, 32 experts at a time.
template <bool kAlongA, typename T>
struct ExpertTiles {
  const GroupedProduct<T>& p;
  int first_expert = 0, expert = 0; // first of the current 32 experts; expert of the tile
  int begin = 0, num_rows = 0;      // rows of the expert of the tile
  int index = 0;                    // index of the tile among the tiles of its expert
  int tiles_before = 0;

  __device__ __forceinline__ explicit ExpertTiles(const GroupedProduct<T>& product) : p(product) {
  }

  // Finds a tile; returns false beyond the last one. `tile` must not decrease from call to call.
  __device__ __forceinline__ bool find(int tile) {
    constexpr int kSize = Tiling<T>::kSize;
    for (; first_expert < p.experts.num_experts; first_expert += kWarpSize) {
      const int e = first_expert + lane_id();
      int from = 0, rows = 0, count = 0;
      if (e < p.experts.num_experts) {
        const int64_t first = p.experts.begin(e), last = p.experts.end(e);
        if (p.checked && (first < 0 || first > last || last > p.num_rows)) {
          __trap();
        }
        from = static_cast<int>(min(max(first, int64_t{0}), p.num_rows));
        rows = max(static_cast<int>(min(last, p.num_rows)) - from, 0);
        count = ceil_div(kAlongA ? rows : p.rows, kSize) * ceil_div(p.cols, kSize);
      }
      const int up_to = tiles_before + warp_inclusive_scan(count);
      const unsigned behind = __ballot_sync(kFullMask, up_to > tile);
      if (behind != 0) {
        const int owner = __ffs(static_cast<int>(behind)) - 1;
        expert = first_expert + owner;
        index = tile - __shfl_sync(kFullMask, up_to - count, owner);
        begin = __shfl_sync(kFullMask, from, owner);
        num_rows = __shfl_sync(kFullMask, rows, owner);
        return true;
      }
      tiles_before = __shfl_sync(kFullMask, up_to, kWarpSize - 1);
    }
    return false;
  }
};

// Zeroes the rows before those of the first expert and after those of the last one. A warp handles a row.
template <typename T>
__device__ __forceinline__ void zero_other_rows(const GroupedProduct<T>& p) {
  constexpr int kWarps = kProductThreads / kWarpSize, kWide = kAccessBytes / sizeof(T);
  const int64_t first = min(max(p.experts.begin(0), int64_t{0}), p.num_rows);
  const int64_t last = min(max(p.experts.begin(p.experts.num_experts), first), p.num_rows);
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp_id(); i < first + p.num_rows - last;
       i += int64_t{gridDim.x} * kWarps) {
    T* const row = p.out + (i < first ? i : i - first + last) * p.cols;
    if (p.cols % kWide == 0) {
      for (int64_t col = lane_id() * kWide; col < p.cols; col += kWarpSize * kWide) {
        store(row + col, Vec<T, kWide>{});
      }
    } else {
      for (int64_t col = lane_id(); col < p.cols; col += kWarpSize) {
        row[col] = static_cast<T>(0.0f);
      }
    }
  }
}

// Adds the bias to the sums of a tile and writes them, rounded, to rows of the output; with kAdd, adds them there.
template <typename T, bool kAdd, typename SumsOf>
__device__ __forceinline__ void store_tile(
    const SumsOf& sums, const T* bias, T* out, int num_rows, int num_cols, int stride) {
  using Acc = acc_t<T>;
  // All indices are relative to the thread's first element. The compiler would keep indices that do not change from
  // tile to tile in registers.
  const int rows_left = num_rows - SumsOf::row(), cols_left = num_cols - SumsOf::col();
  const T* const own_bias = bias == nullptr ? nullptr : bias + SumsOf::col();
  T* place = out + int64_t{SumsOf::row()} * stride + SumsOf::col();
  // The address is checked, because a gradient to which is added may be a view at any element of a flat buffer.
  const bool in_pairs = stride % 2 == 0 && is_aligned(place, 2 * sizeof(T));
  Acc add[SumsOf::kPairs][2];
#pragma unroll
  for (int i = 0; i < SumsOf::kPairs * 2; ++i) {
    const int at = i / 2 * SumsOf::kPairStep + i % 2;
    add[i / 2][i % 2] = own_bias != nullptr && at < cols_left ? static_cast<Acc>(own_bias[at]) : Acc(0);
  }
#pragma unroll
  for (int m = 0; m < SumsOf::kRows; ++m) {
    if (m * SumsOf::kRowStep < rows_left) {
#pragma unroll
      for (int pair = 0; pair < SumsOf::kPairs; ++pair) {
        T first = static_cast<T>(sums.value(m, pair, 0) + add[pair][0]);
        T second = static_cast<T>(sums.value(m, pair, 1) + add[pair][1]);
        T* const to = place + pair * SumsOf::kPairStep;
        const int left = cols_left - pair * SumsOf::kPairStep;
        const bool whole = left > 1 && in_pairs;
        if constexpr (kAdd) {
          Vec<T, 2> there = {};
          if (whole) {
            there = load<2>(to);
          } else {
            there.v[0] = left > 0 ? to[0] : there.v[0];
            there.v[1] = left > 1 ? to[1] : there.v[1];
          }
          first = static_cast<T>(static_cast<Acc>(there.v[0]) + static_cast<Acc>(first));
          second = static_cast<T>(static_cast<Acc>(there.v[1]) + static_cast<Acc>(second));
        }
        if (whole) {
          store(to, Vec<T, 2>{{first, second}});
        } else if (left > 0) {
          to[0] = first;
          if (left > 1) {
            to[1] = second;
          }
        }
      }
    }
    place += int64_t{SumsOf::kRowStep} * stride;
  }
}

// Bytes of shared memory: the stages of both operands, followed by the parts of float32.
template <typename T>
constexpr size_t product_bytes() {
  using Of = Tiling<T>;
  const size_t elements = size_t{2} * Of::kSize * Of::kDepth;
  return elements * (Of::kStages * sizeof(T) + (Of::kParts > 1 ? Of::kParts * sizeof(typename Of::Part) : 0));
}

template <typename T, bool kAlongA, bool kAlongB, bool kAdd>
__global__ void __launch_bounds__(kProductThreads, 2) grouped_product_kernel(GroupedProduct<T> p) {
  using Of = Tiling<T>;
  using TileSums = Sums<T, kAlongA, kAlongB>;
  using StageA = OperandTile<T, T, kAlongA>;
  using StageB = OperandTile<T, T, kAlongB>;
  constexpr int kStage = StageA::kElements + StageB::kElements;
  MOE_DYNAMIC_SHARED(T, stages);
  if constexpr (kAlongA) {
    zero_other_rows(p);
  }
  ExpertTiles<kAlongA, T> tiles(p);
  for (int tile = static_cast<int>(blockIdx.x); tiles.find(tile); tile += static_cast<int>(gridDim.x)) {
    const int all_rows = kAlongA ? tiles.num_rows : p.rows, depth = kAlongA ? p.depth : tiles.num_rows;
    if (kAdd && depth == 0) {
      continue;
    }
    const int row_tiles = ceil_div(all_rows, Of::kSize);
    const int row = tiles.index % row_tiles * Of::kSize;
    const int col = tiles.index / row_tiles * Of::kSize;
    const int num_rows = min(all_rows - row, Of::kSize), num_cols = min(p.cols - col, Of::kSize);
    const int64_t begin = tiles.begin;
    const T* a = p.a + (kAlongA ? (begin + row) * p.a_stride : begin * p.a_stride + row);
    const T* b =
        p.b + (kAlongA ? tiles.expert * p.b_expert_stride : begin * p.b_stride) + (kAlongB ? col * p.b_stride : col);
    // Starts the copies of the next step of the tile.
    int left = depth, steps = ceil_div(depth, Of::kDepth), to_stage = 0, from_stage = 0;
    const auto start_step = [&] {
      if (left > 0) {
        const int terms = min(left, Of::kDepth);
        T* const to = stages + to_stage * kStage;
        fetch<StageA>(a, p.a_stride, kAlongA ? num_rows : terms, kAlongA ? terms : num_rows, p.aligned, to);
        fetch<StageB>(
            b, p.b_stride, kAlongB ? num_cols : terms, kAlongB ? terms : num_cols, p.aligned, to + StageA::kElements);
        a += kAlongA ? Of::kDepth : Of::kDepth * p.a_stride;
        b += kAlongB ? Of::kDepth : Of::kDepth * p.b_stride;
        left -= Of::kDepth;
        to_stage = to_stage + 1 == Of::kStages ? 0 : to_stage + 1;
      }
      commit_copies();
    };
    for (int step = 0; step < Of::kStages - 1; ++step) {
      start_step();
    }
    TileSums sums;
    const bool has_part = TileSums::first_row() < num_rows && TileSums::first_col() < num_cols;
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait_copies<Of::kStages - 2>();
      // After the barrier, all threads see the copies of this step, and no thread reads the stage that is filled next.
      __syncthreads();
      start_step();
      const T* const of_a = stages + from_stage * kStage;
      from_stage = from_stage + 1 == Of::kStages ? 0 : from_stage + 1;
      const T* const of_b = of_a + StageA::kElements;
      if constexpr (Of::kParts == 1) {
        if (has_part) {
          sums.add(of_a, of_b);
        }
      } else {
        auto* const parts_a = reinterpret_cast<typename Of::Part*>(stages + Of::kStages * kStage);
        auto* const parts_b = parts_a + Of::kParts * StageA::kElements;
        split<StageA, typename TileSums::TileA>(of_a, parts_a);
        split<StageB, typename TileSums::TileB>(of_b, parts_b);
        __syncthreads();
        if (has_part) {
          sums.add(parts_a, parts_b);
        }
      }
    }
    __syncthreads();
    T* const out = p.out + ((kAlongA ? tiles.begin : int64_t{tiles.expert} * p.rows) + row) * p.cols + col;
    const T* const bias = p.bias == nullptr ? nullptr : p.bias + int64_t{tiles.expert} * p.cols + col;
    store_tile<T, kAdd>(sums, bias, out, num_rows, num_cols, p.cols);
  }
}

template <typename T, bool kAlongA, bool kAlongB, bool kAdd = false>
void launch_grouped_product(const GroupedProduct<T>& p, cudaStream_t stream) {
  const int64_t size = Tiling<T>::kSize, experts = p.experts.num_experts;
  const int64_t row_tiles =
      kAlongA ? ceil_div(p.num_rows, size) + std::min(experts, p.num_rows) : experts * ceil_div(p.rows, size);
  if (p.cols == 0 || row_tiles == 0) {
    return;
  }
  const auto kernel = grouped_product_kernel<T, kAlongA, kAlongB, kAdd>;
  const int64_t most = resident_blocks(kernel, kProductThreads, product_bytes<T>());
  const int64_t num_tiles = row_tiles * ceil_div(p.cols, size);
  // The kernel counts tiles in 32 bits.
  if (num_tiles >= int64_t{1} << 30) {
    throw std::runtime_error(
        "grouped_mm: expected fewer than 2^30 tiles of 128 x 128 on CUDA, got " + std::to_string(num_tiles));
  }
  launch({Dim3(std::min(most, num_tiles)), Dim3(kProductThreads), product_bytes<T>(), stream}, kernel, p);
}

} // namespace moe_ext::grouped_gemm
