// Returns pages of a tensor that is no longer read to the system, before the tensor is freed.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "grouped_gemm/tiles.h"

namespace moe_ext::grouped_gemm {

// True if malloc keeps freed memory for the next tensors (moe_ext.reuse_memory). Pages are then not given back, because
// the next tensor would have to fault them in again.
inline std::atomic<bool> reuses_memory{false};

// Gives back the rows of a matrix by blocks of memory, each when the last tile that reads it is done. Every call
// interrupts the other processors, so one call for each of many small experts would take longer.
class RowsGivenBack {
 public:
  // Nothing is given back without `owned`, for a small matrix, or if `reuses_memory` is set.
  RowsGivenBack(const Tensor& matrix, const int64_t* offsets, const std::vector<Tile>& tiles, bool owned)
      : begin_(reinterpret_cast<uintptr_t>(matrix.data_ptr())),
        row_bytes_(matrix.size(1) * static_cast<int64_t>(matrix.element_size())),
        offsets_(offsets) {
    constexpr int64_t kLeastBytes = int64_t{4} << 20;
    if (owned && matrix.is_contiguous() && matrix.size(0) * row_bytes_ >= kLeastBytes && !reuses_memory) {
      end_ = begin_ + matrix.size(0) * row_bytes_;
      tiles_left_.reset(new std::atomic<int64_t>[(end_ - 1) / kBlock - begin_ / kBlock + 1]());
      for (const Tile& tile : tiles) {
        num_experts_ = std::max(num_experts_, tile.expert + 1);
        for_each_block(tile, [&](uintptr_t block) { ++tiles_left_[block - begin_ / kBlock]; });
      }
    }
  }
  // Gives back all pages once more. Linux 6.14 and later free a page table only if its 2 MiB are given back by one
  // call, and the next tensor at this address gets a huge page only if there is no page table.
  ~RowsGivenBack() {
    if (tiles_left_ != nullptr) {
      give_back(begin_ + offsets_[0] * row_bytes_, begin_ + offsets_[num_experts_] * row_bytes_);
    }
  }
  RowsGivenBack(const RowsGivenBack&) = delete;
  RowsGivenBack& operator=(const RowsGivenBack&) = delete;
  void done(const Tile& tile) const {
    if (tiles_left_ != nullptr) {
      for_each_block(tile, [&](uintptr_t block) {
        if (--tiles_left_[block - begin_ / kBlock] == 0) {
          give_back(std::max(begin_, block * kBlock), std::min(end_, (block + 1) * kBlock));
        }
      });
    }
  }

 private:
  static constexpr uintptr_t kBlock = uintptr_t{512} << 10;

  // Calls f for the blocks that hold rows of the tile's expert.
  template <typename F>
  void for_each_block(const Tile& tile, const F& f) const {
    const int64_t first_row = offsets_[tile.expert], last_row = offsets_[tile.expert + 1];
    for (uintptr_t block = (begin_ + first_row * row_bytes_) / kBlock;
         first_row < last_row && block <= (begin_ + last_row * row_bytes_ - 1) / kBlock; ++block) {
      f(block);
    }
  }
  static void give_back(uintptr_t begin, uintptr_t end) {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
    if (last > first) {
      (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
  }

  uintptr_t begin_;
  uintptr_t end_ = 0;
  int64_t num_experts_ = 0;
  int64_t row_bytes_;
  const int64_t* offsets_;
  std::unique_ptr<std::atomic<int64_t>[]> tiles_left_;
};

} // namespace moe_ext::grouped_gemm
