// Pairs on CUDA: allocation and launches on the current stream.
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "sparse/pairs.h"
#include "sparse/pairs_kernels.cuh"

namespace moe_ext::pairs {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

Tensor pack_indices_cuda(
    Tensor indices, // [K]
    int64_t numel) {
  const IndexLayout layout = check_pack_indices(indices, numel);
  const DeviceScope device(indices);
  const Tensor in = contiguous(indices);
  Tensor packed = new_empty(in, {num_bytes(layout)}, ScalarType::Byte);
  launch_pack_indices<kCheckIndices>(data<const int64_t>(in), layout, data<uint8_t>(packed), device.stream());
  return packed;
}

Tensor unpack_indices_cuda(Tensor packed, int64_t count, int64_t numel) {
  const IndexLayout layout = check_unpack_indices(packed, count, numel);
  const DeviceScope device(packed);
  Tensor indices = new_empty(packed, {count}, ScalarType::Long);
  launch_unpack_indices(data<const uint8_t>(packed), layout, data<int64_t>(indices), device.stream());
  return indices;
}

void add_pairs_cuda(
    Tensor out,
    Tensor values, // [K]
    Tensor packed, int64_t numel, int64_t start, double divisor) {
  const IndexLayout layout = check_add_pairs(out, values, packed, numel, start, divisor);
  const DeviceScope device(out);
  const Tensor in = contiguous(values);
  launch_add_pairs(
      data<float>(out), out.numel(), data<const float>(in), data<const uint8_t>(packed), layout, start,
      static_cast<float>(divisor), device.stream());
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("pack_indices", TORCH_BOX(&pack_indices_cuda));
  m.impl("unpack_indices", TORCH_BOX(&unpack_indices_cuda));
  m.impl("add_pairs_", TORCH_BOX(&add_pairs_cuda));
}

} // namespace moe_ext::pairs
