// Sums over ranks that do not send elements which are zero on all ranks.
#include "runtime/collectives.h"
#include "runtime/operators.h"

namespace moe_ext::runtime {
namespace {

using at::Tensor;

Tensor nonzero_blocks(const Tensor& x, int64_t block) {
  static const auto op = find_operator<Tensor(const Tensor&, int64_t)>("moe_ext::nonzero_blocks");
  return op.call(x, block);
}

Tensor gather_blocks(const Tensor& x, const Tensor& blocks, int64_t block) {
  static const auto op = find_operator<Tensor(const Tensor&, const Tensor&, int64_t)>("moe_ext::gather_blocks");
  return op.call(x, blocks, block);
}

void scatter_blocks_(const Tensor& x, const Tensor& packed, const Tensor& blocks, int64_t block) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, int64_t)>("moe_ext::scatter_blocks_");
  op.call(x, packed, blocks, block);
}

// Indices of the bits that are set on any rank.
Tensor join(Messages& messages, const Tensor& bitmap) {
  const Tensor found = messages.all_gather(bitmap).view({messages.size(), -1});
  Tensor joined = found[0].clone();
  for (int64_t rank = 1; rank < messages.size(); ++rank) {
    joined.bitwise_or_(found[rank]);
  }
  const Tensor bits = joined.unsqueeze(1).bitwise_right_shift(at::arange(8, joined.options())).bitwise_and(1);
  return bits.view({-1}).nonzero().view({-1});
}

void average_(Messages& messages, Tensor& x, int64_t divisor) {
  messages.all_reduce(x);
  if (divisor != 1) {
    x.div_(divisor);
  }
}

} // namespace

Tensors block_sum(Messages& messages, const Tensor& x, const MaybeTensor& bitmap, int64_t block, int64_t divisor) {
  const Tensor blocks = join(messages, bitmap ? *bitmap : nonzero_blocks(x, block));
  Tensor packed = gather_blocks(x, blocks, block);
  average_(messages, packed, divisor);
  scatter_blocks_(x, packed, blocks, block);
  return {x};
}

Tensors masked_sum(Messages& messages, const Tensor& x, const Tensor& indices, int64_t divisor) {
  Tensor packed = x.index_select(0, indices);
  average_(messages, packed, divisor);
  x.index_copy_(0, indices, packed);
  return {x};
}

Tensors row_sum(Messages& messages, const Tensor& rows_UD, const Tensor& touched_U, int64_t num_rows, int64_t divisor) {
  const Tensor marks = at::zeros({(num_rows + 7) / 8 * 8}, touched_U.options().dtype(at::kFloat));
  marks.index_fill_(0, touched_U, 1);
  const Tensor union_rows = join(messages, nonzero_blocks(marks, 1));
  // 1 + the place of each index among this rank's rows; 0, the row of zeros in front, if this rank does not have the
  // row.
  Tensor place = at::zeros({num_rows}, touched_U.options());
  place.index_copy_(0, touched_U, at::arange(1, touched_U.size(0) + 1, touched_U.options()));
  const Tensor padded = at::constant_pad_nd(rows_UD, {0, 0, 1, 0}, 0);
  Tensor packed = padded.index_select(0, place.index_select(0, union_rows));
  average_(messages, packed, divisor);
  return {packed, union_rows};
}

} // namespace moe_ext::runtime
