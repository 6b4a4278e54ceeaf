// Collectives of moe_ext.compression: their messages, and the computation between messages.
//
// The functions of moe_ext/compression/collectives do the same in Python, with the same bits, and document the purpose
// of each collective. Python chooses sizes and checks arguments for both. Tensors are flat and contiguous.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "runtime/coding.h"
#include "runtime/messages.h"

namespace moe_ext::runtime {

// Format and block of a `QuantizedCoding`.
using Quantized = std::pair<std::string, int64_t>;

// residual, server_residual, rng_state, residual_in, server_residual_in. A residual without its `_in` is also read.
using States = std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>;

// The sum over ranks of x[N] divided by `divisor`, in place, in P shards of M elements, which travel in pieces. With
// `restores`, an error leaves x and the residuals unchanged, and x is overwritten at the end only. With `looks`, the
// second result holds the sum of the scales of each payload, which is not finite if a coded value was not finite.
Tensors quantized_all_reduce(
    Messages& messages, const Quantized& coding, const at::Tensor& x, const States& states, int64_t shard,
    int64_t piece, int64_t divisor, bool restores, bool looks);

// The two halves of quantized_all_reduce: reduce-scatter of x[N] into out[M], and all-gather of x[M] into out[N]. An
// error leaves `out` and the residuals unchanged.
Tensors quantized_reduce_scatter(
    Messages& messages, const Quantized& coding, const at::Tensor& out, const at::Tensor& x, const States& states,
    int64_t piece, int64_t divisor);
Tensors quantized_all_gather(
    Messages& messages, const Quantized& coding, const at::Tensor& out, const at::Tensor& x,
    const MaybeTensor& rng_state, int64_t piece);

// The sum over ranks of (value, index) pairs divided by `divisor`, into out[N]. Rounding errors of the sent values are
// added to the residual.
Tensors sparse_all_gather_sum(
    Messages& messages, const at::Tensor& out, const at::Tensor& values_K, const at::Tensor& indices_K,
    const MaybeTensor& residual, const std::string& value_codec, int64_t divisor);

// As sparse_all_gather_sum, but rank p sums the pairs of region [bounds[p], bounds[p + 1]) and returns the `kept`
// largest sums. A rank sends at most `slots` pairs for each region. Results: number of pairs found for each region on
// all ranks [P], indices of the kept sums [P, kept].
Tensors sparse_split_sum(
    Messages& messages, const at::Tensor& out, const at::Tensor& values_K, const at::Tensor& indices_K,
    const at::Tensor& residual, const at::Tensor& bounds, const std::string& value_codec, int64_t slots, int64_t kept,
    int64_t step, int64_t divisor);

// As sparse_all_gather_sum, by a dense all-reduce of `out`.
Tensors sparse_dense_sum(
    Messages& messages, const at::Tensor& out, const at::Tensor& values_K, const at::Tensor& indices_K,
    int64_t divisor);

// The sum over ranks divided by `divisor`, in place, of blocks that are not zero on every rank. `bitmap` marks blocks
// that may be non-zero on this rank; without it the operator looks for them.
Tensors block_sum(Messages& messages, const at::Tensor& x, const MaybeTensor& bitmap, int64_t block, int64_t divisor);

// The sum over ranks divided by `divisor`, in place, of the elements at `indices`, which are equal on all ranks.
Tensors masked_sum(Messages& messages, const at::Tensor& x, const at::Tensor& indices, int64_t divisor);

// The sum over ranks divided by `divisor` of rows[U, D], which are the rows `touched_U` (ascending) of `num_rows`.
// Results: the rows that any rank has, and their indices.
Tensors row_sum(
    Messages& messages, const at::Tensor& rows_UD, const at::Tensor& touched_U, int64_t num_rows, int64_t divisor);

} // namespace moe_ext::runtime
