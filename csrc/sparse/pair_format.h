// Encoding of the indices of pairs, with a size that sender and receiver know: int32 ends of the runs of 65536 elements
// (the number of indices below the end of each run), then uint16 offsets in the run. If int32 indices take no more
// bytes, they are sent instead. Little-endian, padded with zeros to a multiple of 16 bytes. Torch-free.
#pragma once

#include <cstdint>
#include <type_traits>

#include "sparse/wire_format.h"

namespace moe_ext::pairs {

using wire::kRun;

struct IndexLayout {
  int64_t count;
  int64_t numel; // elements of the tensor that the indices point into
  int64_t runs;  // 0 for int32 indices
};

inline IndexLayout index_layout(int64_t count, int64_t numel) {
  const int64_t runs = static_cast<int64_t>(wire::num_runs(static_cast<uint64_t>(numel)));
  return {count, numel, 2 * runs < count || numel > int64_t{1} << 31 ? runs : 0};
}

MOE_HD constexpr int64_t used_bytes(const IndexLayout& layout) {
  return layout.runs > 0 ? 4 * layout.runs + 2 * layout.count : 4 * layout.count;
}

MOE_HD constexpr int64_t num_bytes(const IndexLayout& layout) {
  return static_cast<int64_t>(wire::aligned(static_cast<uint64_t>(used_bytes(layout))));
}

// Typed views of packed indices, whose address must be a multiple of 4.
template <typename Byte>
struct IndexParts {
  // T, or const T if Byte is const.
  template <typename T>
  using number = std::conditional_t<std::is_const_v<Byte>, const T, T>;

  number<int32_t>* ends_or_indices;
  number<uint16_t>* offsets;

  MOE_HD IndexParts(Byte* packed, const IndexLayout& layout)
      : ends_or_indices(reinterpret_cast<number<int32_t>*>(packed)),
        offsets(reinterpret_cast<number<uint16_t>*>(packed + 4 * layout.runs)) {
  }
};

// Clamps an index to [0, size), because received bytes may hold any number.
MOE_HD constexpr int64_t in_range(int64_t index, int64_t size) {
  return index < 0 ? 0 : index < size ? index : size - 1;
}

} // namespace moe_ext::pairs
