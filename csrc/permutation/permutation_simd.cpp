// Loops over one row: plain loops for the vectoriser, compiled once per instruction set.
// combine keeps a tile of columns in registers and first-level cache while it goes over the top_k rows of a token, so
// each row is read once and the output written once.
#include "common/simd.h"
#include "permutation/permutation_tables.h"

namespace moe_ext::permutation::MOE_ISA {
namespace {

constexpr int64_t kTile = 256;

template <typename T, typename Weight>
MOE_INLINE void combine_tile(
    T* out, const T* rows, const int64_t* row_idx, const Weight* weights, int64_t top_k, int64_t dim, int64_t begin,
    int64_t width) {
  Weight acc[kTile];
  for (int64_t i = 0; i < width; ++i) {
    acc[i] = 0;
  }
  for (int64_t k = 0; k < top_k; ++k) {
    if (row_idx[k] < 0) {
      continue;
    }
    const T* row = rows + row_idx[k] * dim + begin;
    const Weight weight = weights == nullptr ? Weight(1) : weights[k];
    for (int64_t i = 0; i < width; ++i) {
      acc[i] += weight * Weight(to_acc(row[i]));
    }
  }
  for (int64_t i = 0; i < width; ++i) {
    out[begin + i] = from_acc<T>(acc[i]);
  }
}

template <typename T, typename Weight>
void combine(T* out, const T* rows, const int64_t* row_idx, const Weight* weights, int64_t top_k, int64_t dim) {
  int64_t begin = 0;
  for (; begin + kTile <= dim; begin += kTile) {
    combine_tile(out, rows, row_idx, weights, top_k, dim, begin, kTile);
  }
  if (begin < dim) {
    combine_tile(out, rows, row_idx, weights, top_k, dim, begin, dim - begin);
  }
}

template <typename T, typename Weight>
void scale(T* out, const T* in, Weight weight, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = from_acc<T>(weight * Weight(to_acc(in[i])));
  }
}

template <typename T, typename Weight>
Weight dot_rows(const T* a, const T* b, int64_t dim) {
  return dot<Weight>(a, b, dim);
}

template <typename T>
constexpr RowKernels<T> kRowKernels = {combine<T, acc_t<T>>, scale<T, acc_t<T>>, dot_rows<T, acc_t<T>>};

} // namespace

extern const Kernels kernel_table;
const Kernels kernel_table = {kRowKernels<float>, kRowKernels<double>, kRowKernels<BFloat16>, kRowKernels<Half>};

} // namespace moe_ext::permutation::MOE_ISA
