#include "sparse/pairs.h"

#include <cmath>
#include <limits>

#include "common/library.h"
#include "common/overlap.h"

namespace moe_ext::pairs {

MOE_EXT_SCHEMAS(m) {
  m.def("pack_indices(Tensor indices, SymInt numel) -> Tensor");
  m.def("unpack_indices(Tensor packed, SymInt count, SymInt numel) -> Tensor");
  m.def(
      "add_pairs_(Tensor(a!) out, Tensor values, Tensor packed, SymInt numel, SymInt start=0, float divisor=1.0) -> "
      "()");
}

namespace {

constexpr int64_t kMostElements = int64_t{1} << 62;
constexpr int64_t kMostPairs = std::numeric_limits<int32_t>::max();

IndexLayout check_sizes(const char* op, int64_t count, int64_t numel) {
  MOE_CHECK(numel >= 0 && numel <= kMostElements, op, ": expected numel to be in [0, 2^62], got ", numel);
  MOE_CHECK(
      count >= 0 && count <= kMostPairs, op, ": expected the number of pairs to be in [0, ", kMostPairs, "], got ",
      count);
  MOE_CHECK(count == 0 || numel > 0, op, ": expected numel to be at least 1 for ", count, " pairs, got 0");
  return index_layout(count, numel);
}

void check_packed(const char* op, const Tensor& packed, const IndexLayout& layout) {
  MOE_CHECK(
      packed.dim() == 1 && packed.size(0) == num_bytes(layout) && packed.is_contiguous(), op,
      ": expected packed to be ", num_bytes(layout), " contiguous bytes, got shape ", shape_string(packed));
  MOE_CHECK(
      reinterpret_cast<uintptr_t>(packed.data_ptr()) % 4 == 0, op,
      ": expected packed to begin at a multiple of 4 bytes in memory, got one at ",
      reinterpret_cast<uintptr_t>(packed.data_ptr()) % 4, " beside it");
}

} // namespace

IndexLayout check_pack_indices(const Tensor& indices, int64_t numel) {
  const char* op = "pack_indices";
  check_dtype(op, "indices", indices, ScalarType::Long);
  check_dim(op, "indices", indices, 1, "[K]");
  return check_sizes(op, indices.size(0), numel);
}

IndexLayout check_unpack_indices(const Tensor& packed, int64_t count, int64_t numel) {
  const char* op = "unpack_indices";
  check_dtype(op, "packed", packed, ScalarType::Byte);
  const IndexLayout layout = check_sizes(op, count, numel);
  check_packed(op, packed, layout);
  return layout;
}

IndexLayout check_add_pairs(
    const Tensor& out,
    const Tensor& values, // [K]
    const Tensor& packed, int64_t numel, int64_t start, double divisor) {
  const char* op = "add_pairs_";
  check_same_device(op, "values", values, "out", out);
  check_same_device(op, "packed", packed, "out", out);
  check_dtype(op, "out", out, ScalarType::Float);
  check_dtype(op, "values", values, ScalarType::Float);
  check_dtype(op, "packed", packed, ScalarType::Byte);
  check_dim(op, "values", values, 1, "[K]");
  const IndexLayout layout = check_sizes(op, values.size(0), numel);
  check_packed(op, packed, layout);
  MOE_CHECK(
      out.is_contiguous(), op, ": expected out to be contiguous, got a strided tensor of shape ", shape_string(out));
  MOE_CHECK(
      layout.count == 0 || out.numel() > 0, op, ": expected out to have elements for ", layout.count,
      " pairs, got shape ", shape_string(out));
  MOE_CHECK(start >= 0 && start <= numel, op, ": expected start to be in [0, ", numel, "], got ", start);
  MOE_CHECK(
      std::isfinite(divisor) && divisor != 0, op, ": expected divisor to be finite and other than 0, got ", divisor);
  check_apart(op, "out", out, "values", values);
  check_apart(op, "out", out, "packed", packed);
  return layout;
}

} // namespace moe_ext::pairs
