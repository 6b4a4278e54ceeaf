// CPU side of the capacity limit: one pass over the slots of a group in the order of their priority, and a second pass
// over the refused slots. Groups are independent and run in different threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "capacity/capacity.h"
#include "common/dispatch.h"

namespace moe_ext::capacity {
namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;

struct Slots {
  const int64_t* idx;    // [T, K]
  const int64_t* order;  // [T K], or null for the order of the slots
  const int64_t* ranked; // [T, R], or null to drop
  int64_t* out;          // [T, K]
  int64_t top_k;
  int64_t num_ranked;
  int64_t num_slots;
};

// Return the token's best ranked expert that has room and is in none of its slots, or -1.
int64_t next_expert(const Slots& slots, int64_t token, const std::vector<int64_t>& room) {
  const int64_t* own = slots.out + token * slots.top_k;
  for (int64_t r = 0; r < slots.num_ranked; ++r) {
    const int64_t e = slots.ranked[token * slots.num_ranked + r];
    if (e >= 0 && room[e] > 0 && std::find(own, own + slots.top_k, e) == own + slots.top_k) {
      return e;
    }
  }
  return -1;
}

// Limit a group. Returns the number of its slots that are dropped.
int64_t limit_group(const Slots& slots, int64_t group, const CapacityOptions& options) {
  std::vector<int64_t> room(options.num_experts, options.capacity), refused;
  const int64_t begin = group * options.slots_per_group;
  const int64_t end = std::min(slots.num_slots, begin + options.slots_per_group);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = slots.order == nullptr ? i : slots.order[i];
    const int64_t e = slots.idx[slot];
    slots.out[slot] = e >= 0 && room[e] > 0 ? e : -1;
    if (e >= 0 && room[e]-- <= 0) {
      refused.push_back(slot);
    }
  }
  if (slots.ranked == nullptr) {
    return static_cast<int64_t>(refused.size());
  }
  int64_t dropped = 0;
  for (const int64_t slot : refused) {
    const int64_t e = next_expert(slots, slot / slots.top_k, room);
    slots.out[slot] = e;
    if (e < 0) {
      ++dropped;
    } else {
      --room[e];
    }
  }
  return dropped;
}

void check_values(const char* name, const Tensor& idx, int64_t bound) {
  const int64_t* values = data<int64_t>(idx);
  const int64_t* end = values + idx.numel();
  const int64_t* bad = std::find_if(values, end, [bound](int64_t e) { return e < -1 || e >= bound; });
  MOE_CHECK(
      bad == end, "limit_capacity: expected ", name, " to be in [0, ", bound, ") or -1, got ", *bad, " at token ",
      (bad - values) / idx.size(1), ", column ", (bad - values) % idx.size(1));
}

// Throw unless each group's part of `order` names each of its slots once. A slot of another group would race with
// another thread.
void check_order(const Tensor& order, int64_t per_group) {
  const int64_t* slots = data<int64_t>(order);
  std::vector<bool> seen(order.numel(), false);
  for (int64_t i = 0; i < order.numel(); ++i) {
    const int64_t first = i / per_group * per_group, end = std::min(order.numel(), first + per_group);
    MOE_CHECK(
        slots[i] >= first && slots[i] < end && !seen[slots[i]],
        "limit_capacity: expected order to name each slot of a group once, got ", slots[i], " at position ", i);
    seen[slots[i]] = true;
  }
}

std::tuple<Tensor, Tensor> limit_capacity_cpu(
    Tensor topk_idx, // [T, K]
    int64_t num_experts, int64_t capacity,
    std::optional<Tensor> order, // [T K]
    int64_t num_groups,
    std::optional<Tensor> ranked_idx) { // [T, R]
  const CapacityOptions options = check_limit_capacity(topk_idx, num_experts, capacity, order, num_groups, ranked_idx);
  num_groups = options.num_groups;
  const Tensor idx = contiguous(topk_idx);
  const std::optional<Tensor> slots_in_order = order ? std::optional(contiguous(*order)) : std::nullopt;
  const std::optional<Tensor> ranked = ranked_idx ? std::optional(contiguous(*ranked_idx)) : std::nullopt;
  check_values("topk_idx", idx, num_experts);
  if (ranked) {
    check_values("ranked_idx", *ranked, num_experts);
  }
  if (slots_in_order) {
    check_order(*slots_in_order, options.slots_per_group);
  }
  const Tensor out = new_empty(idx, {idx.size(0), idx.size(1)});
  const Tensor num_dropped = new_empty(idx, {});
  const Slots slots{
      data<int64_t>(idx),
      slots_in_order ? data<int64_t>(*slots_in_order) : nullptr,
      ranked ? data<int64_t>(*ranked) : nullptr,
      data<int64_t>(out),
      idx.size(1),
      ranked ? ranked->size(1) : 0,
      idx.numel()};
  std::vector<int64_t> dropped(num_groups, 0);
  parallel_for(0, num_groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      dropped[group] = limit_group(slots, group, options);
    }
  });
  int64_t total = 0;
  for (const int64_t count : dropped) {
    total += count;
  }
  *data<int64_t>(num_dropped) = total;
  return {out, num_dropped};
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("limit_capacity", TORCH_BOX(&limit_capacity_cpu));
}

} // namespace moe_ext::capacity
