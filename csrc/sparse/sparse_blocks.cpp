#include "sparse/sparse_blocks.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::sparse_blocks {

MOE_EXT_SCHEMAS(m) {
  m.def("nonzero_blocks(Tensor x, SymInt block) -> Tensor");
  m.def("gather_blocks(Tensor x, Tensor block_idx, SymInt block) -> Tensor");
  m.def("scatter_blocks_(Tensor(a!) out, Tensor packed, Tensor block_idx, SymInt block) -> ()");
  m.def("sum_rows(Tensor rows, Tensor row_idx, SymInt num_rows) -> (Tensor row_sums, Tensor unique_idx)");
}

namespace {

void check_block_size(const char* op, int64_t block) {
  MOE_CHECK(block >= 1, op, ": expected block to be at least 1, got ", block);
}

} // namespace

void check_nonzero_blocks(const Tensor& x, int64_t block) {
  check_floating("nonzero_blocks", "x", x);
  check_block_size("nonzero_blocks", block);
}

void check_blocks(const char* op, const char* name, const Tensor& dense, int64_t block, const Tensor& block_idx) {
  check_floating(op, name, dense);
  check_block_size(op, block);
  check_same_device(op, "block_idx", block_idx, name, dense);
  check_dtype(op, "block_idx", block_idx, ScalarType::Long);
  check_dim(op, "block_idx", block_idx, 1, "[B]");
}

void check_packed(const char* op, const Tensor& packed, const Tensor& dense, int64_t block, const Tensor& block_idx) {
  check_same_device(op, "packed", packed, "out", dense);
  check_dtype(op, "packed", packed, dense.scalar_type());
  check_dim(op, "packed", packed, 2, "[B, block]");
  check_size(op, "packed", packed, 0, block_idx.size(0), "the blocks of block_idx");
  check_size(op, "packed", packed, 1, block, "the elements of a block");
  MOE_CHECK(
      dense.is_contiguous(), op, ": expected out to be contiguous, got a strided tensor of shape ",
      shape_string(dense));
  check_apart(op, "out", dense, "packed", packed);
  check_apart(op, "out", dense, "block_idx", block_idx);
}

void check_sum_rows(const Tensor& rows, const Tensor& row_idx, int64_t num_rows) {
  const char* op = "sum_rows";
  check_floating(op, "rows", rows);
  check_dim(op, "rows", rows, 2, "[N, D]");
  check_same_device(op, "row_idx", row_idx, "rows", rows);
  check_dtype(op, "row_idx", row_idx, ScalarType::Long);
  check_dim(op, "row_idx", row_idx, 1, "[N]");
  check_size(op, "row_idx", row_idx, 0, rows.size(0), "the number of rows");
  MOE_CHECK(num_rows >= 0, op, ": expected num_rows to be at least 0, got ", num_rows);
}

} // namespace moe_ext::sparse_blocks
