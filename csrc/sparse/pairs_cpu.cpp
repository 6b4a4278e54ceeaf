// Pairs on CPU. One thread adds pairs in their order, because pairs from another rank may name an element twice.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/dispatch.h"
#include "sparse/pairs.h"

namespace moe_ext::pairs {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;

// Pairs of a chunk. The elements of a chunk lie at random addresses and are all prefetched before the first is added.
constexpr int64_t kChunk = 128;

void check_values(const int64_t* indices, const IndexLayout& layout) {
  const char* op = "pack_indices";
  const int64_t count = layout.count;
  bool descends = false;
  for (int64_t i = 1; i < count; ++i) {
    descends |= indices[i] < indices[i - 1];
  }
  if (descends) {
    const int64_t* const at = std::is_sorted_until(indices, indices + count);
    fail(op, ": expected indices to be ascending, got ", *at, " after ", at[-1], " at ", at - indices);
  }
  for (const int64_t i : {int64_t{0}, count - 1}) {
    MOE_CHECK(
        count == 0 || (indices[i] >= 0 && indices[i] < layout.numel), op, ": expected indices to be in [0, ",
        layout.numel, "), got ", indices[i], " at ", i);
  }
}

Tensor pack_indices_cpu(
    Tensor indices, // [K]
    int64_t numel) {
  const IndexLayout layout = check_pack_indices(indices, numel);
  const Tensor in = contiguous(indices);
  const int64_t* const from = data<const int64_t>(in);
  check_values(from, layout);
  Tensor packed = new_empty(in, {num_bytes(layout)}, ScalarType::Byte);
  const IndexParts<uint8_t> to(data<uint8_t>(packed), layout);
  for (int64_t run = 0; run < layout.runs; ++run) {
    to.ends_or_indices[run] =
        static_cast<int32_t>(std::lower_bound(from, from + layout.count, (run + 1) * kRun) - from);
  }
  parallel_for(0, layout.count, grain_size(10), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && layout.runs > 0; ++i) {
      to.offsets[i] = static_cast<uint16_t>(from[i]);
    }
    for (int64_t i = begin; i < end && layout.runs == 0; ++i) {
      to.ends_or_indices[i] = static_cast<int32_t>(from[i]);
    }
  });
  std::fill(data<uint8_t>(packed) + used_bytes(layout), data<uint8_t>(packed) + num_bytes(layout), uint8_t{0});
  return packed;
}

// Calls f(i, indices, n) for chunks of pairs [i, i + n) in their order. Wrong ends of runs, descending or above the
// count, are harmless: a run is then empty or longer.
template <typename F>
void for_each_chunk(const uint8_t* packed, const IndexLayout& layout, F&& f) {
  const IndexParts<const uint8_t> from(packed, layout);
  const int64_t count = layout.count;
  int64_t indices[kChunk];
  for (int64_t begin = 0, run = 0; begin < count; begin += kChunk) {
    const int64_t last = std::min(begin + kChunk, count);
    for (int64_t i = begin; i < last && layout.runs == 0; ++i) {
      indices[i - begin] = in_range(from.ends_or_indices[i], layout.numel);
    }
    for (int64_t i = begin; i < last && layout.runs > 0;) {
      const int64_t end = run + 1 < layout.runs ? std::min<int64_t>(from.ends_or_indices[run], last) : last;
      for (; i < end; ++i) {
        indices[i - begin] = std::min(run * kRun + from.offsets[i], layout.numel - 1);
      }
      run += i < last;
    }
    f(begin, indices, last - begin);
  }
}

Tensor unpack_indices_cpu(Tensor packed, int64_t count, int64_t numel) {
  const IndexLayout layout = check_unpack_indices(packed, count, numel);
  Tensor indices = new_empty(packed, {count}, ScalarType::Long);
  int64_t* const to = data<int64_t>(indices);
  for_each_chunk(data<const uint8_t>(packed), layout, [to](int64_t first, const int64_t* chunk, int64_t n) {
    std::copy(chunk, chunk + n, to + first);
  });
  return indices;
}

void add_pairs_cpu(
    Tensor out,
    Tensor values, // [K]
    Tensor packed, int64_t numel, int64_t start, double divisor) {
  const IndexLayout layout = check_add_pairs(out, values, packed, numel, start, divisor);
  const Tensor in = contiguous(values);
  const float* const from = data<const float>(in);
  float* const to = data<float>(out);
  const int64_t size = out.numel();
  const float by = static_cast<float>(divisor);
  for_each_chunk(data<const uint8_t>(packed), layout, [&](int64_t first, int64_t* chunk, int64_t n) {
    float quotients[kChunk];
    for (int64_t i = 0; i < n; ++i) {
      chunk[i] = in_range(chunk[i] - start, size);
      // The hint is non-temporal, so that a line that is used once does not fill the outer caches.
      __builtin_prefetch(to + chunk[i], 1, 0);
    }
    for (int64_t i = 0; i < n; ++i) {
      quotients[i] = from[first + i] / by;
    }
    for (int64_t i = 0; i < n; ++i) {
      if (from[first + i] != 0) {
        to[chunk[i]] += quotients[i];
      }
    }
  });
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("pack_indices", TORCH_BOX(&pack_indices_cpu));
  m.impl("unpack_indices", TORCH_BOX(&unpack_indices_cpu));
  m.impl("add_pairs_", TORCH_BOX(&add_pairs_cpu));
}

} // namespace moe_ext::pairs
