// Packing by mask on CUDA: allocation and launches on the current stream. The host never waits for the device, so a
// wrong bitmap, which the CPU refuses, raises no error. It stays within bounds, or traps with kCheckIndices.
#include "common/dispatch.h"
#include "common/dispatch_cuda.cuh"
#include "common/torch_cuda.cuh"
#include "sparse/mask.h"
#include "sparse/mask_kernels.cuh"

namespace moe_ext::mask {
namespace {

using torch::stable::new_empty;

Tensor pack_bits_cuda(Tensor x) {
  check_pack_bits(x);
  const DeviceScope device(x);
  Tensor bitmap = new_empty(x, {num_bitmap_bytes(x.numel())}, ScalarType::Byte);
  dispatch_size(static_cast<int64_t>(x.element_size()), [&]<typename Bits>() {
    launch_pack_bits(data<const Bits>(x), x.numel(), data<uint8_t>(bitmap), device.stream());
  });
  return bitmap;
}

template <bool kPack>
void move_masked(const Tensor& dense, const Tensor& packed, const Tensor& bitmap) {
  const DeviceScope device(dense);
  const Tensor counts = new_empty(dense, {num_tiles(dense.numel()) + 1}, ScalarType::Long);
  dispatch_size(static_cast<int64_t>(dense.element_size()), [&]<typename Bits>() {
    launch_move_masked<kPack, kCheckIndices>(
        data<Bits>(dense), data<Bits>(packed), packed.numel(), data<const uint8_t>(bitmap), dense.numel(),
        data<int64_t>(counts), device.stream());
  });
}

void pack_masked_cuda(Tensor packed, Tensor x, Tensor bitmap) {
  check_mask("pack_masked_", "x", x, packed, bitmap);
  move_masked<true>(x, packed, bitmap);
}

void unpack_masked_cuda(Tensor out, Tensor packed, Tensor bitmap) {
  check_mask("unpack_masked_", "out", out, packed, bitmap);
  move_masked<false>(out, packed, bitmap);
}

Tensor masked_mm_cuda(
    Tensor x,      // [T, K]
    Tensor values, // [n]
    Tensor bitmap, // [M, K / 8]
    std::optional<Tensor> expert_offsets) {
  check_masked_mm(x, values, bitmap, expert_offsets);
  const DeviceScope device(x);
  const Tensor tokens = as_contiguous(x), packed = as_contiguous(values), bits = as_contiguous(bitmap);
  const int64_t num_rows = bits.size(0);
  const Tensor of_experts = expert_offsets ? as_contiguous(*expert_offsets) : Tensor();
  const ExpertBounds experts = expert_offsets ? bounds_of("masked_mm", of_experts) : ExpertBounds{};
  // Tokens outside of all experts get rows of zeros.
  Tensor out = expert_offsets ? torch::stable::new_zeros(tokens, {x.size(0), num_rows / experts.num_experts})
                              : new_empty(tokens, {x.size(0), num_rows});
  const Tensor counts = new_empty(tokens, {num_rows + 1}, ScalarType::Long);
  const auto run = [&]<typename T>() {
    launch_masked_mm<kCheckIndices, T>(
        {data<const T>(tokens), data<const T>(packed), data<const uint8_t>(bits), data<const int64_t>(counts),
         data<T>(out), x.size(0), x.size(1), num_rows, packed.numel(), experts},
        data<int64_t>(counts), device.stream());
  };
  x.scalar_type() == ScalarType::BFloat16 ? run.template operator()<BFloat16>() : run.template operator()<float>();
  return out;
}

} // namespace

MOE_EXT_CUDA_IMPL(m) {
  m.impl("masked_mm", TORCH_BOX(&masked_mm_cuda));
  m.impl("pack_bits", TORCH_BOX(&pack_bits_cuda));
  m.impl("pack_masked_", TORCH_BOX(&pack_masked_cuda));
  m.impl("unpack_masked_", TORCH_BOX(&unpack_masked_cuda));
}

} // namespace moe_ext::mask
