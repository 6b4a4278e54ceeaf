// Loops over one row: plain loops for the vectoriser, compiled once per instruction set.
// combine keeps the sums of a tile of columns in registers while it visits the top_k rows of a token. Each row is read
// once, and the output is written once.
#include "common/simd.h"
#include "common/stream.h"
#include "permutation/permutation_tables.h"

namespace moe_ext::permutation::MOE_ISA {
namespace {

// Columns of a tile. Their sums fill four registers with AVX-512 and eight with AVX2.
template <typename Weight>
constexpr int64_t kTile = 256 / sizeof(Weight);

template <typename T>
MOE_INLINE void put(T* out, const T* tile, int64_t width, bool past_caches) {
  if (past_caches) {
    stream(out, tile, width * static_cast<int64_t>(sizeof(T)));
  } else {
    __builtin_memcpy(out, tile, width * sizeof(T));
  }
}

// Prefetches columns of the next row. Rows lie too far apart for the hardware prefetcher.
template <typename T>
MOE_INLINE void prefetch(const T* row, int64_t width) {
  constexpr int64_t kLine = kLineBytes / sizeof(T);
  for (int64_t i = 0; i < width; i += kLine) {
    __builtin_prefetch(row + i);
  }
}

// Returns the values as Weight: `from` itself, or `buffer` after a conversion. The conversion is a loop of its own,
// because the compiler does not vectorise loops that convert and compute well.
template <typename T, typename Weight>
MOE_INLINE const Weight* widen(const T* from, Weight* buffer, int64_t width) {
  if constexpr (std::is_same_v<T, Weight>) {
    return from;
  } else {
    for (int64_t i = 0; i < width; ++i) {
      buffer[i] = to_acc(from[i]);
    }
    return buffer;
  }
}

template <typename T, typename Weight>
MOE_INLINE void combine_tile(
    T* out, const T* rows, const int64_t* row_idx, const int64_t* next_idx, const Weight* weights, int64_t top_k,
    int64_t dim, int64_t width, bool past_caches) {
  alignas(kLineBytes) Weight acc[kTile<Weight>];
  for (int64_t i = 0; i < width; ++i) {
    acc[i] = 0;
  }
  for (int64_t k = 0; k < top_k; ++k) {
    if (next_idx != nullptr && next_idx[k] >= 0) {
      prefetch(rows + next_idx[k] * dim, width);
    }
    if (row_idx[k] < 0) {
      continue;
    }
    const T* row = rows + row_idx[k] * dim;
    const Weight weight = weights == nullptr ? Weight(1) : weights[k];
    for (int64_t i = 0; i < width; ++i) {
      acc[i] += weight * Weight(to_acc(row[i]));
    }
  }
  alignas(kLineBytes) T tile[kTile<Weight>];
  for (int64_t i = 0; i < width; ++i) {
    tile[i] = from_acc<T>(acc[i]);
  }
  put(out, tile, width, past_caches);
}

template <typename T, typename Weight>
void combine(
    T* out, const T* rows, const int64_t* row_idx, const int64_t* next_idx, const Weight* weights, int64_t top_k,
    int64_t dim, bool past_caches) {
  constexpr int64_t kWidth = kTile<Weight>;
  int64_t begin = 0;
  for (; begin + kWidth <= dim; begin += kWidth) {
    combine_tile(out + begin, rows + begin, row_idx, next_idx, weights, top_k, dim, kWidth, past_caches);
  }
  if (begin < dim) {
    combine_tile(out + begin, rows + begin, row_idx, next_idx, weights, top_k, dim, dim - begin, past_caches);
  }
}

// A tile of scale_dot. Its sixteen sums are those of `dot` in simd.h, so that the order is the same.
template <typename T, typename Weight>
MOE_INLINE void scale_dot_tile(
    T* out, const T* in, const T* row, const T* next_row, Weight weight, Weight* lanes, int64_t width,
    bool past_caches) {
  constexpr int64_t kLanes = 16;
  alignas(kLineBytes) T tile[kTile<Weight>];
  alignas(kLineBytes) Weight wide_in[kTile<Weight>], wide_row[kTile<Weight>];
  if (next_row != nullptr) {
    prefetch(next_row, width);
  }
  const Weight* a = widen(in, wide_in, width);
  const Weight* b = widen(row, wide_row, width);
  for (int64_t i = 0; i < width; ++i) {
    tile[i] = from_acc<T>(weight * a[i]);
  }
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += a[i + lane] * b[i + lane];
    }
  }
  for (int64_t lane = 0; i + lane < width; ++lane) {
    lanes[lane] += a[i + lane] * b[i + lane];
  }
  put(out, tile, width, past_caches);
}

template <typename T, typename Weight>
Weight scale_dot(T* out, const T* in, const T* row, const T* next_row, Weight weight, int64_t dim, bool past_caches) {
  constexpr int64_t kWidth = kTile<Weight>;
  Weight lanes[16] = {};
  int64_t begin = 0;
  for (; begin + kWidth <= dim; begin += kWidth) {
    const T* next = next_row == nullptr ? nullptr : next_row + begin;
    scale_dot_tile(out + begin, in + begin, row + begin, next, weight, lanes, kWidth, past_caches);
  }
  if (begin < dim) {
    const T* next = next_row == nullptr ? nullptr : next_row + begin;
    scale_dot_tile(out + begin, in + begin, row + begin, next, weight, lanes, dim - begin, past_caches);
  }
  Weight sum = 0;
  for (const Weight lane : lanes) {
    sum += lane;
  }
  return sum;
}

template <typename T>
constexpr RowKernels<T> kRowKernels = {combine<T, acc_t<T>>, scale_dot<T, acc_t<T>>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kRowKernels<float>, kRowKernels<double>, kRowKernels<BFloat16>, kRowKernels<Half>};

} // namespace moe_ext::permutation::MOE_ISA
