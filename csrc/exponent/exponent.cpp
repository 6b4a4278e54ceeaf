#include "exponent/exponent.h"

#include "common/library.h"

namespace moe_ext::exponent {

MOE_EXT_SCHEMAS(m) {
  m.def("encode_exponents(Tensor x) -> Tensor");
  m.def("decode_exponents_(Tensor(a!) out, Tensor payload) -> ()");
}

Kind check_elements(const char* op, const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  MOE_CHECK(
      dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float, op, ": expected ", name,
      " to be bfloat16, float16 or float32, got ", dtype_string(t));
  MOE_CHECK(
      t.is_contiguous(), op, ": expected ", name, " to be contiguous, got a strided tensor of shape ", shape_string(t));
  return dtype == ScalarType::BFloat16 ? kBFloat16 : dtype == ScalarType::Half ? kHalf : kFloat;
}

void check_payload(const char* op, const Tensor& payload, const Tensor& beside, const char* name) {
  check_dtype(op, "payload", payload, ScalarType::Byte);
  check_dim(op, "payload", payload, 1, "[bytes]");
  check_same_device(op, "payload", payload, name, beside);
  MOE_CHECK(payload.is_contiguous(), op, ": expected payload to be contiguous, got stride ", payload.stride(0));
}

} // namespace moe_ext::exponent
