// Permutation on CPU, by a stable counting sort. Slots are cut into blocks of a fixed size, and each block counts its
// slots per expert. A prefix sum over (expert, block) gives every block its first ranks, and each block then places its
// slots in order. The stable order is unique, so the result does not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "common/cpu_isa.h"
#include "common/dispatch.h"
#include "common/new_on_cpu.h"
#include "common/stream.h"
#include "permutation/permutation.h"
#include "permutation/permutation_tables.h"

namespace moe_ext::permutation {

MOE_EXT_SELECT_KERNELS(Kernels)

namespace {

using torch::stable::parallel_for;

constexpr int64_t kSlotsPerBlock = 4096;
constexpr int64_t kNone = -1;
// Distance of the prefetch in bytes. For short rows, a prefetch of the next slot's row would come too late.
constexpr int64_t kPrefetchBytes = 4096;

struct Index {
  Tensor slot_of_row;
  Tensor row_of_slot;
  Tensor expert_offsets;
  Tensor num_tokens_per_expert;
  Tensor num_dropped;
};

// Returns the position of the first index outside of [-1, bound), or -1 if there is none.
template <typename IndexT>
int64_t first_out_of_range(const Tensor& index, int64_t bound) {
  const IndexT* idx = data<IndexT>(index);
  const int64_t size = index.numel();
  std::atomic<int64_t> first{size};
  parallel_for(0, size, grain_size(sizeof(IndexT)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (idx[i] < kNone || idx[i] >= bound) {
        int64_t seen = first.load();
        while (i < seen && !first.compare_exchange_weak(seen, i)) {
        }
        return;
      }
    }
  });
  return first.load() == size ? kNone : first.load();
}

void check_table(const char* op, const char* name, const Tensor& table, int64_t bound) {
  const int64_t bad = first_out_of_range<int64_t>(table, bound);
  MOE_CHECK(
      bad == kNone, op, ": expected ", name, " to be in [0, ", bound, ") or -1, got ", data<int64_t>(table)[bad],
      " at position ", bad);
}

// Writes the rank of every slot within its expert. Returns the number of slots of each expert.
template <typename IndexT>
std::vector<int64_t> rank_slots(const IndexT* idx, int64_t num_slots, int64_t num_experts, int64_t* rank) {
  const int64_t num_blocks = (num_slots + kSlotsPerBlock - 1) / kSlotsPerBlock;
  std::vector<int64_t> next(num_blocks * num_experts, 0);
  const auto each_slot = [&](int64_t block, auto&& visit) {
    const int64_t end = std::min(num_slots, (block + 1) * kSlotsPerBlock);
    int64_t* counts = next.data() + block * num_experts;
    for (int64_t slot = block * kSlotsPerBlock; slot < end; ++slot) {
      if (idx[slot] >= 0) {
        visit(slot, counts[idx[slot]]);
      }
    }
  };
  parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      each_slot(block, [](int64_t, int64_t& count) { ++count; });
    }
  });
  std::vector<int64_t> totals(num_experts, 0);
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t e = 0; e < num_experts; ++e) {
      totals[e] += std::exchange(next[block * num_experts + e], totals[e]);
    }
  }
  parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      each_slot(block, [&](int64_t slot, int64_t& count) { rank[slot] = count++; });
    }
  });
  return totals;
}

// Changes the ranks of each overfull expert, so that its `capacity` slots of largest weight keep a row, in slot order.
template <typename IndexT, typename Weight>
void rank_by_score(
    const IndexT* idx, const Weight* weights, const std::vector<int64_t>& totals, int64_t num_slots, int64_t capacity,
    int64_t* rank) {
  const int64_t num_experts = static_cast<int64_t>(totals.size());
  std::vector<std::vector<int64_t>> slots_of_expert(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) {
    slots_of_expert[e].resize(totals[e] > capacity ? totals[e] : 0);
  }
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (idx[slot] >= 0 && totals[idx[slot]] > capacity) {
      MOE_CHECK(
          !std::isnan(weights[slot]),
          "permute_tokens: expected topk_weights to be free of NaN with drop_policy score, got NaN in slot ", slot);
      slots_of_expert[idx[slot]][rank[slot]] = slot;
    }
  }
  parallel_for(0, num_experts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      std::vector<int64_t>& slots = slots_of_expert[e];
      if (slots.empty()) {
        continue;
      }
      const auto better = [&](int64_t a, int64_t b) {
        return weights[a] > weights[b] || (weights[a] == weights[b] && a < b);
      };
      std::nth_element(slots.begin(), slots.begin() + capacity, slots.end(), better);
      std::sort(slots.begin(), slots.begin() + capacity);
      for (int64_t i = 0; i < totals[e]; ++i) {
        rank[slots[i]] = i;
      }
    }
  });
}

Index new_index(const Tensor& topk_idx, const IndexOptions& options) {
  const auto long_tensor = [&](std::initializer_list<int64_t> size) { return new_on_cpu(size, ScalarType::Long); };
  const int64_t num_slots = topk_idx.numel();
  return {
      long_tensor({num_rows(num_slots, options)}), long_tensor({num_slots}), long_tensor({options.num_experts + 1}),
      long_tensor({options.num_experts}), long_tensor({})};
}

// Computes rows from ranks. Expert e owns rows [offsets[e], offsets[e + 1]): first its kept slots, then padding.
template <typename IndexT>
void place_slots(
    const IndexT* idx, const std::vector<int64_t>& totals, const IndexOptions& options, const Index& index) {
  int64_t* offsets = data<int64_t>(index.expert_offsets);
  int64_t* counts = data<int64_t>(index.num_tokens_per_expert);
  int64_t dropped = 0;
  offsets[0] = 0;
  for (int64_t e = 0; e < options.num_experts; ++e) {
    counts[e] = std::min(totals[e], options.capacity);
    dropped += totals[e] - counts[e];
    offsets[e + 1] = offsets[e] + (counts[e] + options.align - 1) / options.align * options.align;
  }
  *data<int64_t>(index.num_dropped) = dropped;
  int64_t* row_of_slot = data<int64_t>(index.row_of_slot);
  int64_t* slot_of_row = data<int64_t>(index.slot_of_row);
  std::fill_n(slot_of_row, index.slot_of_row.numel(), kNone);
  parallel_for(0, index.row_of_slot.numel(), kSlotsPerBlock, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const bool kept = idx[slot] >= 0 && row_of_slot[slot] < options.capacity;
      row_of_slot[slot] = kept ? offsets[idx[slot]] + row_of_slot[slot] : kNone;
      if (kept) {
        slot_of_row[row_of_slot[slot]] = slot;
      }
    }
  });
}

template <typename IndexT>
Index build_index(const Tensor& topk_idx, const std::optional<Tensor>& topk_weights, const IndexOptions& options) {
  const IndexT* idx = data<IndexT>(topk_idx);
  const int64_t bad = first_out_of_range<IndexT>(topk_idx, options.num_experts);
  MOE_CHECK(
      bad == kNone, "permute_tokens: expected topk_idx to be in [0, ", options.num_experts, ") or -1, got ", idx[bad],
      " at token ", bad / topk_idx.size(1), ", choice ", bad % topk_idx.size(1));
  const Index index = new_index(topk_idx, options);
  const int64_t num_slots = topk_idx.numel();
  int64_t* rank = data<int64_t>(index.row_of_slot);
  const std::vector<int64_t> totals = rank_slots(idx, num_slots, options.num_experts, rank);
  if (options.drop_by_score) {
    const Tensor weights = torch::stable::to(as_contiguous(*topk_weights), ScalarType::Double);
    rank_by_score(idx, data<double>(weights), totals, num_slots, options.capacity, rank);
  }
  place_slots(idx, totals, options, index);
  return index;
}

// Writes rows of a result, by memcpy or by stores that bypass the caches.
class RowWriter {
 public:
  explicit RowWriter(const Tensor& out)
      : base_(data<char>(out)),
        row_bytes_(out.size(1) * static_cast<int64_t>(out.element_size())),
        past_caches_(worth_streaming(base_, out.size(0), row_bytes_)) {
  }

  int64_t row_bytes() const {
    return row_bytes_;
  }
  bool past_caches() const {
    return past_caches_;
  }
  void copy(int64_t row, const char* from) const {
    if (past_caches_) {
      stream(base_ + row * row_bytes_, from, row_bytes_);
    } else {
      std::memcpy(base_ + row * row_bytes_, from, row_bytes_);
    }
  }
  void zero(int64_t row) const {
    std::memset(base_ + row * row_bytes_, 0, row_bytes_);
  }
  // Calls f(begin, end) for ranges of [0, size) on several threads. Each thread ends its streaming stores.
  template <typename F>
  void parallel(int64_t size, int64_t bytes_per_item, const F& f) const {
    parallel_for(0, size, grain_size(bytes_per_item), [&](int64_t begin, int64_t end) {
      f(begin, end);
      if (past_caches_) {
        stream_end();
      }
    });
  }

 private:
  char* base_;
  int64_t row_bytes_;
  bool past_caches_;
};

// Writes zeros to the rows without a slot.
void zero_free_rows(const RowWriter& out, const int64_t* slot_of_row, const int64_t* row_of_slot, int64_t num_rows) {
  out.parallel(num_rows, sizeof(int64_t), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (slot_of_row[row] < 0 || row_of_slot[slot_of_row[row]] != row) {
        out.zero(row);
      }
    }
  });
}

// Copies each token to the rows of its slots. A token is read once, whereas a gather by rows would read it once for
// each choice. Works for any dtype, because rows are copied as bytes.
Tensor scatter_tokens(const Tensor& x, const Index& index, int64_t top_k) {
  const Tensor out = new_on_cpu({index.slot_of_row.size(0), x.size(1)}, x.scalar_type());
  const RowWriter rows(out);
  const int64_t* row_of_slot = data<int64_t>(index.row_of_slot);
  rows.parallel(x.size(0), (top_k + 1) * rows.row_bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin * top_k; slot < end * top_k; ++slot) {
      if (row_of_slot[slot] >= 0) {
        rows.copy(row_of_slot[slot], data<char>(x) + slot / top_k * rows.row_bytes());
      }
    }
  });
  zero_free_rows(rows, data<int64_t>(index.slot_of_row), row_of_slot, out.size(0));
  return out;
}

// Computes out[r] = x[slot_of_row[r] / top_k], or zeros for a row without a slot.
Tensor gather_tokens(const Tensor& x, const Tensor& slot_of_row, int64_t top_k) {
  const Tensor out = new_on_cpu({slot_of_row.size(0), x.size(1)}, x.scalar_type());
  const RowWriter rows(out);
  const int64_t* slots = data<int64_t>(slot_of_row);
  rows.parallel(out.size(0), 2 * rows.row_bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (slots[row] < 0) {
        rows.zero(row);
      } else {
        rows.copy(row, data<char>(x) + slots[row] / top_k * rows.row_bytes());
      }
    }
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> permute_tokens_cpu(
    Tensor x,        // [T, D]
    Tensor topk_idx, // [T, K]
    int64_t num_experts,
    std::optional<Tensor> topk_weights, // [T, K]
    std::optional<int64_t> capacity, std::string drop_policy, int64_t align) {
  const IndexOptions options =
      check_permute_tokens(x, topk_idx, num_experts, topk_weights, capacity, drop_policy, align);
  const Tensor idx = as_contiguous(topk_idx);
  const Index index = idx.scalar_type() == ScalarType::Int ? build_index<int32_t>(idx, topk_weights, options)
                                                           : build_index<int64_t>(idx, topk_weights, options);
  return {
      scatter_tokens(as_contiguous(x), index, idx.size(1)),
      index.slot_of_row,
      index.row_of_slot,
      index.expert_offsets,
      index.num_tokens_per_expert,
      index.num_dropped};
}

Tensor gather_tokens_cpu(Tensor x, Tensor slot_of_row, int64_t top_k) {
  check_gather_tokens(x, slot_of_row, top_k);
  const Tensor slots = as_contiguous(slot_of_row);
  check_table("_gather_tokens", "slot_of_row", slots, x.size(0) * top_k);
  return gather_tokens(as_contiguous(x), slots, top_k);
}

Tensor unpermute_tokens_cpu(
    Tensor rows,        // [N, D]
    Tensor slot_of_row, // [N]
    Tensor row_of_slot, // [T K]
    int64_t top_k,
    std::optional<Tensor> topk_weights) { // [T, K]
  check_unpermute_tokens("unpermute_tokens", rows, slot_of_row, row_of_slot, top_k, topk_weights);
  const Tensor index = as_contiguous(row_of_slot);
  check_table("unpermute_tokens", "row_of_slot", index, rows.size(0));
  const int64_t num_tokens = row_of_slot.size(0) / top_k;
  const int64_t dim = rows.size(1);
  Tensor out = new_on_cpu({num_tokens, dim}, rows.scalar_type());
  const Tensor in = as_contiguous(rows);
  const std::optional<Tensor> weights = topk_weights ? std::optional(as_contiguous(*topk_weights)) : std::nullopt;
  dispatch_floating(rows.scalar_type(), [&]<typename T>() {
    const auto& table = kernels().of<T>();
    const auto* w = weights ? data<acc_t<T>>(*weights) : nullptr;
    const int64_t* row_idx = data<int64_t>(index);
    const RowWriter writer(out);
    writer.parallel(num_tokens, (top_k + 1) * writer.row_bytes(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t* own = row_idx + t * top_k;
        table.combine(
            data<T>(out) + t * dim, data<T>(in), own, t + 1 < end ? own + top_k : nullptr,
            w == nullptr ? w : w + t * top_k, top_k, dim, writer.past_caches());
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> unpermute_tokens_backward_cpu(
    Tensor grad,           // [T, D]
    Tensor rows,           // [N, D]
    Tensor slot_of_row,    // [N]
    Tensor row_of_slot,    // [T K]
    Tensor topk_weights) { // [T, K]
  const char* op = "_unpermute_tokens_backward";
  check_unpermute_tokens_backward(grad, rows, slot_of_row, row_of_slot, topk_weights);
  const int64_t top_k = topk_weights.size(1);
  const Tensor slots = as_contiguous(slot_of_row);
  const Tensor index = as_contiguous(row_of_slot);
  check_table(op, "slot_of_row", slots, row_of_slot.size(0));
  check_table(op, "row_of_slot", index, rows.size(0));
  const int64_t dim = rows.size(1);
  const Tensor g = as_contiguous(grad);
  const Tensor in = as_contiguous(rows);
  const Tensor weights = as_contiguous(topk_weights);
  Tensor grad_rows = new_on_cpu({in.size(0), dim}, in.scalar_type());
  Tensor grad_weights = new_on_cpu({weights.size(0), top_k}, weights.scalar_type());
  const RowWriter writer(grad_rows);
  const int64_t* row_idx = data<int64_t>(index);
  const int64_t ahead = std::max<int64_t>(1, kPrefetchBytes / std::max<int64_t>(1, writer.row_bytes()));
  dispatch_floating(rows.scalar_type(), [&]<typename T>() {
    const auto& table = kernels().of<T>();
    const auto* w = data<acc_t<T>>(weights);
    auto* dw = data<acc_t<T>>(grad_weights);
    writer.parallel(g.size(0), (2 * top_k + 1) * writer.row_bytes(), [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin * top_k; slot < end * top_k; ++slot) {
        const int64_t row = row_idx[slot];
        const int64_t next = slot + ahead < end * top_k ? row_idx[slot + ahead] : kNone;
        dw[slot] = row < 0
                       ? 0
                       : table.scale_dot(
                             data<T>(grad_rows) + row * dim, data<T>(g) + slot / top_k * dim, data<T>(in) + row * dim,
                             next < 0 ? nullptr : data<T>(in) + next * dim, w[slot], dim, writer.past_caches());
      }
    });
  });
  zero_free_rows(writer, data<int64_t>(slots), row_idx, in.size(0));
  return {grad_rows, grad_weights};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("permute_tokens", TORCH_BOX(&permute_tokens_cpu));
  m.impl("unpermute_tokens", TORCH_BOX(&unpermute_tokens_cpu));
  m.impl("_unpermute_tokens_backward", TORCH_BOX(&unpermute_tokens_backward_cpu));
  m.impl("_gather_tokens", TORCH_BOX(&gather_tokens_cpu));
}

} // namespace moe_ext::permutation
