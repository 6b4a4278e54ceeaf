// The wire format's operators: the argument checks that both backends share.
#pragma once

#include <cstdint>
#include <string>

#include "common/check.h"
#include "compression/wire_format.h"

namespace moe_ext::compression::wire {

struct Codecs {
  IndexCodec index;
  ValueCodec value;
};

// Checks everything that needs no look at the data.
Codecs check_encode_payload(
    const Tensor& indices, // [K]; [0] for dense
    const Tensor& codes, const Tensor& scales, int64_t numel, int64_t count, const std::string& index_codec,
    const std::string& value_codec, int64_t value_block);

void check_payload(const char* op, const Tensor& payload);

// Refuses a header that does not describe a payload of this size, whatever its bytes: nothing is read past the end and
// nothing allocated that the payload does not pay for.
void check_header(const char* op, const Header& header, uint64_t size);

} // namespace moe_ext::compression::wire
