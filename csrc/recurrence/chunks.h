// Division of positions into chunks, none of which holds positions of two documents. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moe_ext::recurrence {

struct Chunk {
  int64_t begin, end;
  bool fresh; // a document begins here, hence the chunk starts from a state of zeros

  int64_t size() const {
    return end - begin;
  }
};

// Cut [0, length) into chunks of at most `most` positions. documents [length] may be null.
inline std::vector<Chunk> chunks_of(const int64_t* documents, int64_t length, int64_t most) {
  std::vector<Chunk> chunks;
  for (int64_t begin = 0, end = 0; begin < length; begin = end) {
    end = std::min(length, begin + most);
    for (int64_t i = begin + 1; documents != nullptr && i < end; ++i) {
      if (documents[i] != documents[i - 1]) {
        end = i;
      }
    }
    chunks.push_back({begin, end, documents != nullptr && begin > 0 && documents[begin] != documents[begin - 1]});
  }
  return chunks;
}

} // namespace moe_ext::recurrence
