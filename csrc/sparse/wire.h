// The wire format's operators: the argument checks that both backends share.
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

// Checks everything that needs no look at the data.
Codecs check_encode_payload(
    const Tensor& indices, // [K]; [0] for dense
    const Tensor& codes, const Tensor& scales, int64_t numel, int64_t count, const std::string& index_codec,
    const std::string& value_codec, int64_t value_block);

void check_payload(const char* op, const Tensor& payload);

// Refuses a header that does not describe a payload of this size, whatever its bytes: nothing is read past the end and
// nothing allocated that the payload does not pay for.
void check_header(const char* op, const Header& header, uint64_t size);

// `sum` is the payload's, or 0 where its header says that it has none.
void check_checksum(const char* op, const Header& header, uint32_t sum);

[[noreturn]] void refuse_indices(IndexCodec codec, uint64_t at);

// All but the sizes that depend on the indices, which set_index_bytes adds.
Header make_header(Codecs codecs, int64_t numel, int64_t count, int64_t value_block, bool checksum);

Layout set_index_bytes(Header& header, uint64_t bytes);

} // namespace moe_ext::wire
