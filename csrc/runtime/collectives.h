// Collectives of moe_ext.compression: what each of them sends, and computes in between.
//
// The functions of moe_ext/compression/collectives do the same in Python, with the same bits, and say what they are
// for; sizes and choices are made there, and arguments are checked there. Tensors are flat and contiguous.
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

// residual, server_residual, rng_state, residual_in, server_residual_in.
using States = std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor>;

// The mean (sum divided by `divisor`) over ranks of x[N], in place, in P shards of M elements, which travel in pieces.
// With `restores` an error leaves x and what is owed as they were: x is then overwritten at the end. With `looks` the
// second result holds sums of scales, which are not finite where what was coded was not.
Tensors quantized_all_reduce(
    Messages& messages, const Quantized& coding, const at::Tensor& x, const States& states, int64_t shard,
    int64_t piece, int64_t divisor, bool restores, bool looks);

// Its two halves: of x[N] into out[M], and of x[M] into out[N]. An error leaves `out` and what is owed as they were.
Tensors quantized_reduce_scatter(
    Messages& messages, const Quantized& coding, const at::Tensor& out, const at::Tensor& x, const States& states,
    int64_t piece, int64_t divisor);
Tensors quantized_all_gather(
    Messages& messages, const Quantized& coding, const at::Tensor& out, const at::Tensor& x,
    const MaybeTensor& rng_state, int64_t piece);

// The mean over ranks of pairs, into out[N]. What values lose as they travel is added to the residual.
Tensors sparse_all_gather_sum(
    Messages& messages, const at::Tensor& out, const at::Tensor& values_K, const at::Tensor& indices_K,
    const MaybeTensor& residual, const std::string& value_codec, int64_t divisor);

// The same by regions of the elements, [bounds[p], bounds[p + 1]) for rank p, with so many slots for the pairs of a
// rank in a region; the largest `kept` sums of a region come back. Results: pairs that were found for each region [P],
// indices that were kept [P, kept].
Tensors sparse_split_sum(
    Messages& messages, const at::Tensor& out, const at::Tensor& values_K, const at::Tensor& indices_K,
    const at::Tensor& residual, const at::Tensor& bounds, const std::string& value_codec, int64_t slots, int64_t kept,
    int64_t step, int64_t divisor);

// The same by a dense all-reduce.
Tensors sparse_dense_sum(
    Messages& messages, const at::Tensor& out, const at::Tensor& values_K, const at::Tensor& indices_K,
    int64_t divisor);

// The mean over ranks, in place, of the blocks that are other than zero on any of them, or may be by a bitmap.
Tensors block_sum(Messages& messages, const at::Tensor& x, const MaybeTensor& bitmap, int64_t block, int64_t divisor);

// The same of the elements with some indices.
Tensors masked_sum(Messages& messages, const at::Tensor& x, const at::Tensor& indices, int64_t divisor);

// The mean over ranks of rows[U, D], which are those with some ascending indices of all. Results: the rows that any
// rank has, and their indices.
Tensors row_sum(
    Messages& messages, const at::Tensor& rows_UD, const at::Tensor& touched_U, int64_t num_rows, int64_t divisor);

} // namespace moe_ext::runtime
