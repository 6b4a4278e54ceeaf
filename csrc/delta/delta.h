// Deltas of tensors: argument checks, which throw unless dtypes, shapes and devices fit.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "delta/delta_format.h"

namespace moe_ext::delta {

// Throw the error of a verdict on a payload of `size` bytes for numel elements, unless the payload is sound.
void check_verdict(const char* op, const Verdict& verdict, int64_t size, int64_t numel);
void check_encode(const Tensor& x, const Tensor& base);
void check_apply(const char* op, const Tensor& target, const Tensor& payload);
void check_hash(const Tensor& x, const std::optional<Tensor>& places);
void check_pack(const Tensor& places, const Tensor& values, int64_t numel);
void check_unpack(const Tensor& payload, const Tensor& like, int64_t numel);

} // namespace moe_ext::delta
