#include "delta/delta.h"

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::delta {

MOE_EXT_SCHEMAS(m) {
  m.def("delta_encode(Tensor x, Tensor base, bool xored=False) -> Tensor");
  m.def("delta_apply_(Tensor(a!) target, Tensor payload, bool xored=False) -> ()");
  m.def("delta_hash_change(Tensor target, Tensor payload, int seed, bool xored=False) -> int");
  m.def("delta_hash(Tensor x, int seed, Tensor? places=None) -> int");
  m.def("delta_pack(Tensor places, Tensor values, int numel) -> Tensor");
  m.def("delta_unpack(Tensor payload, Tensor like, int numel) -> (Tensor, Tensor)");
}

namespace {

void check_dense(const char* op, const char* name, const Tensor& t) {
  MOE_CHECK(
      t.element_size() <= 8, op, ": expected ", name, " to have elements of 8 bytes at most, got ", dtype_string(t));
  MOE_CHECK(
      t.is_contiguous(), op, ": expected ", name, " to be contiguous, got a strided tensor of shape ", shape_string(t));
}

void check_payload(const char* op, const Tensor& payload) {
  check_dtype(op, "payload", payload, ScalarType::Byte);
  check_dim(op, "payload", payload, 1, "[bytes]");
  check_dense(op, "payload", payload);
}

} // namespace

void check_verdict(const char* op, const Verdict& verdict, int64_t size, int64_t numel) {
  const auto [fault, number] = verdict;
  MOE_CHECK(
      fault != kEnds, op, ": expected payload to be whole, got ", size, " bytes, which end in chunk ", number, " of ",
      num_chunks(numel));
  MOE_CHECK(fault != kNoHeader, op, ": expected payload to be a delta, got a header that is none in chunk ", number);
  MOE_CHECK(
      fault != kTooLong, op, ": expected payload to end with its last chunk, got ", number, " bytes behind it for ",
      numel, " elements");
  MOE_CHECK(fault != kPlaces, op, ": expected payload to have places inside the tensor, got others in chunk ", number);
}

void check_encode(const Tensor& x, const Tensor& base) {
  const char* op = "delta_encode";
  check_dense(op, "x", x);
  check_dtype(op, "base", base, x.scalar_type());
  MOE_CHECK(
      shape_string(base) == shape_string(x), op, ": expected base to be of shape ", shape_string(x), ", got ",
      shape_string(base));
  check_dense(op, "base", base);
  check_same_device(op, "base", base, "x", x);
}

void check_apply(const char* op, const Tensor& target, const Tensor& payload) {
  check_payload(op, payload);
  check_dense(op, "target", target);
  check_same_device(op, "payload", payload, "target", target);
  check_apart(op, "payload", payload, "target", target);
}

void check_hash(const Tensor& x, const std::optional<Tensor>& places) {
  const char* op = "delta_hash";
  check_dense(op, "x", x);
  if (places) {
    check_dtype(op, "places", *places, ScalarType::Long);
    check_dim(op, "places", *places, 1, "[N]");
    check_size(op, "places", *places, 0, x.numel(), "a place for each element");
    check_dense(op, "places", *places);
    check_same_device(op, "places", *places, "x", x);
  }
}

void check_pack(const Tensor& places, const Tensor& values, int64_t numel) {
  const char* op = "delta_pack";
  check_dtype(op, "places", places, ScalarType::Long);
  check_dim(op, "places", places, 1, "[n]");
  check_dense(op, "places", places);
  check_dim(op, "values", values, 1, "[n]");
  check_size(op, "values", values, 0, places.numel(), "a value for each place");
  check_dense(op, "values", values);
  check_same_device(op, "values", values, "places", places);
  MOE_CHECK(numel >= 0, op, ": expected numel to be 0 or more, got ", numel);
}

void check_unpack(const Tensor& payload, const Tensor& like, int64_t numel) {
  check_payload("delta_unpack", payload);
  check_dense("delta_unpack", "like", like);
  check_same_device("delta_unpack", "payload", payload, "like", like);
  MOE_CHECK(numel >= 0, "delta_unpack: expected numel to be 0 or more, got ", numel);
}

} // namespace moe_ext::delta
