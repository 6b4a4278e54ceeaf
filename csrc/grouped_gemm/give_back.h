// Pages of a tensor that nobody reads any more, given back to the system before the tensor is freed.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "grouped_gemm/tiles.h"

namespace moe_ext::grouped_gemm {

// Whether malloc keeps freed memory for the next tensors (moe_ext.reuse_memory): pages given back would be fresh then.
inline std::atomic<bool> reuses_memory{false};

// The rows of a matrix that each expert owns, given back when the last of the expert's tiles is done.
class RowsGivenBack {
 public:
  // Without `owned`, or where the matrix is small, nothing happens.
  RowsGivenBack(const Tensor& matrix, const int64_t* offsets, const std::vector<Tile>& tiles, bool owned)
      : base_(static_cast<char*>(matrix.data_ptr())),
        row_bytes_(matrix.size(1) * static_cast<int64_t>(matrix.element_size())),
        offsets_(offsets) {
    constexpr int64_t kLeastBytes = int64_t{4} << 20;
    if (owned && matrix.is_contiguous() && matrix.size(0) * row_bytes_ >= kLeastBytes && !reuses_memory) {
      for (const Tile& tile : tiles) {
        num_experts_ = std::max(num_experts_, tile.expert + 1);
      }
      tiles_left_.reset(new std::atomic<int64_t>[num_experts_]());
      for (const Tile& tile : tiles) {
        ++tiles_left_[tile.expert];
      }
    }
  }
  // Everything once more: Linux 6.14 and later free the page tables of 2 MiB that go at once, and only without a table
  // does the next tensor here get a huge page.
  ~RowsGivenBack() {
    if (tiles_left_ != nullptr) {
      give_back(offsets_[0], offsets_[num_experts_]);
    }
  }
  RowsGivenBack(const RowsGivenBack&) = delete;
  RowsGivenBack& operator=(const RowsGivenBack&) = delete;
  void done(const Tile& tile) const {
    if (tiles_left_ != nullptr && --tiles_left_[tile.expert] == 0) {
      give_back(offsets_[tile.expert], offsets_[tile.expert + 1]);
    }
  }

 private:
  void give_back(int64_t first_row, int64_t last_row) const {
    constexpr uintptr_t kPage = 4096;
    const auto begin = reinterpret_cast<uintptr_t>(base_ + first_row * row_bytes_);
    const auto end = reinterpret_cast<uintptr_t>(base_ + last_row * row_bytes_);
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
    if (last > first) {
      (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
  }

  char* base_;
  int64_t row_bytes_;
  const int64_t* offsets_;
  int64_t num_experts_ = 0;
  std::unique_ptr<std::atomic<int64_t>[]> tiles_left_;
};

} // namespace moe_ext::grouped_gemm
