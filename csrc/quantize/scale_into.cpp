#include "quantize/scale_into.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::scale_into {

MOE_EXT_SCHEMAS(m) {
  m.def("scale_into_(Tensor(a!) out, Tensor x, float scale) -> Tensor");
}

namespace {

void check_contiguous(const char* op, const char* name, const Tensor& t) {
  MOE_CHECK(
      t.is_contiguous(), op, ": expected ", name, " to be contiguous, got a strided tensor of shape ", shape_string(t));
}

} // namespace

void check_scale_into(const Tensor& out, const Tensor& x) {
  const char* op = "scale_into_";
  check_same_device(op, "out", out, "x", x);
  check_floating(op, "x", x);
  check_floating(op, "out", out);
  MOE_CHECK(
      out.numel() == x.numel(), op, ": expected out to have ", x.numel(), " elements as x, got shape ",
      shape_string(out));
  check_contiguous(op, "x", x);
  check_contiguous(op, "out", out);
  const bool in_place = out.data_ptr() == x.data_ptr() && out.scalar_type() == x.scalar_type();
  MOE_CHECK(
      in_place || !overlap(out, x), op, ": expected out to be x or in memory of its own, got a part of x's memory");
}

} // namespace moe_ext::scale_into
