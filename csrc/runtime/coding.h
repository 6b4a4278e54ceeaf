// Payloads: values, or values with indices, as rows of bytes of a size that both ends know beforehand.
//
// moe_ext/compression/collectives/coding.py holds the same in Python.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>

namespace moe_ext::runtime {

using MaybeTensor = std::optional<at::Tensor>;

// Up to the next multiple of 16, so that parts can be read as numbers.
inline int64_t aligned(int64_t num_bytes) {
  return (num_bytes + 15) / 16 * 16;
}

// Residual of a coding: added to its elements first, and then holds what is lost; both of their length.
struct Owed {
  MaybeTensor residual;    // written, and read where the next one is not given
  MaybeTensor residual_in; // only read
};

// Blocks of elements that share a scale, or all of them (block 0): codes, and behind them the scales, both padded to 16
// bytes.
struct QuantizedCoding {
  std::string format;
  int64_t block;

  int64_t code_bytes(int64_t numel) const;
  int64_t payload_bytes(int64_t numel) const;

  // Fills the start of a row with the payload of x, the rest with zeros; returns the scales. `first` is the number of
  // the first element in a stream of random numbers.
  at::Tensor encode(
      const at::Tensor& row, const at::Tensor& x, const Owed& owed, const MaybeTensor& rng_state, int64_t first) const;

  // Adds the elements from `first` on of a payload of `numel` to `out`, or overwrites that with them, divided.
  void decode_add_(
      const at::Tensor& out, const at::Tensor& payload, int64_t numel, int64_t first, bool adds, double divisor) const;
};

// K values with indices into N elements, which never descend and may repeat (unused slots): codes, scales where the
// codec has them, packed indices. What a payload says is brought into range as it is read: a foreign one gives wrong
// numbers, never a write elsewhere.
struct PairCoding {
  int64_t count;
  int64_t numel;
  std::string value_codec;

  int64_t payload_bytes() const;
  void encode(const at::Tensor& row, const at::Tensor& values_K, const at::Tensor& indices_K) const;

  at::Tensor values(const at::Tensor& payload) const; // float32
  at::Tensor indices(const at::Tensor& payload) const;

  // Adds the values, divided, to the elements of `out`, whose first one is that with index `start`.
  void decode_add_(const at::Tensor& out, const at::Tensor& payload, int64_t start = 0, double divisor = 1.0) const;

  // Adds what a payload has lost of its values.
  void add_lost_(const at::Tensor& residual, const at::Tensor& payload, const at::Tensor& values_K) const;

 private:
  // The dtype that values travel as; none for blocks.
  std::optional<at::ScalarType> plain() const;
  int64_t value_bytes() const;
  at::Tensor packed(const at::Tensor& payload) const;
};

} // namespace moe_ext::runtime
