#include "exponent/exponent.h"

#include <cstring>

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

void check_length(const char* op, const Tensor& payload, int64_t numel) {
  MOE_CHECK(
      payload.numel() >= table_bytes(numel), op, ": expected payload to hold ", numel, " elements, got ",
      payload.numel(), " bytes");
}

std::vector<int64_t> block_starts(
    const char* op, const uint8_t* head, const Tensor& payload, const Tensor& out, Kind kind) {
  const int64_t numel = out.numel(), blocks = num_blocks(numel);
  Header header = {};
  std::memcpy(&header, head, sizeof(header));
  MOE_CHECK(
      header.magic == kMagic && header.kind == kind && header.numel == static_cast<uint64_t>(numel), op,
      ": expected payload to hold ", numel, " elements of ", dtype_string(out), ", got ",
      header.magic == kMagic ? "another number or dtype" : "other bytes");
  std::vector<int64_t> place(blocks + 1, table_bytes(numel));
  for (int64_t block = 0; block < blocks; ++block) {
    uint32_t size;
    std::memcpy(&size, head + kHeader + 4 * block, sizeof(size));
    place[block + 1] = place[block] + size;
  }
  MOE_CHECK(
      place[blocks] == payload.numel(), op, ": expected payload to have the ", place[blocks],
      " bytes that its blocks add up to, got ", payload.numel());
  return place;
}

} // namespace moe_ext::exponent
