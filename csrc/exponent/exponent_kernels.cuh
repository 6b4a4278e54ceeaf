// Coding of exponents. A block of threads takes a block of 8192 elements, whose exponents it keeps in shared memory.
// Encoding makes a histogram of the sample, finds its most frequent exponents by 22 rounds of a warp's maximum, and for
// each level a table from exponents to codes. A ballot makes 32 bits of a plane, and sums over the escapes of all
// ballots give their places in the next level. Blocks are encoded at the places where they would begin if none were
// compressed, and are moved after their sizes have been summed. Decoding goes from the last level to the first.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/scan.cuh"
#include "common/threads.cuh"
#include "exponent/exponent_tables.h"

namespace moe_ext::exponent {

constexpr int kBallot = 32;                                  // elements of a ballot, half a word
constexpr int kBallots = static_cast<int>(kBlock) / kBallot; // ballots of a block
static_assert(kBallots == kThreads, "a thread for each ballot of a block");

__device__ __forceinline__ int padded_bytes(int n) {
  return (n + 7) & ~7;
}

__device__ __forceinline__ int num_words(int n) {
  return ceil_div(n, 64);
}

// Packs the widths of a level, four bits per plan, because device code cannot read the host's array kPlans.
constexpr uint32_t widths_of_plans(int level) {
  uint32_t packed = 0;
  for (int plan = 0; plan < kNumPlans; ++plan) {
    packed |= static_cast<uint32_t>(kPlans[plan][level]) << (4 * plan);
  }
  return packed;
}
constexpr uint32_t kFirstWidths = widths_of_plans(0), kSecondWidths = widths_of_plans(1);
constexpr uint32_t kThirdWidths = widths_of_plans(2);

__device__ __forceinline__ int width_of(int plan, int level) {
  const uint32_t packed = level == 0 ? kFirstWidths : level == 1 ? kSecondWidths : kThirdWidths;
  return static_cast<int>(packed >> (4 * plan) & 15u);
}

// Calls f(half, i) for each element i of the words that begin in [0, n). A warp handles 32 neighbours, half a word.
template <typename F>
__device__ __forceinline__ void for_halves(int n, F&& f) {
  for (int half = warp_id(); half < 2 * num_words(n); half += kThreads / kWarpSize) {
    f(half, half * kBallot + lane_id());
  }
}

// Address of the half of plane `plane` that belongs to ballot `half`, if each word has `planes` planes.
__device__ __forceinline__ uint32_t* half_of_plane(uint8_t* at, int half, int planes, int plane) {
  return reinterpret_cast<uint32_t*>(at + (half / 2 * planes + plane) * 8 + half % 2 * 4);
}

__device__ __forceinline__ uint32_t load_half(const uint8_t* at, int half, int planes, int plane) {
  return *half_of_plane(const_cast<uint8_t*>(at), half, planes, plane);
}

// The parts of an element: its exponent and the remaining bits, which are written to the block and read from it.
struct BFloat16Parts {
  using Bits = uint16_t;
  static __device__ __forceinline__ int rest_bytes(int n) {
    return padded_bytes(n);
  }
  static __device__ __forceinline__ uint8_t split(uint8_t* rest, Bits x, int, int i, int n) {
    if (i < n) {
      rest[i] = static_cast<uint8_t>((x << 1) | (x >> 15));
    }
    return static_cast<uint8_t>(x >> 7);
  }
  static __device__ __forceinline__ Bits join(const uint8_t* rest, uint8_t exponent, int i, int) {
    return static_cast<Bits>(exponent << 7 | rest[i] >> 1 | (rest[i] & 1) << 15);
  }
};

struct FloatParts {
  using Bits = uint32_t;
  static __device__ __forceinline__ int rest_bytes(int n) {
    return padded_bytes(3 * n);
  }
  static __device__ __forceinline__ uint8_t split(uint8_t* rest, Bits x, int, int i, int n) {
    const Bits y = x << 1 | x >> 31;
    if (i < n) {
      reinterpret_cast<uint16_t*>(rest)[i] = static_cast<uint16_t>(y);
      rest[2 * n + i] = static_cast<uint8_t>(y >> 16);
    }
    return static_cast<uint8_t>(y >> 24);
  }
  static __device__ __forceinline__ Bits join(const uint8_t* rest, uint8_t exponent, int i, int n) {
    const Bits y = Bits{exponent} << 24 | Bits{rest[2 * n + i]} << 16 | reinterpret_cast<const uint16_t*>(rest)[i];
    return y >> 1 | y << 31;
  }
};

struct HalfParts {
  using Bits = uint16_t;
  static __device__ __forceinline__ int rest_bytes(int n) {
    return padded_bytes(n) + 3 * 8 * num_words(n);
  }
  static __device__ __forceinline__ uint8_t split(uint8_t* rest, Bits x, int half, int i, int n) {
    if (i < n) {
      rest[i] = static_cast<uint8_t>(x);
    }
    const uint32_t three = (x >> 8 & 3u) | (x >> 13 & 4u);
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
      const uint32_t bits = __ballot_sync(kFullMask, (three >> plane & 1u) != 0);
      if (lane_id() == plane) {
        *half_of_plane(rest + padded_bytes(n), half, 3, plane) = bits;
      }
    }
    return static_cast<uint8_t>(x >> 10 & 31);
  }
  static __device__ __forceinline__ Bits join(const uint8_t* rest, uint8_t exponent, int i, int n) {
    uint32_t three = 0;
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
      three |= (load_half(rest + padded_bytes(n), i / kBallot, 3, plane) >> i % kBallot & 1u) << plane;
    }
    return static_cast<Bits>((three & 4u) << 13 | (exponent & 31u) << 10 | (three & 3u) << 8 | rest[i]);
  }
};

// Symbols and plan of a block, shared by its threads during encoding.
struct Dictionary {
  uint8_t symbols[kMostSymbols];
  int plan; // -1 if the block is stored unchanged
};

// Finds the most frequent exponents of a sample, ties to the lowest exponent, and the plan with the fewest bits. Called
// by the first warp. Destroys `counts`.
__device__ __forceinline__ void choose_plan(int* counts, int sampled, Dictionary* found) {
  constexpr int kEach = 256 / kWarpSize;
  int mine = 0; // count of the exponent whose rank is the number of this lane
  uint32_t symbol = 0;
  for (int rank = 0; rank < kMostSymbols; ++rank) {
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = j * kWarpSize + lane_id();
      best = max(best, static_cast<uint32_t>(counts[at]) << 8 | static_cast<uint32_t>(255 - at));
    }
    best = __reduce_max_sync(kFullMask, best);
    const uint32_t at = 255 - (best & 255u);
    if (lane_id() == rank && best >> 8 != 0) {
      mine = static_cast<int>(best >> 8);
      symbol = at;
    }
    __syncwarp();
    if (lane_id() == 0) {
      counts[at] = 0;
    }
    __syncwarp();
  }
  // Unused places repeat the first symbol.
  const uint32_t top = __shfl_sync(kFullMask, symbol, 0);
  if (lane_id() < kMostSymbols) {
    found->symbols[lane_id()] = static_cast<uint8_t>(mine == 0 ? top : symbol);
  }
  const int up_to = warp_inclusive_scan(mine);
  const int plan = lane_id() % kNumPlans;
  int bits = 0, first = 0, left = sampled;
#pragma unroll
  for (int level = 0; level < kMostLevels; ++level) {
    const int width = width_of(plan, level);
    bits += width * left;
    first += (1 << width) - 1;
    const int known = __shfl_sync(kFullMask, up_to, max(first, 1) - 1);
    left = sampled - known;
  }
  bits += 8 * left;
  const uint32_t least =
      __reduce_min_sync(kFullMask, static_cast<uint32_t>(bits) * kNumPlans + static_cast<uint32_t>(plan));
  if (lane_id() == 0) {
    found->plan = static_cast<int>(least / kNumPlans) < 8 * sampled ? static_cast<int>(least % kNumPlans) : -1;
  }
}

// Encodes blocks and writes their sizes in bytes to `sizes`. Blocks are `stride` bytes apart, at multiples of 8.
template <typename Parts>
__global__ void __launch_bounds__(kThreads) encode_blocks_kernel(
    const typename Parts::Bits* __restrict__ x, int64_t numel, int64_t stride, uint8_t* __restrict__ out,
    int64_t* __restrict__ sizes) {
  using Bits = typename Parts::Bits;
  MOE_SHARED(uint8_t, levels, 2 * kBlock);
  MOE_SHARED(int, counts, 256);
  MOE_SHARED(uint8_t, codes, 256);
  MOE_SHARED(uint32_t, escapes, kBallots);
  MOE_SHARED(int, offsets, kBallots);
  MOE_SHARED(Dictionary, chosen, 1);
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t block = blockIdx.x; block * kBlock < numel; block += gridDim.x) {
    const int n = static_cast<int>(min(kBlock, numel - block * kBlock));
    const Bits* const from = x + block * kBlock;
    uint8_t* const dst = out + block * stride;
    uint8_t* const rest = dst + kBlockHeader;
    const int header = static_cast<int>(kBlockHeader), rest_bytes = Parts::rest_bytes(n);
    const int raw_bytes = padded_bytes(n * static_cast<int>(sizeof(Bits))), raw_size = header + raw_bytes;
    int plan = -1, size = raw_size;
    if (rest_bytes < raw_bytes) {
      counts[thread] = 0;
      // Writes zeros for the padding of all parts; other bytes of these words are overwritten later.
      if (thread < 8) {
        rest[padded_bytes(n) - 8 + thread] = 0;
        rest[rest_bytes - 8 + thread] = 0;
      }
      __syncthreads();
      for_halves(n, [&](int half, int i) { levels[i] = Parts::split(rest, i < n ? from[i] : Bits{0}, half, i, n); });
      __syncthreads();
      for (int i = thread * static_cast<int>(kStride); i < n; i += kThreads * static_cast<int>(kStride)) {
        atomicAdd(&counts[levels[i]], 1);
      }
      __syncthreads();
      if (warp_id() == 0) {
        choose_plan(counts, ceil_div(n, static_cast<int>(kStride)), chosen);
      }
      __syncthreads();
      plan = chosen->plan;
    }
    int at = header + rest_bytes, count = n, turn = 0, first = 0;
    for (int level = 0; plan >= 0 && level < kMostLevels && width_of(plan, level) != 0; ++level) {
      const int width = width_of(plan, level), symbols = (1 << width) - 1, words = num_words(count);
      // A block that would not shrink is stored unchanged, so that no block reaches into the next one.
      if (at + 8 * width * words >= raw_size) {
        plan = -1;
        break;
      }
      const uint8_t* const own = levels + turn * kBlock;
      uint8_t* const next = levels + (1 - turn) * kBlock;
      int code = symbols;
      for (int c = symbols - 1; c >= 0; --c) {
        code = chosen->symbols[first + c] == thread ? c : code;
      }
      codes[thread] = static_cast<uint8_t>(code);
      __syncthreads();
      for_halves(count, [&](int half, int i) {
        const int mine = i < count ? codes[own[i]] : 0;
        uint32_t all = kFullMask;
        for (int plane = 0; plane < width; ++plane) {
          const uint32_t bits = __ballot_sync(kFullMask, (mine >> plane & 1) != 0);
          all &= bits;
          if (lane_id() == plane) {
            *half_of_plane(dst + at, half, width, plane) = bits;
          }
        }
        if (lane_id() == 0) {
          escapes[half] = all;
        }
      });
      __syncthreads();
      int total = 0;
      offsets[thread] = block_exclusive_scan<kThreads>(thread < 2 * words ? __popc(escapes[thread]) : 0, total);
      __syncthreads();
      for_halves(count, [&](int half, int i) {
        if ((escapes[half] >> lane_id() & 1u) != 0) {
          next[offsets[half] + __popc(escapes[half] & lanes_below())] = own[i];
        }
      });
      __syncthreads();
      at += 8 * width * words;
      first += symbols;
      count = total;
      turn = 1 - turn;
    }
    if (plan >= 0 && at + padded_bytes(count) < raw_size) {
      for (int i = thread; i < padded_bytes(count); i += kThreads) {
        dst[at + i] = i < count ? levels[turn * kBlock + i] : uint8_t{0};
      }
      if (thread < header) {
        dst[thread] = thread == 0              ? static_cast<uint8_t>(plan + 1)
                      : thread <= kMostSymbols ? chosen->symbols[thread - 1]
                                               : uint8_t{0};
      }
      size = at + padded_bytes(count);
    } else {
      if (thread < header) {
        dst[thread] = 0;
      }
      if (thread < 8) {
        rest[raw_bytes - 8 + thread] = 0;
      }
      __syncthreads();
      for (int i = thread; i < n; i += kThreads) {
        reinterpret_cast<Bits*>(rest)[i] = from[i];
      }
    }
    if (thread == 0) {
      sizes[block] = size;
    }
    __syncthreads();
  }
}

// Writes the head of a payload, `table` bytes, and moves the blocks behind it, without gaps. starts [blocks + 1] holds
// the places of the blocks. Writes the size of the payload to `num_bytes` unless it is null.
static __global__ void __launch_bounds__(kThreads) move_blocks_kernel(
    const uint8_t* __restrict__ from, int64_t stride, const int64_t* __restrict__ starts, int64_t blocks, Header header,
    int64_t table, uint8_t* __restrict__ payload, int64_t* __restrict__ num_bytes) {
  auto* const sizes = reinterpret_cast<uint32_t*>(payload + kHeader);
  if (global_thread() == 0) {
    *reinterpret_cast<Header*>(payload) = header;
    if (num_bytes != nullptr) {
      *num_bytes = table + starts[blocks];
    }
    if (blocks % 2 != 0) {
      sizes[blocks] = 0; // padding
    }
  }
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t size = starts[block + 1] - starts[block];
    const auto* const source = reinterpret_cast<const uint64_t*>(from + block * stride);
    auto* const target = reinterpret_cast<uint64_t*>(payload + table + starts[block]);
    for (int64_t i = threadIdx.x; i < size / 8; i += kThreads) {
      target[i] = source[i];
    }
    if (threadIdx.x == 0) {
      sizes[block] = static_cast<uint32_t>(size);
    }
  }
}

// Writes to starts [blocks] the size of each block by the head of a payload. If the head is not the expected one,
// writes zeros and sets `wrong` to 0.
static __global__ void __launch_bounds__(kThreads) read_head_kernel(
    const uint8_t* __restrict__ payload, int64_t blocks, Header expected, int64_t* __restrict__ starts,
    unsigned long long* __restrict__ wrong) {
  const Header head = *reinterpret_cast<const Header*>(payload);
  const bool sound = head.magic == expected.magic && head.kind == expected.kind && head.numel == expected.numel;
  const auto* const sizes = reinterpret_cast<const uint32_t*>(payload + kHeader);
  for (int64_t block = global_thread(); block < blocks; block += num_threads()) {
    starts[block] = sound ? int64_t{sizes[block]} : 0;
  }
  if (!sound && global_thread() == 0) {
    atomicMin(wrong, 0ull);
  }
}

// Clips blocks to the end of the payload. A block that reached beyond has a wrong size then and counts as damaged.
static __global__ void __launch_bounds__(kThreads)
    clip_starts_kernel(int64_t* __restrict__ starts, int64_t blocks, int64_t bytes) {
  for (int64_t i = global_thread(); i <= blocks; i += num_threads()) {
    starts[i] = min(starts[i], bytes);
  }
}

// Decodes the blocks that begin at starts [blocks + 1]. Lowers `wrong` to the number of the lowest damaged block.
template <typename Parts>
__global__ void __launch_bounds__(kThreads) decode_blocks_kernel(
    typename Parts::Bits* __restrict__ out, int64_t numel, const uint8_t* __restrict__ payload,
    const int64_t* __restrict__ starts, unsigned long long* __restrict__ wrong) {
  using Bits = typename Parts::Bits;
  MOE_SHARED(uint8_t, levels, 2 * kBlock);
  MOE_SHARED(uint32_t, escapes, kMostLevels* kBallots);
  MOE_SHARED(int, offsets, kMostLevels* kBallots);
  MOE_SHARED(int, words_of_level, kMostLevels);
  constexpr int kItem = sizeof(Bits);
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t block = blockIdx.x; block * kBlock < numel; block += gridDim.x) {
    const int n = static_cast<int>(min(kBlock, numel - block * kBlock));
    const int64_t start = starts[block], size = starts[block + 1] - start;
    const uint8_t* const src = payload + start;
    const uint8_t* const rest = src + kBlockHeader;
    Bits* const to = out + block * kBlock;
    // Sound blocks take multiples of 8 bytes. After one that does not, no block is aligned, so none can be read.
    bool sound = start % 8 == 0 && size % 8 == 0 && size >= kBlockHeader && src[0] <= kNumPlans;
    const int plan = sound ? src[0] - 1 : -1;
    int at = static_cast<int>(kBlockHeader) + (plan < 0 ? padded_bytes(n * kItem) : Parts::rest_bytes(n));
    int count = plan < 0 ? 0 : n, level = 0, first = 0;
    for (; sound && plan >= 0 && level < kMostLevels && width_of(plan, level) != 0; ++level) {
      const int width = width_of(plan, level), words = num_words(count);
      sound = at + 8 * width * words <= size;
      uint32_t all = sound && thread < 2 * words ? kFullMask : 0;
      for (int plane = 0; all != 0 && plane < width; ++plane) {
        all &= load_half(src + at, thread, width, plane);
      }
      if (thread == 0) {
        words_of_level[level] = words;
      }
      escapes[level * kBallots + thread] = all;
      offsets[level * kBallots + thread] = block_exclusive_scan<kThreads>(__popc(all), count);
      at += 8 * width * words;
      first += (1 << width) - 1;
    }
    // If `count` exceeds n, the padding holds escape codes, which belong to no element.
    sound = sound && count <= n && at + padded_bytes(count) == size;
    level = sound ? level : 0;
    for (int i = thread; sound && i < count; i += kThreads) {
      levels[i] = src[at + i];
    }
    __syncthreads();
    int turn = 0;
    while (level-- > 0) {
      const int width = width_of(plan, level), words = words_of_level[level];
      first -= (1 << width) - 1;
      at -= 8 * width * words;
      const uint8_t* const below = levels + turn * kBlock;
      uint8_t* const own = levels + (1 - turn) * kBlock;
      for_halves(64 * words, [&](int half, int i) {
        const uint32_t marks = escapes[level * kBallots + half];
        int code = 0;
        for (int plane = 0; plane < width; ++plane) {
          code |= static_cast<int>(load_half(src + at, half, width, plane) >> lane_id() & 1u) << plane;
        }
        own[i] = (marks >> lane_id() & 1u) != 0
                     ? below[offsets[level * kBallots + half] + __popc(marks & lanes_below())]
                     : src[1 + first + code];
      });
      __syncthreads();
      turn = 1 - turn;
    }
    for (int i = thread; sound && i < n; i += kThreads) {
      to[i] = plan < 0 ? reinterpret_cast<const Bits*>(rest)[i] : Parts::join(rest, levels[turn * kBlock + i], i, n);
    }
    if (!sound && thread == 0) {
      atomicMin(wrong, static_cast<unsigned long long>(block));
    }
    __syncthreads();
  }
}

inline Launch over_element_blocks(int64_t blocks, cudaStream_t stream) {
  return {persistent_grid(blocks, kThreads, device_properties()), Dim3(kThreads), 0, stream};
}

} // namespace moe_ext::exponent
