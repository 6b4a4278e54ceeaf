// Operators of the wire format: the checks that both backends share.
#pragma once

#include <cstdint>
#include <string>

#include "common/check.h"
#include "sparse/wire_format.h"

namespace moe_ext::wire {

struct Codecs {
  IndexCodec index;
  ValueCodec value;
};

// Checks all arguments, except for the values of elements, and returns the codecs by name.
Codecs check_encode_payload(
    const Tensor& indices, // [K]; [0] for dense
    const Tensor& codes, const Tensor& scales, int64_t numel, int64_t count, const std::string& index_codec,
    const std::string& value_codec, int64_t value_block);

void check_payload(const char* op, const Tensor& payload);

// Refuses a header that does not describe a payload of `size` bytes. Whatever the bytes, a decoder then reads nothing
// past the end and allocates at most about 64 bytes per byte of the payload (8 per bit of a bitmap).
void check_header(const char* op, const Header& header, uint64_t size);

// Refuses a payload whose computed checksum `sum` differs from the header's; `sum` is 0 if the payload has none.
void check_checksum(const char* op, const Header& header, uint32_t sum);

// Raises the error for indices that are wrong from value `at` on.
[[noreturn]] void refuse_indices(IndexCodec codec, uint64_t at);

// Makes a header without the bytes of the indices and of the payload, which set_index_bytes sets.
Header make_header(Codecs codecs, int64_t numel, int64_t count, int64_t value_block, bool checksum);

Layout set_index_bytes(Header& header, uint64_t bytes);

} // namespace moe_ext::wire
