// Runs a grouped matrix product as tiles of a fixed size, each on one thread. The tiles, and so the bits, do not depend
// on the number of threads, and small experts occupy the threads as well as large ones.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

// Thread counts of the libraries inside torch; null if torch was built without them. A library plans a product, and so
// the order of its sums, for the number of threads that it may use, even in a parallel region, where it gets one.
extern "C" {
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int);
}

namespace moe_ext::grouped_gemm {

// Limits the libraries to one thread for products of the calling thread, until the object is destroyed.
class OneThread {
 public:
  OneThread() {
    // The first such call in a thread makes torch set the thread's limits, which must not override those below.
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

// Number of tiles into which all the work should be cut. Fewer tiles would leave threads idle; with more tiles, packing
// their operands would take longer.
constexpr int64_t kTilesWanted = 16;

// Nominal size of a tile if a total of `total` rows or columns is to be cut.
inline int64_t tile_size(int64_t total, int64_t least, int64_t most) {
  return std::clamp(total / kTilesWanted, least, most);
}

// Cuts [begin, end) of an expert into parts of about `size`, at most 1.5 times `size`. Cuts are at multiples of 32 from
// `begin`, for few different shapes: the library plans each new shape, in up to ten times the time of the product.
inline void cut(std::vector<Tile>& tiles, int64_t expert, int64_t begin, int64_t end, int64_t size) {
  constexpr int64_t kStep = 32;
  const int64_t length = end - begin;
  const int64_t parts = std::max<int64_t>(length > 0, (length + size / 2) / size);
  const auto bound = [&](int64_t i) { return i == parts ? length : length * i / parts / kStep * kStep; };
  for (int64_t i = 0; i < parts; ++i) {
    tiles.push_back({expert, begin + bound(i), begin + bound(i + 1)});
  }
}

// Sorts tiles by cost, the costliest first. If a costly tile started last, the other threads would wait for it.
template <typename F>
void sort_by_cost(std::vector<Tile>& tiles, const F& cost) {
  std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
}

// Calls f(tile) for each tile; a thread that is free takes the next tile.
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
