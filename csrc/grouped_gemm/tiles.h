// Runs the products of a grouped matrix product as tiles of a fixed size, each on one thread: the tiles do not depend
// on the number of threads, so neither do the bits, and small experts share the threads as large ones do.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

// Thread counts of the libraries inside torch, if it was built with them. A library plans a product for the number of
// threads that it may use, even inside a parallel region, where it gets one; the plan decides the order of the sums.
extern "C" {
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int);
}

namespace moe_ext::grouped_gemm {

// Limits the libraries to one thread for the products of this thread, and undoes it.
class OneThread {
 public:
  OneThread() {
    // A thread's first question makes torch set its limits; it must not come after ours.
    torch::stable::get_num_threads();
    if (omp_set_num_threads != nullptr && omp_get_max_threads != nullptr) {
      omp_before_ = omp_get_max_threads();
      omp_set_num_threads(1);
    }
    if (MKL_Set_Num_Threads_Local != nullptr) {
      mkl_before_ = MKL_Set_Num_Threads_Local(1);
    }
  }
  ~OneThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) {
      MKL_Set_Num_Threads_Local(mkl_before_);
    }
    if (omp_before_ > 0) {
      omp_set_num_threads(omp_before_);
    }
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int omp_before_ = 0;
  int mkl_before_ = 0;
};

struct Tile {
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// Tiles that all the work should give: fewer leave threads idle, and each packs its operands anew.
constexpr int64_t kTilesWanted = 16;

// The nominal size of a tile, out of `total` to be cut.
inline int64_t tile_size(int64_t total, int64_t least, int64_t most) {
  return std::clamp(total / kTilesWanted, least, most);
}

// Cuts [begin, end) of an expert into parts of about `size`, none of more than 1.5 times that. Cuts fall on multiples
// of 32 from the begin: the library plans every new shape anew, in up to ten times the time of the product itself.
inline void cut(std::vector<Tile>& tiles, int64_t expert, int64_t begin, int64_t end, int64_t size) {
  constexpr int64_t kStep = 32;
  const int64_t length = end - begin;
  const int64_t parts = std::max<int64_t>(length > 0, (length + size / 2) / size);
  const auto bound = [&](int64_t i) { return i == parts ? length : length * i / parts / kStep * kStep; };
  for (int64_t i = 0; i < parts; ++i) {
    tiles.push_back({expert, begin + bound(i), begin + bound(i + 1)});
  }
}

// The costliest first: one that starts last leaves the other threads waiting.
template <typename F>
void sort_by_cost(std::vector<Tile>& tiles, const F& cost) {
  std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
}

// Calls f(tile) for each, the next one by whichever thread is free.
template <typename F>
void for_each_tile(const std::vector<Tile>& tiles, const F& f) {
  std::atomic<size_t> next{0};
  const int64_t num_workers = std::min<int64_t>(torch::stable::get_num_threads(), tiles.size());
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      const OneThread limit;
      for (size_t i = next++; i < tiles.size(); i = next++) {
        f(tiles[i]);
      }
    }
  });
}

} // namespace moe_ext::grouped_gemm
