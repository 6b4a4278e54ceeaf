// Kernels of deltas. Writing: elements that differ become bits of a map, 32 in each word. A block processes a segment
// of 8192 elements, and a thread one word of the map. A chunk has 32 segments. One warp sums over a chunk's segments,
// one for each lane: changes, entries, and the place of the last change. Then every word knows where its entries and
// values go. Reading: one thread walks the headers, because each header gives the place of the next. A block processes
// a chunk, whose places are prefix sums of its gaps.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/scan.cuh"
#include "common/threads.cuh"
#include "delta/delta_format.h"

namespace moe_ext::delta {

constexpr int64_t kWord = 32;
constexpr int64_t kSegment = kThreads * kWord; // elements
static_assert(kChunk == kWarpSize * kSegment, "a lane for each segment of a chunk");
static_assert(kSegment < 0xFFFF, "a gap inside a segment is one wide entry");

inline int64_t num_segments(int64_t numel) {
  return ceil_div(numel, kSegment);
}

// Changes of a segment. Places count from the start of its chunk.
struct Segment {
  int32_t count;
  int32_t skips; // one-byte entries that stand for no change, between the segment's changes
  int32_t first; // place of the first change, if there is one
  int32_t next;  // the place behind the last change
  // The following members are about what precedes the segment in its chunk.
  int32_t next_before;
  int32_t entries_before;
  int32_t count_before;
  int32_t wide; // 1 if the chunk has two-byte entries
};

template <typename T>
__device__ __forceinline__ T warp_inclusive_max(T value) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const T other = __shfl_up_sync(kFullMask, value, offset);
    value = lane_id() >= offset ? max(value, other) : value;
  }
  return value;
}

// Maximum of the values of lower threads, at least `floor`.
__device__ __forceinline__ int32_t block_exclusive_max(int32_t value, int32_t floor) {
  MOE_SHARED(int32_t, warp_tops, kThreads / kWarpSize);
  const int32_t inclusive = warp_inclusive_max(value);
  if (lane_id() == kWarpSize - 1) {
    warp_tops[warp_id()] = inclusive;
  }
  __syncthreads();
  int32_t below = __shfl_up_sync(kFullMask, inclusive, 1);
  below = lane_id() == 0 ? floor : max(below, floor);
  for (int warp = 0; warp < warp_id(); ++warp) {
    below = max(below, warp_tops[warp]);
  }
  // The next call overwrites `warp_tops`, which other warps may still read.
  __syncthreads();
  return below;
}

// changed [words of whole segments]: a bit is set if x and base differ.
template <typename Bits>
__global__ void __launch_bounds__(kThreads) compare_kernel(
    const Bits* __restrict__ x, const Bits* __restrict__ base, int64_t numel, uint32_t* __restrict__ changed) {
  for (int64_t segment = blockIdx.x; segment * kSegment < numel; segment += gridDim.x) {
    const int64_t start = segment * kSegment + int64_t{warp_id()} * kWarpSize * kWord;
    uint32_t own = 0;
#pragma unroll 8
    for (int w = 0; w < kWarpSize; ++w) {
      const int64_t i = start + w * kWord + lane_id();
      const uint32_t word = __ballot_sync(kFullMask, i < numel && x[i] != base[i]);
      own = w == lane_id() ? word : own;
    }
    changed[segment * kThreads + threadIdx.x] = own;
  }
}

// Sets a bit of `changed`, zeros at first, for each place. `wrong` becomes the first index whose place does not ascend
// in [0, numel), if that is lower.
static __global__ void __launch_bounds__(kThreads) mark_places_kernel(
    const int64_t* __restrict__ places, int64_t count, int64_t numel, uint32_t* __restrict__ changed,
    unsigned long long* __restrict__ wrong) {
  for (int64_t i = global_thread(); i < count; i += num_threads()) {
    const int64_t place = places[i];
    if (place >= numel || place < (i == 0 ? 0 : places[i - 1] + 1) || place < 0) {
      atomicMin(wrong, static_cast<unsigned long long>(i));
    } else {
      // Places differ, so that the sum of their bits is the bitwise or.
      atomicAdd(&changed[place / kWord], 1u << place % kWord);
    }
  }
}

// A thread's word of the map of changes.
struct OwnWord {
  uint32_t bits;
  int32_t start; // place of its first element in the chunk
  int32_t count;
  __device__ int32_t first() const {
    return start + __ffs(static_cast<int>(bits)) - 1;
  }
  __device__ int32_t next() const {
    return bits == 0 ? 0 : start + kWarpSize - __clz(static_cast<int>(bits));
  }
};

__device__ __forceinline__ OwnWord own_word(const uint32_t* __restrict__ changed, int64_t segment) {
  const uint32_t bits = changed[segment * kThreads + threadIdx.x];
  const auto start = static_cast<int32_t>(segment % kWarpSize * kSegment + threadIdx.x * kWord);
  return {bits, start, __popc(bits)};
}

static __global__ void __launch_bounds__(kThreads)
    count_segments_kernel(const uint32_t* __restrict__ changed, int64_t num_segments, Segment* __restrict__ segments) {
  for (int64_t segment = blockIdx.x; segment < num_segments; segment += gridDim.x) {
    const OwnWord own = own_word(changed, segment);
    int32_t count = 0, skips = 0;
    const int32_t below = block_exclusive_scan<kThreads>(own.count, count);
    const int32_t before = block_exclusive_max(own.next(), 0);
    const bool joins = own.count > 0 && below > 0;
    block_exclusive_scan<kThreads>(joins ? (own.first() - before) / static_cast<int32_t>(skip_entry(false)) : 0, skips);
    Segment& found = segments[segment];
    if (threadIdx.x == 0) {
      found.count = count;
      found.skips = skips;
    }
    if (own.count > 0 && below == 0) {
      found.first = own.first();
    }
    if (own.count > 0 && below + own.count == count) {
      found.next = own.next();
    }
  }
}

// One warp for each chunk: completes its segments, and writes headers [chunks] and the size in bytes of each chunk.
static __global__ void __launch_bounds__(kThreads) plan_chunks_kernel(
    Segment* __restrict__ segments, int64_t num_segments, int64_t item_bytes, Header* __restrict__ headers,
    int64_t* __restrict__ sizes) {
  constexpr int kWarps = kThreads / kWarpSize;
  for (int64_t chunk = int64_t{blockIdx.x} * kWarps + warp_id(); chunk * kWarpSize < num_segments;
       chunk += int64_t{gridDim.x} * kWarps) {
    const int64_t at = chunk * kWarpSize + lane_id();
    const bool inside = at < num_segments && segments[at].count > 0;
    const int32_t count = inside ? segments[at].count : 0;
    const int32_t tops = warp_inclusive_max(inside ? segments[at].next : 0);
    const int32_t above = __shfl_up_sync(kFullMask, tops, 1);
    const int32_t before = lane_id() == 0 ? 0 : above;
    const int32_t gap = inside ? segments[at].first - before : 0;
    const int32_t narrow = inside ? count + segments[at].skips + gap / static_cast<int32_t>(skip_entry(false)) : 0;
    const int32_t wide = inside ? count + gap / static_cast<int32_t>(skip_entry(true)) : 0;
    const int32_t counts = warp_inclusive_scan(count), narrows = warp_inclusive_scan(narrow);
    const int32_t wides = warp_inclusive_scan(wide);
    const int32_t all_wide = __shfl_sync(kFullMask, wides, kWarpSize - 1);
    const bool is_wide = 2 * all_wide < __shfl_sync(kFullMask, narrows, kWarpSize - 1);
    if (at < num_segments) {
      segments[at].next_before = before;
      segments[at].entries_before = is_wide ? wides - wide : narrows - narrow;
      segments[at].count_before = counts - count;
      segments[at].wide = is_wide;
    }
    if (lane_id() == kWarpSize - 1) {
      const int32_t entries = is_wide ? wides : narrows;
      headers[chunk] = {
          static_cast<uint32_t>(counts), static_cast<uint32_t>(entries), static_cast<uint8_t>(is_wide), {0, 0, 0}};
      sizes[chunk] = kHeader + entries * (1 + int64_t{is_wide}) + counts * item_bytes;
    }
  }
}

// Store to, and load from, any address.
template <typename T>
__device__ __forceinline__ void store_bytes(uint8_t* to, const T& value) {
  uint8_t bytes[sizeof(T)];
  memcpy(bytes, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    to[i] = bytes[i];
  }
}

template <typename T>
__device__ __forceinline__ T load_bytes(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}

// Values of an encoded tensor: x, or the bits of x xor base.
template <typename Bits>
struct NewValues {
  const Bits* x;
  const Bits* base; // null if values are stored as they are
  __device__ int64_t first_of(int64_t) const {
    return 0;
  }
  __device__ Bits at(int64_t place, int64_t) const {
    return base == nullptr ? x[place] : static_cast<Bits>(x[place] ^ base[place]);
  }
};

// Given values, in the order of their places.
template <typename Bits>
struct GivenValues {
  const Bits* values;
  const int64_t* places;
  int64_t count;
  __device__ int64_t first_of(int64_t chunk) const {
    return first_from(places, count, chunk * kChunk);
  }
  __device__ Bits at(int64_t, int64_t number) const {
    return values[number];
  }
};

template <bool kWide>
__device__ __forceinline__ void store_entry(uint8_t* gaps, int64_t i, uint32_t entry) {
  gaps[(1 + kWide) * i] = static_cast<uint8_t>(entry);
  if constexpr (kWide) {
    gaps[2 * i + 1] = static_cast<uint8_t>(entry >> 8);
  }
}

// Writes the entries and values of a thread's word of the map.
template <bool kWide, typename Bits, typename Values>
__device__ __forceinline__ void write_segment(
    const OwnWord& own, const Segment& segment, int64_t chunk, const Values& values, const Header& header,
    uint8_t* out) {
  constexpr auto kSkip = static_cast<int32_t>(skip_entry(kWide));
  int32_t total = 0;
  const int32_t count = segment.count_before + block_exclusive_scan<kThreads>(own.count, total);
  int32_t next = block_exclusive_max(own.next(), segment.next_before);
  // Only the first change of a word may need entries that skip, because changes within a word are close enough for one
  // entry.
  const int32_t skips = own.count > 0 ? (own.first() - next) / kSkip : 0;
  int64_t entry = segment.entries_before + block_exclusive_scan<kThreads>(own.count + skips, total);
  uint8_t* const gaps = out + kHeader;
  uint8_t* value = gaps + (1 + kWide) * int64_t{header.num_gaps} + count * static_cast<int64_t>(sizeof(Bits));
  int64_t number = own.count > 0 ? values.first_of(chunk) + count : 0;
  for (int32_t i = 0; i < skips; ++i) {
    store_entry<kWide>(gaps, entry++, skip_entry(kWide));
  }
  next += skips * kSkip;
  for (uint32_t left = own.bits; left != 0; left &= left - 1) {
    const int32_t place = own.start + __ffs(static_cast<int>(left)) - 1;
    store_entry<kWide>(gaps, entry++, static_cast<uint32_t>(place - next));
    store_bytes<Bits>(value, values.at(chunk * kChunk + place, number++));
    value += sizeof(Bits);
    next = place + 1;
  }
}

// starts [chunks]: where each chunk begins in the payload.
template <typename Bits, typename Values>
__global__ void __launch_bounds__(kThreads) write_chunks_kernel(
    const uint32_t* __restrict__ changed, int64_t num_segments, const Segment* __restrict__ segments,
    const Header* __restrict__ headers, const int64_t* __restrict__ starts, Values values,
    uint8_t* __restrict__ payload) {
  for (int64_t at = blockIdx.x; at < num_segments; at += gridDim.x) {
    const int64_t chunk = at / kWarpSize;
    const Header header = headers[chunk];
    uint8_t* const out = payload + starts[chunk];
    if (at % kWarpSize == 0 && threadIdx.x == 0) {
      store_bytes(out, header);
    }
    const OwnWord own = own_word(changed, at);
    if (header.wide != 0) {
      write_segment<true, Bits>(own, segments[at], chunk, values, header, out);
    } else {
      write_segment<false, Bits>(own, segments[at], chunk, values, header, out);
    }
  }
}

// -- reading -----------------------------------------------------------------------------------------

// Writes chunks [num_chunks], the counts [num_chunks] of their changes, and the verdict. Runs in one thread.
static __global__ void __launch_bounds__(kWarpSize) walk_headers_kernel(
    const uint8_t* __restrict__ payload, int64_t size, int64_t numel, int64_t item_bytes, Chunk* __restrict__ chunks,
    int64_t* __restrict__ counts, Verdict* __restrict__ verdict) {
  if (threadIdx.x == 0) {
    *verdict = for_each_chunk(payload, size, numel, item_bytes, [&](int64_t i, const Chunk& chunk) {
      chunks[i] = chunk;
      counts[i] = chunk.count;
    });
  }
}

constexpr int kEntries = 8; // that a thread reads at a time

// Calls f(place in the chunk, number of the change) for each change of a chunk. All threads of the block must call it,
// and each handles some changes. Returns the number of changes.
template <typename F>
__device__ __forceinline__ int64_t for_each_change(const Chunk& chunk, F&& f) {
  const uint32_t skip = skip_entry(chunk.wide);
  int64_t place = 0, number = 0;
  for (int64_t base = 0; base < chunk.num_gaps; base += int64_t{kThreads} * kEntries) {
    uint32_t gaps[kEntries];
    int32_t advance = 0, count = 0, advances = 0, changes = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      const int64_t i = base + int64_t{threadIdx.x} * kEntries + j;
      // Entries behind the end are skips, which change nothing.
      gaps[j] = i >= chunk.num_gaps ? skip
                : chunk.wide        ? load_bytes<uint16_t>(chunk.gaps + 2 * i)
                                    : uint32_t{chunk.gaps[i]};
      advance += static_cast<int32_t>(gaps[j]) + (gaps[j] != skip);
      count += gaps[j] != skip;
    }
    int64_t at = place + block_exclusive_scan<kThreads>(advance, advances);
    int64_t own = number + block_exclusive_scan<kThreads>(count, changes);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      at += gaps[j];
      if (gaps[j] != skip) {
        f(at++, own++);
      }
    }
    place += advances;
    number += changes;
  }
  return number;
}

// Checks the places of a payload whose headers are right. `wrong` becomes 1 + the highest chunk with wrong places.
static __global__ void __launch_bounds__(kThreads) check_places_kernel(
    const Chunk* __restrict__ chunks, int64_t numel, const Verdict* __restrict__ verdict,
    unsigned long long* __restrict__ wrong) {
  for (int64_t i = blockIdx.x; verdict->fault == kSound && i < num_chunks(numel); i += gridDim.x) {
    const Chunk chunk = chunks[i];
    bool outside = false;
    const int64_t end = min(kChunk, numel - i * kChunk);
    const int64_t count = for_each_change(chunk, [&](int64_t place, int64_t) { outside = outside || place >= end; });
    if (outside || count != chunk.count) {
      atomicMax(wrong, static_cast<unsigned long long>(i + 1));
    }
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(Bits* __restrict__ target, int64_t numel, const Chunk* __restrict__ chunks, bool xored) {
  for (int64_t i = blockIdx.x; i < num_chunks(numel); i += gridDim.x) {
    const Chunk chunk = chunks[i];
    Bits* const out = target + i * kChunk;
    for_each_change(chunk, [&](int64_t place, int64_t number) {
      const Bits bits = load_bytes<Bits>(chunk.values + number * static_cast<int64_t>(sizeof(Bits)));
      out[place] = xored ? static_cast<Bits>(out[place] ^ bits) : bits;
    });
  }
}

// starts [chunks]: number of changes before each chunk.
template <typename Bits>
__global__ void __launch_bounds__(kThreads) unpack_kernel(
    int64_t numel, const Chunk* __restrict__ chunks, const int64_t* __restrict__ starts, int64_t* __restrict__ places,
    Bits* __restrict__ values) {
  for (int64_t i = blockIdx.x; i < num_chunks(numel); i += gridDim.x) {
    const Chunk chunk = chunks[i];
    const int64_t start = starts[i];
    for_each_change(chunk, [&](int64_t place, int64_t number) {
      places[start + number] = i * kChunk + place;
      values[start + number] = load_bytes<Bits>(chunk.values + number * static_cast<int64_t>(sizeof(Bits)));
    });
  }
}

// sums [grid]: the sum of each block.
__device__ __forceinline__ void store_block_sum(uint64_t own, uint64_t* __restrict__ sums) {
  uint64_t total = 0;
  block_exclusive_scan<kThreads>(own, total);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = total;
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads) hash_change_kernel(
    const Bits* __restrict__ target, int64_t numel, const Chunk* __restrict__ chunks, uint64_t seed, bool xored,
    uint64_t* __restrict__ sums) {
  uint64_t own = 0;
  for (int64_t i = blockIdx.x; i < num_chunks(numel); i += gridDim.x) {
    const Chunk chunk = chunks[i];
    const int64_t start = i * kChunk;
    for_each_change(chunk, [&](int64_t place, int64_t number) {
      const Bits bits = load_bytes<Bits>(chunk.values + number * static_cast<int64_t>(sizeof(Bits)));
      const Bits old = target[start + place], now = xored ? static_cast<Bits>(old ^ bits) : bits;
      const auto at = static_cast<uint64_t>(start + place);
      own += hash_of(seed, at, now) - hash_of(seed, at, old);
    });
  }
  store_block_sum(own, sums);
}

// places [numel] or null.
template <typename Bits>
__global__ void __launch_bounds__(kThreads) hash_kernel(
    const Bits* __restrict__ x, const int64_t* __restrict__ places, int64_t numel, uint64_t seed,
    uint64_t* __restrict__ sums) {
  uint64_t own = 0;
  for (int64_t i = global_thread(); i < numel; i += num_threads()) {
    own += hash_of(seed, static_cast<uint64_t>(places == nullptr ? i : places[i]), x[i]);
  }
  store_block_sum(own, sums);
}

// -- launches ----------------------------------------------------------------------------------------

// Scratch memory for building a payload.
struct Draft {
  uint32_t* changed; // [num_segments * kThreads]
  Segment* segments; // [num_segments]
  Header* headers;   // [num_chunks]
  int64_t* starts;   // [num_chunks + 1]: sizes, then starts; the last is the size of the payload
};

inline Launch over_blocks(int64_t blocks, cudaStream_t stream) {
  return {persistent_grid(blocks, kThreads, device_properties()), Dim3(kThreads), 0, stream};
}

template <typename Bits>
void launch_compare(const Bits* x, const Bits* base, int64_t numel, uint32_t* changed, cudaStream_t stream) {
  launch(over_blocks(num_segments(numel), stream), compare_kernel<Bits>, x, base, numel, changed);
}

// Computes headers and starts of all chunks from the map of changes. numel > 0.
inline void launch_plan(const Draft& draft, int64_t numel, int64_t item_bytes, cudaStream_t stream) {
  const int64_t segments = num_segments(numel), chunks = num_chunks(numel);
  launch(over_blocks(segments, stream), count_segments_kernel, draft.changed, segments, draft.segments);
  launch(
      over_threads(chunks * kWarpSize, stream), plan_chunks_kernel, draft.segments, segments, item_bytes, draft.headers,
      draft.starts);
  launch_scan_counts(draft.starts, 1, chunks, draft.starts + chunks, stream);
}

template <typename Bits, typename Values>
void launch_write(const Draft& draft, int64_t numel, const Values& values, uint8_t* payload, cudaStream_t stream) {
  const int64_t segments = num_segments(numel);
  launch(
      over_blocks(segments, stream), write_chunks_kernel<Bits, Values>, draft.changed, segments, draft.segments,
      draft.headers, draft.starts, values, payload);
}

// Scratch memory for reading a payload.
struct Reading {
  Verdict* verdict;          // []
  unsigned long long* wrong; // [], zero
  Chunk* chunks;             // [num_chunks]
  int64_t* starts;           // [num_chunks + 1]: number of changes before each chunk, then of all chunks
};

inline void launch_read(
    const uint8_t* payload, int64_t size, int64_t numel, int64_t item_bytes, const Reading& reading,
    cudaStream_t stream) {
  const int64_t chunks = num_chunks(numel);
  launch(
      {Dim3(1), Dim3(kWarpSize), 0, stream}, walk_headers_kernel, payload, size, numel, item_bytes, reading.chunks,
      reading.starts, reading.verdict);
  launch(over_blocks(chunks, stream), check_places_kernel, reading.chunks, numel, reading.verdict, reading.wrong);
  launch_scan_counts(reading.starts, 1, chunks, reading.starts + chunks, stream);
}

} // namespace moe_ext::delta
