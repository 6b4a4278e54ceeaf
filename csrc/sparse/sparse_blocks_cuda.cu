// Block and row sparsity on CUDA: allocation and launches on the current stream. In sum_rows alone the host waits for
// the device, because the number of different indices is the size of the result.
#include <tuple>

#include "common/dispatch_cuda.cuh"
#include "common/read_back.h"
#include "common/torch_cuda.cuh"
#include "sparse/sparse_blocks.h"
#include "sparse/sparse_blocks_kernels.cuh"

namespace moe_ext::sparse_blocks {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::new_zeros;

Tensor nonzero_blocks_cuda(Tensor x, int64_t block) {
  check_nonzero_blocks(x, block);
  const DeviceScope device(x);
  const Tensor in = contiguous(x);
  const int64_t blocks = num_blocks(in.numel(), block);
  Tensor bitmap = new_empty(in, {num_bitmap_bytes(blocks)}, ScalarType::Byte);
  if (blocks > 0) {
    const Tensor flags = new_zeros(in, {blocks}, ScalarType::Int);
    launch_nonzero_blocks(
        in.data_ptr(), static_cast<int64_t>(in.element_size()), in.numel(), block, data<int>(flags),
        data<uint8_t>(bitmap), device.stream());
  }
  return bitmap;
}

Tensor gather_blocks_cuda(
    Tensor x,
    Tensor block_idx, // [B]
    int64_t block) {
  check_blocks("gather_blocks", "x", x, block, block_idx);
  const DeviceScope device(x);
  const Tensor in = contiguous(x), idx = contiguous(block_idx);
  Tensor packed = new_empty(in, {idx.size(0), block});
  launch_move_blocks<true, kCheckIndices>(
      in.data_ptr(), packed.data_ptr(), data<const int64_t>(idx), idx.size(0), static_cast<int64_t>(in.element_size()),
      in.numel(), block, device.stream());
  return packed;
}

void scatter_blocks_cuda(
    Tensor out,
    Tensor packed,    // [B, block]
    Tensor block_idx, // [B]
    int64_t block) {
  const char* op = "scatter_blocks_";
  check_blocks(op, "out", out, block, block_idx);
  check_packed(op, packed, out, block, block_idx);
  const DeviceScope device(out);
  const Tensor from = contiguous(packed), idx = contiguous(block_idx);
  launch_move_blocks<false, kCheckIndices>(
      out.data_ptr(), from.data_ptr(), data<const int64_t>(idx), idx.size(0), static_cast<int64_t>(out.element_size()),
      out.numel(), block, device.stream());
}

struct SortedRows {
  Tensor longs;
  const int64_t* order;
  const int64_t* groups;
  int64_t num_groups;
};

SortedRows sort_rows(const Tensor& idx, int64_t num_rows, cudaStream_t stream) {
  const int64_t size = idx.size(0);
  const Tensor longs = new_empty(idx, {5 * size + 2 * kIndexDigits + 3});
  const Tensor digits = new_empty(idx, {size}, ScalarType::Int);
  const Tensor sort = new_empty(idx, {permutation::tables_workspace_bytes(plan_rows(size), false)}, ScalarType::Byte);
  int64_t* const at = data<int64_t>(longs);
  int64_t* const tables = at + 3 * size + 1;
  const RowSort scratch{
      at,
      at + size,
      at + 2 * size,
      at + 3 * size,
      data<int>(digits),
      {tables,
       size,
       tables + size,
       {tables + 2 * size, tables + 2 * size + kIndexDigits + 1, tables + 2 * size + 2 * kIndexDigits + 1, nullptr}},
      sort.data_ptr()};
  const int64_t* const order =
      launch_sort_rows<kCheckIndices>(data<const int64_t>(idx), size, num_rows, scratch, stream);
  // NOTE: device-to-host sync: the number of different indices is the size of the result.
  const Tensor found = read_back(torch::stable::narrow(const_cast<Tensor&>(longs), 0, 3 * size, 1));
  return {longs, order, scratch.groups, *data<const int64_t>(found)};
}

std::tuple<Tensor, Tensor> sum_rows_cuda(
    Tensor rows,    // [N, D]
    Tensor row_idx, // [N]
    int64_t num_rows) {
  check_sum_rows(rows, row_idx, num_rows);
  const int64_t size = check_int32("sum_rows", "the number of rows", rows.size(0)), dim = rows.size(1);
  const DeviceScope device(rows);
  const Tensor in = contiguous(rows), idx = contiguous(row_idx);
  if (size == 0) {
    return {new_empty(in, {0, dim}), new_empty(idx, {0})};
  }
  const SortedRows sorted = sort_rows(idx, num_rows, device.stream());
  const int64_t groups = sorted.num_groups;
  Tensor sums = new_empty(in, {groups, dim}), unique = new_empty(idx, {groups});
  const Tensor begins = new_empty(idx, {groups + 1});
  launch(
      over_threads(size, device.stream()), place_groups_kernel, data<const int64_t>(idx), sorted.order, sorted.groups,
      size, groups, data<int64_t>(unique), data<int64_t>(begins));
  dispatch_floating(in.scalar_type(), [&]<typename T>() {
    launch_sum_groups<T>(
        data<const T>(in), sorted.order, data<const int64_t>(begins), groups, dim, data<T>(sums), device.stream());
  });
  return {sums, unique};
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("nonzero_blocks", TORCH_BOX(&nonzero_blocks_cuda));
  m.impl("gather_blocks", TORCH_BOX(&gather_blocks_cuda));
  m.impl("scatter_blocks_", TORCH_BOX(&scatter_blocks_cuda));
  m.impl("sum_rows", TORCH_BOX(&sum_rows_cuda));
}

} // namespace moe_ext::sparse_blocks
