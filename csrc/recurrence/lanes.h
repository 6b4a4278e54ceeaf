// Access to rows of a tensor as lanes: kLanes rows side by side, positions one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "grouped_gemm/tiles.h"

namespace moe_ext::recurrence {

// Wanted number of tasks of a pass.
constexpr int64_t kTasksWanted = 16;

// A tensor [B, rows, positions, ...] with any strides.
template <typename Acc>
struct Strided {
  Acc* data;
  int64_t batch, row, position;

  explicit Strided(const Tensor& t)
      : data(moe_ext::data<Acc>(t)), batch(t.stride(0)), row(t.stride(1)), position(t.stride(2)) {
  }

  Acc* at(int64_t b, int64_t r, int64_t t) const {
    return data + b * batch + r * row + t * position;
  }
};

// `count` rows from `first` on. Lanes behind the last row are zeros.
struct Lanes {
  int64_t first, count;
};

// Copy n elements, `step` apart, of `count` rows, `row_step` apart, to out [n][kLanes].
template <int64_t kLanes, typename Acc>
void gather(Acc* out, const Acc* from, int64_t row_step, int64_t step, int64_t n, int64_t count) {
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t lane = 0; lane < count; ++lane) {
      out[t * kLanes + lane] = from[lane * row_step + t * step];
    }
    for (int64_t lane = count; lane < kLanes; ++lane) {
      out[t * kLanes + lane] = 0;
    }
  }
}

template <int64_t kLanes, typename Acc>
void scatter(Acc* to, int64_t row_step, int64_t step, const Acc* lanes, int64_t n, int64_t count) {
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t lane = 0; lane < count; ++lane) {
      to[lane * row_step + t * step] = lanes[t * kLanes + lane];
    }
  }
}

// Memory of a task, which `take` cuts into pieces.
template <typename Acc>
class Memory {
 public:
  explicit Memory(int64_t size) : memory_(new Acc[size]), next_(memory_.get()) {
  }

  Acc* take(int64_t size) {
    Acc* const begin = next_;
    next_ += size;
    return begin;
  }

 private:
  std::unique_ptr<Acc[]> memory_;
  Acc* next_;
};

// Call f(i) for i in [0, count). Free threads take the next i.
template <typename F>
void for_each_task(int64_t count, const F& f) {
  std::vector<grouped_gemm::Tile> tasks;
  for (int64_t i = 0; i < count; ++i) {
    tasks.push_back({0, i, i + 1});
  }
  grouped_gemm::for_each_tile(tasks, [&](const grouped_gemm::Tile& task) { f(task.begin); });
}

// New tensor with the sizes, dtype and order of dimensions of t.
inline Tensor new_like(const Tensor& t) {
  return on_huge_pages(torch::stable::empty_like(t));
}

} // namespace moe_ext::recurrence
