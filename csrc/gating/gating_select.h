// Top-k selection for the loops of gates, by insertion into a sorted list. Compiled once per instruction set.
#pragma once

#include "gating/gating_tile.h"

namespace moe_ext::gating::MOE_ISA {
namespace {

// Writes the K largest keys of each lane and their experts, descending; ties go to the lower expert. Missing experts
// are -1 if fewer than K keys are above -inf. An expert is inserted before the first smaller key.
template <typename Acc, int64_t kTopK>
void select_fixed(Acc* list, Int<Acc>* idx, const Acc* keys, int64_t num_experts) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  Vec<Acc> key[kTopK];
  IntVec<Acc> expert[kTopK];
  for (int64_t k = 0; k < kTopK; ++k) {
    key[k] = broadcast(-kInfinity<Acc>);
    expert[k] = IntVec<Acc>{} - 1;
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    const Vec<Acc> v = load(keys + e * kLanes);
    const IntVec<Acc> self = IntVec<Acc>{} + static_cast<Int<Acc>>(e);
    IntVec<Acc> here = v > key[kTopK - 1];
#pragma GCC unroll 8
    for (int64_t k = kTopK - 1; k > 0; --k) {
      const IntVec<Acc> above = v > key[k - 1];
      expert[k] = here ? (above ? expert[k - 1] : self) : expert[k];
      key[k] = here ? (above ? key[k - 1] : v) : key[k];
      here = above;
    }
    expert[0] = here ? self : expert[0];
    key[0] = here ? v : key[0];
  }
  for (int64_t k = 0; k < kTopK; ++k) {
    store(list + k * kLanes, key[k]);
    store_idx<Acc>(idx + k * kLanes, expert[k]);
  }
}

// Does the same for any K, with the list in memory instead of registers.
template <typename Acc>
void select_any(Acc* list, Int<Acc>* idx, const Acc* keys, int64_t num_experts, int64_t top_k) {
  constexpr int64_t kLanes = Lanes<Acc>::kCount;
  for (int64_t k = 0; k < top_k; ++k) {
    store(list + k * kLanes, broadcast(-kInfinity<Acc>));
    store_idx<Acc>(idx + k * kLanes, IntVec<Acc>{} - 1);
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    const Vec<Acc> v = load(keys + e * kLanes);
    const IntVec<Acc> self = IntVec<Acc>{} + static_cast<Int<Acc>>(e);
    // At most e + 1 places of the list are filled.
    for (int64_t k = e < top_k ? e : top_k - 1; k >= 0; --k) {
      const Vec<Acc> old = load(list + k * kLanes);
      const IntVec<Acc> here = v > old;
      Vec<Acc> moved = v;
      IntVec<Acc> moved_idx = self;
      if (k > 0) {
        const Vec<Acc> before = load(list + (k - 1) * kLanes);
        const IntVec<Acc> above = v > before;
        moved = above ? before : v;
        moved_idx = above ? load_idx<Acc>(idx + (k - 1) * kLanes) : self;
      }
      store(list + k * kLanes, here ? moved : old);
      store_idx<Acc>(idx + k * kLanes, here ? moved_idx : load_idx<Acc>(idx + k * kLanes));
    }
  }
}

template <typename Acc>
MOE_INLINE void select(Acc* list, Int<Acc>* idx, const Acc* keys, int64_t num_experts, int64_t top_k) {
  switch (top_k) {
    case 1:
      return select_fixed<Acc, 1>(list, idx, keys, num_experts);
    case 2:
      return select_fixed<Acc, 2>(list, idx, keys, num_experts);
    case 3:
      return select_fixed<Acc, 3>(list, idx, keys, num_experts);
    case 4:
      return select_fixed<Acc, 4>(list, idx, keys, num_experts);
    case 6:
      return select_fixed<Acc, 6>(list, idx, keys, num_experts);
    case 8:
      return select_fixed<Acc, 8>(list, idx, keys, num_experts);
    default:
      return select_any<Acc>(list, idx, keys, num_experts, top_k);
  }
}

} // namespace
} // namespace moe_ext::gating::MOE_ISA
