// Encodes and decodes payloads with operators of moe_ext, called through torch's dispatcher.
#include "runtime/coding.h"

#include <tuple>

#include "quantize/quantize_format.h"
#include "runtime/operators.h"
#include "sparse/pair_format.h"

namespace moe_ext::runtime {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> quantize_blockwise(
    const Tensor& x, const QuantizedCoding& coding, const Owed& owed, const MaybeTensor& rng_state, int64_t first) {
  static const auto op = find_operator<std::tuple<Tensor, Tensor>(
      const Tensor&, c10::string_view, int64_t, const MaybeTensor&, const MaybeTensor&, bool, const MaybeTensor&,
      int64_t)>("moe_ext::quantize_blockwise");
  return op.call(x, coding.format, coding.block, owed.residual, rng_state, false, owed.residual_in, first);
}

void dequantize_add_(
    const Tensor& out, const Tensor& codes, const Tensor& scales, const QuantizedCoding& coding, bool adds) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, c10::string_view, int64_t, bool)>(
          "moe_ext::dequantize_add_");
  op.call(out, codes, scales, coding.format, coding.block, adds);
}

Tensor pack_indices(const Tensor& indices_K, int64_t numel) {
  static const auto op = find_operator<Tensor(const Tensor&, int64_t)>("moe_ext::pack_indices");
  return op.call(indices_K, numel);
}

Tensor unpack_indices(const Tensor& packed, int64_t count, int64_t numel) {
  static const auto op = find_operator<Tensor(const Tensor&, int64_t, int64_t)>("moe_ext::unpack_indices");
  return op.call(packed, count, numel);
}

void add_pairs_(
    const Tensor& out, const Tensor& values_K, const Tensor& packed, int64_t numel, int64_t start, double divisor) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, double)>("moe_ext::add_pairs_");
  op.call(out, values_K, packed, numel, start, divisor);
}

// Views part of a row of bytes as numbers.
Tensor part_of(const Tensor& row, int64_t start, int64_t num_bytes, at::ScalarType dtype) {
  return row.narrow(0, start, num_bytes).view(dtype);
}

// Copies the bytes of `part` into a row, padded with zeros to a multiple of 16. Returns the end of the padding.
int64_t put(const Tensor& row, int64_t start, const Tensor& part) {
  const Tensor bytes = part.view(at::kByte);
  const int64_t end = start + aligned(bytes.numel());
  row.narrow(0, start, bytes.numel()).copy_(bytes);
  if (start + bytes.numel() < end) {
    row.narrow(0, start + bytes.numel(), end - start - bytes.numel()).zero_();
  }
  return end;
}

// Elements of a block of quantised values, which share a scale.
constexpr int64_t kPairBlock = 128;

} // namespace

int64_t QuantizedCoding::code_bytes(int64_t numel) const {
  return quantize::code_bytes(
      numel, static_cast<quantize::Format>(quantize::find_format(format, quantize::kFormatNames)));
}

int64_t QuantizedCoding::payload_bytes(int64_t numel) const {
  return aligned(code_bytes(numel)) + aligned(4 * quantize::num_scales(numel, block));
}

Tensor QuantizedCoding::encode(
    const Tensor& row, const Tensor& x, const Owed& owed, const MaybeTensor& rng_state, int64_t first) const {
  const auto [codes, scales] = quantize_blockwise(x, *this, owed, rng_state, first);
  const int64_t end = put(row, put(row, 0, codes), scales);
  row.narrow(0, end, row.numel() - end).zero_();
  return scales;
}

void QuantizedCoding::decode_add_(
    const Tensor& out, const Tensor& payload, int64_t numel, int64_t first, bool adds, double divisor) const {
  const int64_t count = out.numel();
  const Tensor codes = payload.narrow(0, code_bytes(first), code_bytes(count));
  const int64_t scales_at = aligned(code_bytes(numel)) + (block == 0 ? 0 : 4 * (first / block));
  const Tensor scales = part_of(payload, scales_at, 4 * quantize::num_scales(count, block), at::kFloat);
  dequantize_add_(out, codes, divisor == 1.0 ? scales : scales.div(divisor), *this, adds);
}

std::optional<at::ScalarType> PairCoding::plain() const {
  if (value_codec == "fp32") {
    return at::kFloat;
  }
  return value_codec == "bf16" ? std::optional(at::kBFloat16) : std::nullopt;
}

int64_t PairCoding::value_bytes() const {
  if (const auto dtype = plain()) {
    return aligned(count * static_cast<int64_t>(c10::elementSize(*dtype)));
  }
  return QuantizedCoding{value_codec, kPairBlock}.payload_bytes(count);
}

int64_t PairCoding::payload_bytes() const {
  return value_bytes() + pairs::num_bytes(pairs::index_layout(count, numel));
}

void PairCoding::encode(const Tensor& row, const Tensor& values_K, const Tensor& indices_K) const {
  const Tensor values = row.narrow(0, 0, value_bytes());
  if (const auto dtype = plain()) {
    put(values, 0, values_K.to(*dtype));
  } else {
    QuantizedCoding{value_codec, kPairBlock}.encode(values, values_K, {}, std::nullopt, 0);
  }
  put(row, values.numel(), pack_indices(indices_K, numel));
}

Tensor PairCoding::values(const Tensor& payload) const {
  if (const auto dtype = plain()) {
    const auto num_bytes = count * static_cast<int64_t>(c10::elementSize(*dtype));
    return part_of(payload, 0, num_bytes, *dtype).to(at::kFloat);
  }
  const Tensor values_K = at::empty({count}, payload.options().dtype(at::kFloat));
  if (count > 0) {
    QuantizedCoding{value_codec, kPairBlock}.decode_add_(values_K, payload, count, 0, false, 1.0);
  }
  return values_K;
}

Tensor PairCoding::packed(const Tensor& payload) const {
  return payload.narrow(0, value_bytes(), payload_bytes() - value_bytes());
}

Tensor PairCoding::indices(const Tensor& payload) const {
  return unpack_indices(packed(payload), count, numel);
}

void PairCoding::decode_add_(const Tensor& out, const Tensor& payload, int64_t start, double divisor) const {
  add_pairs_(out, values(payload), packed(payload), numel, start, divisor);
}

void PairCoding::add_lost_(const Tensor& residual, const Tensor& payload, const Tensor& values_K) const {
  if (value_codec != "fp32") {
    add_pairs_(residual, values_K - values(payload), packed(payload), numel, 0, 1.0);
  }
}

} // namespace moe_ext::runtime
