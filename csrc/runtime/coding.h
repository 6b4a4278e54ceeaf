// Payloads of messages: rows of bytes that hold values, or values with their indices. Sender and receiver know the size
// of a payload beforehand.
//
// moe_ext/compression/collectives/coding.py holds the same in Python.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>

namespace moe_ext::runtime {

using MaybeTensor = std::optional<at::Tensor>;

// Round up to a multiple of 16, so that parts of a row of bytes can be viewed as numbers.
inline int64_t aligned(int64_t num_bytes) {
  return (num_bytes + 15) / 16 * 16;
}

// Residual of a coding, as long as the coded elements: added to them first, then overwritten by what the coding loses.
struct Owed {
  MaybeTensor residual;    // written; also read if `residual_in` is not given
  MaybeTensor residual_in; // only read
};

// Coding of blocks of elements that share a scale; with block 0 all elements share one. A payload holds the codes, then
// the scales, both padded to 16 bytes.
struct QuantizedCoding {
  std::string format;
  int64_t block;

  int64_t code_bytes(int64_t numel) const;
  int64_t payload_bytes(int64_t numel) const;

  // Fills the start of a row with the payload of x, and the rest of the row with zeros. Returns the scales. `first` is
  // the index of x[0] in the stream of random numbers.
  at::Tensor encode(
      const at::Tensor& row, const at::Tensor& x, const Owed& owed, const MaybeTensor& rng_state, int64_t first) const;

  // Decodes elements [first, first + out.numel()) of a payload of `numel` elements and divides them by `divisor`. Adds
  // them to `out`, or overwrites `out` if not `adds`.
  void decode_add_(
      const at::Tensor& out, const at::Tensor& payload, int64_t numel, int64_t first, bool adds, double divisor) const;
};

// Coding of K values with indices into N elements. Indices never descend, and unused slots repeat one. A payload holds
// codes, scales if `value_codec` has them, and packed indices. Decoding brings indices into range, so that a corrupt
// payload yields wrong numbers but never a write outside of `out`.
struct PairCoding {
  int64_t count;
  int64_t numel;
  std::string value_codec;

  int64_t payload_bytes() const;
  void encode(const at::Tensor& row, const at::Tensor& values_K, const at::Tensor& indices_K) const;

  at::Tensor values(const at::Tensor& payload) const; // float32
  at::Tensor indices(const at::Tensor& payload) const;

  // Adds the values, divided by `divisor`, to `out`, whose first element has the index `start`.
  void decode_add_(const at::Tensor& out, const at::Tensor& payload, int64_t start = 0, double divisor = 1.0) const;

  // Adds to `residual` the difference between the values and their coding in the payload.
  void add_lost_(const at::Tensor& residual, const at::Tensor& payload, const at::Tensor& values_K) const;

 private:
  // The dtype in which values travel; none if they are quantised in blocks.
  std::optional<at::ScalarType> plain() const;
  int64_t value_bytes() const;
  at::Tensor packed(const at::Tensor& payload) const;
};

} // namespace moe_ext::runtime
