#include "exponent/exponent.h"

#include <cstring>

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::exponent {

MOE_EXT_SCHEMAS(m) {
  m.def("encode_exponents(Tensor x) -> Tensor");
  m.def("decode_exponents_(Tensor(a!) out, Tensor payload) -> ()");
  m.def("encode_exponent_rows(Tensor x, SymInt num_rows, SymInt left_out=-1) -> (Tensor rows, Tensor num_bytes)");
  m.def("decode_exponent_row_(Tensor(a!) out, Tensor row, Tensor(b!) damaged) -> ()");
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

Kind check_rows(const Tensor& x, int64_t num_rows) {
  const char* op = "encode_exponent_rows";
  const Kind kind = check_elements(op, "x", x);
  check_dim(op, "x", x, 1, "[N]");
  MOE_CHECK(num_rows >= 1, op, ": expected num_rows to be at least 1, got ", num_rows);
  return kind;
}

Kind check_row(const Tensor& out, const Tensor& row, const Tensor& damaged) {
  const char* op = "decode_exponent_row_";
  const Kind kind = check_elements(op, "out", out);
  check_payload(op, row, out);
  check_dtype(op, "damaged", damaged, ScalarType::Long);
  MOE_CHECK(damaged.numel() == 1, op, ": expected damaged to be one number, got shape ", shape_string(damaged));
  check_same_device(op, "damaged", damaged, "out", out);
  check_apart(op, "damaged", damaged, "out", out);
  check_apart(op, "damaged", damaged, "row", row);
  check_length(op, row, out.numel());
  return kind;
}

void check_payload(const char* op, const Tensor& payload, const Tensor& out) {
  check_dtype(op, "payload", payload, ScalarType::Byte);
  check_dim(op, "payload", payload, 1, "[bytes]");
  check_same_device(op, "payload", payload, "out", out);
  MOE_CHECK(payload.is_contiguous(), op, ": expected payload to be contiguous, got stride ", payload.stride(0));
  check_apart(op, "payload", payload, "out", out);
}

void check_length(const char* op, const Tensor& payload, int64_t numel) {
  MOE_CHECK(
      payload.numel() >= table_bytes(numel), op, ": expected payload to hold ", numel, " elements, got ",
      payload.numel(), " bytes");
}

std::vector<int64_t> places(const uint8_t* head, int64_t numel, Kind kind) {
  const int64_t blocks = num_blocks(numel);
  Header header = {};
  std::memcpy(&header, head, sizeof(header));
  if (header.magic != kMagic || header.kind != kind || header.numel != static_cast<uint64_t>(numel)) {
    return {};
  }
  std::vector<int64_t> place(blocks + 1, table_bytes(numel));
  for (int64_t block = 0; block < blocks; ++block) {
    uint32_t size;
    std::memcpy(&size, head + kHeader + 4 * block, sizeof(size));
    place[block + 1] = place[block] + size;
  }
  return place;
}

std::vector<int64_t> block_starts(
    const char* op, const uint8_t* head, const Tensor& payload, const Tensor& out, Kind kind) {
  const std::vector<int64_t> place = places(head, out.numel(), kind);
  MOE_CHECK(
      !place.empty(), op, ": expected payload to hold ", out.numel(), " elements of ", dtype_string(out), ", got ",
      std::memcmp(head, &kMagic, sizeof(kMagic)) == 0 ? "another number or dtype" : "other bytes");
  MOE_CHECK(
      place.back() == payload.numel(), op, ": expected payload to have the ", place.back(),
      " bytes that its blocks add up to, got ", payload.numel());
  return place;
}

} // namespace moe_ext::exponent
