#include "sparse/mask.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::mask {

MOE_EXT_SCHEMAS(m) {
  m.def("pack_bits(Tensor x) -> Tensor");
  m.def("pack_masked_(Tensor(a!) packed, Tensor x, Tensor bitmap) -> ()");
  m.def("unpack_masked_(Tensor(a!) out, Tensor packed, Tensor bitmap) -> ()");
  m.def("masked_mm(Tensor x, Tensor values, Tensor bitmap, Tensor? expert_offsets=None) -> Tensor");
}

namespace {

void check_contiguous(const char* op, const char* name, const Tensor& t) {
  MOE_CHECK(
      t.is_contiguous(), op, ": expected ", name, " to be contiguous, got a strided tensor of shape ", shape_string(t));
}

} // namespace

void check_pack_bits(const Tensor& x) {
  MOE_CHECK(x.element_size() <= 8, "pack_bits: expected x to have elements of 8 bytes at most, got ", dtype_string(x));
  check_contiguous("pack_bits", "x", x);
}

void check_mask(const char* op, const char* name, const Tensor& dense, const Tensor& packed, const Tensor& bitmap) {
  MOE_CHECK(
      dense.element_size() <= 8, op, ": expected ", name, " to have elements of 8 bytes at most, got ",
      dtype_string(dense));
  check_dtype(op, "packed", packed, dense.scalar_type());
  check_dtype(op, "bitmap", bitmap, ScalarType::Byte);
  check_dim(op, "packed", packed, 1, "[n]");
  check_dim(op, "bitmap", bitmap, 1, "[bytes]");
  check_size(op, "bitmap", bitmap, 0, num_bitmap_bytes(dense.numel()), "the bytes of a bit for each element");
  check_same_device(op, "packed", packed, name, dense);
  check_same_device(op, "bitmap", bitmap, name, dense);
  check_contiguous(op, name, dense);
  check_contiguous(op, "packed", packed);
  check_contiguous(op, "bitmap", bitmap);
  check_apart(op, name, dense, "packed", packed);
  check_apart(op, name, dense, "bitmap", bitmap);
  check_apart(op, "packed", packed, "bitmap", bitmap);
}

void check_masked_mm(
    const Tensor& x, const Tensor& values, const Tensor& bitmap, const std::optional<Tensor>& expert_offsets) {
  const char* op = "masked_mm";
  MOE_CHECK(
      x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16, op,
      ": expected x to be float32 or bfloat16, got ", dtype_string(x));
  check_dtype(op, "values", values, x.scalar_type());
  check_dtype(op, "bitmap", bitmap, ScalarType::Byte);
  check_dim(op, "x", x, 2, "[T, K]");
  check_dim(op, "values", values, 1, "[n]");
  check_dim(op, "bitmap", bitmap, 2, "[M, K / 8]");
  MOE_CHECK(x.size(1) % 8 == 0, op, ": expected K to be a multiple of 8, got ", x.size(1));
  check_size(op, "bitmap", bitmap, 1, x.size(1) / 8, "the bytes of a bit for each column");
  check_same_device(op, "values", values, "x", x);
  check_same_device(op, "bitmap", bitmap, "x", x);
  if (expert_offsets) {
    check_stacked(op, "bitmap", bitmap, *expert_offsets);
    check_same_device(op, "expert_offsets", *expert_offsets, "x", x);
  }
}

} // namespace moe_ext::mask
