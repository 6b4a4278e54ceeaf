// Ranges of positions and documents of a tile's rows and columns, and what the ranges tell about its scores.
// Torch-free.
#pragma once

#include "attention/attention_math.h"

namespace moe_ext::attention {

// Smallest and largest position and document of some tokens in any order.
struct Extent {
  int32_t first = kNoLimit, last = -1;
  int32_t first_document = INT32_MAX, last_document = INT32_MIN;

  MOE_INLINE void add(int32_t position, int32_t document) {
    first = position < first ? position : first;
    last = position > last ? position : last;
    first_document = document < first_document ? document : first_document;
    last_document = document > last_document ? document : last_document;
  }

  // Merges ranges. Adding both ends of `other` as positions would be wrong, because the ends of an empty range are no
  // positions.
  MOE_INLINE void add(const Extent& other) {
    first = other.first < first ? other.first : first;
    last = other.last > last ? other.last : last;
    first_document = other.first_document < first_document ? other.first_document : first_document;
    last_document = other.last_document > last_document ? other.last_document : last_document;
  }
};

// Return true if some token of `rows` may see some token of `keys`, and if all see all. Exact for single tokens. For
// more, the smallest and largest positions decide, so that may_see may err towards true and all_see_all towards false.
MOE_INLINE bool may_see(const Extent& rows, const Extent& keys, Window window) {
  return keys.first <= visible_positions(rows.last, window).last &&
         keys.last >= visible_positions(rows.first, window).first && keys.first_document <= rows.last_document &&
         keys.last_document >= rows.first_document;
}

MOE_INLINE bool all_see_all(const Extent& rows, const Extent& keys, Window window) {
  return keys.last <= visible_positions(rows.first, window).last &&
         keys.first >= visible_positions(rows.last, window).first && rows.first_document == rows.last_document &&
         keys.first_document == keys.last_document && rows.first_document == keys.first_document;
}

} // namespace moe_ext::attention
