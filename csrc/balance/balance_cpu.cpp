// CPU side of plans that give every rank the same number of rows. README.md explains the construction.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "balance/balance.h"
#include "common/dispatch.h"

namespace moe_ext::balance {

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;

void check_loads(const char* op, const char* name, const int64_t* loads, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    MOE_CHECK(loads[i] >= 0, op, ": expected ", name, " to be at least 0, got ", loads[i], " at ", i);
  }
}

// An alias table over experts: the rows that each column keeps of its own expert, and one other expert that fills it.
struct AliasTable {
  std::vector<int64_t> capacity, kept, alias, filled;

  AliasTable(const int64_t* loads, int64_t num_experts, int64_t num_ranks)
      : capacity(num_experts), kept(loads, loads + num_experts), alias(num_experts, -1), filled(num_experts, 0) {
    const int64_t num_rows = std::accumulate(loads, loads + num_experts, int64_t{0});
    const int64_t per_rank = num_experts / num_ranks;
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t rank = e / per_rank;
      const int64_t share = num_rows / num_ranks + (rank < num_rows % num_ranks);
      capacity[e] = share / per_rank + (e % per_rank < share % per_rank);
    }
  }

  int64_t excess(int64_t e) const {
    return kept[e] - capacity[e];
  }

  // Fills columns of `low` from columns of `high`, each time from the last of both, until `low` or `high` is empty.
  void pair(std::vector<int64_t>& low, std::vector<int64_t>& high) {
    while (!low.empty() && !high.empty()) {
      const int64_t to = low.back(), from = high.back();
      low.pop_back();
      alias[to] = from;
      filled[to] = -excess(to);
      kept[from] -= filled[to];
      if (excess(from) <= 0) {
        high.pop_back();
        if (excess(from) < 0) {
          low.push_back(from);
        }
      }
    }
  }
};

std::tuple<Tensor, Tensor> plan_balance_cpu(Tensor num_tokens_per_expert, int64_t num_ranks) {
  check_plan_balance(num_tokens_per_expert, num_ranks);
  const Tensor loads = contiguous(num_tokens_per_expert);
  const int64_t num_experts = loads.size(0), per_rank = num_experts / num_ranks;
  check_loads("plan_balance", "num_tokens_per_expert", data<int64_t>(loads), num_experts);
  AliasTable table(data<int64_t>(loads), num_experts, num_ranks);
  std::vector<int64_t> low, high, rank_excess(num_ranks, 0);
  for (int64_t rank = num_ranks - 1; rank >= 0; --rank) {
    std::vector<int64_t> less, more;
    for (int64_t e = (rank + 1) * per_rank - 1; e >= rank * per_rank; --e) {
      const int64_t excess = table.excess(e);
      rank_excess[rank] += excess;
      if (excess != 0) {
        (excess < 0 ? less : more).push_back(e);
      }
    }
    table.pair(less, more);
    low.insert(low.end(), less.begin(), less.end());
    high.insert(high.end(), more.begin(), more.end());
  }
  // Sorted in ascending order, because `pair` takes the last column of `high` first.
  std::sort(high.begin(), high.end(), [&](int64_t a, int64_t b) {
    const int64_t rank_a = a / per_rank, rank_b = b / per_rank;
    if (rank_a != rank_b) {
      return rank_excess[rank_a] != rank_excess[rank_b] ? rank_excess[rank_a] < rank_excess[rank_b] : rank_a > rank_b;
    }
    return table.excess(a) != table.excess(b) ? table.excess(a) < table.excess(b) : a > b;
  });
  table.pair(low, high);

  const int64_t num_slots = 2 * per_rank;
  Tensor slot_expert = new_empty(loads, {num_ranks, num_slots}), slot_rows = new_empty(loads, {num_ranks, num_slots});
  std::vector<std::pair<int64_t, int64_t>> moved; // (expert, rows)
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    int64_t* expert = data<int64_t>(slot_expert) + rank * num_slots;
    int64_t* rows = data<int64_t>(slot_rows) + rank * num_slots;
    const int64_t first = rank * per_rank;
    moved.clear();
    for (int64_t i = 0; i < per_rank; ++i) {
      expert[i] = first + i;
      rows[i] = table.kept[first + i];
      expert[per_rank + i] = -1;
      rows[per_rank + i] = 0;
    }
    for (int64_t e = first; e < first + per_rank; ++e) {
      const int64_t alias = table.alias[e];
      if (alias >= first && alias < first + per_rank) {
        rows[alias - first] += table.filled[e];
      } else if (alias >= 0) {
        moved.emplace_back(alias, table.filled[e]);
      }
    }
    std::sort(moved.begin(), moved.end());
    int64_t slot = per_rank - 1;
    for (const auto& [e, n] : moved) {
      slot += slot < per_rank || expert[slot] != e;
      expert[slot] = e;
      rows[slot] += n;
    }
  }
  return {slot_expert, slot_rows};
}

// The slots of an expert and the room in each; `next` is the slot that is filled next.
struct Slots {
  std::vector<int64_t> place, room;
  size_t next = 0;
};

Tensor split_rows_cpu(Tensor counts, Tensor slot_expert, Tensor slot_rows) {
  const char* op = "split_rows";
  check_split_rows(counts, slot_expert, slot_rows);
  const Tensor c = contiguous(counts), experts = contiguous(slot_expert), planned = contiguous(slot_rows);
  const int64_t num_ranks = c.size(0), num_experts = c.size(1), num_places = 2 * num_experts;
  const int64_t num_slots = experts.size(1);
  const int64_t* count = data<int64_t>(c);
  const int64_t* expert_of = data<int64_t>(experts);
  const int64_t* plan = data<int64_t>(planned);
  check_loads(op, "counts", count, num_ranks * num_experts);
  check_loads(op, "slot_rows", plan, num_places);
  std::vector<Slots> slots(num_experts);
  for (int64_t place = 0; place < num_places; ++place) {
    const int64_t e = expert_of[place];
    MOE_CHECK(e >= -1 && e < num_experts, op, ": expected slot_expert to be below ", num_experts, ", got ", e);
    if (e >= 0) {
      slots[e].place.push_back(place);
      slots[e].room.push_back(plan[place]);
    }
  }
  std::vector<int64_t> totals(num_experts, 0);
  for (int64_t i = 0; i < num_ranks * num_experts; ++i) {
    totals[i % num_experts] += count[i];
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    std::vector<int64_t>& room = slots[e].room;
    const int64_t whole = std::accumulate(room.begin(), room.end(), int64_t{0});
    if (whole == totals[e]) {
      continue;
    }
    MOE_CHECK(!room.empty(), op, ": expected slot_expert to name every expert with rows, got none for ", e);
    if (whole == 0) {
      room[0] = totals[e];
      continue;
    }
    int64_t sum = 0, taken = 0;
    for (int64_t& r : room) {
      sum += r;
      // In 128 bits, because a product of two numbers of rows may exceed 64 bits.
      const auto upto = static_cast<int64_t>(static_cast<__int128>(sum) * totals[e] / whole);
      r = upto - taken;
      taken = upto;
    }
  }
  Tensor num_rows = new_empty(c, {num_ranks, num_places});
  int64_t* out = data<int64_t>(num_rows);
  std::fill(out, out + num_ranks * num_places, 0);
  // First, rows stay on their rank as far as its slots have room.
  std::vector<int64_t> left(count, count + num_ranks * num_experts);
  for (int64_t e = 0; e < num_experts; ++e) {
    for (size_t i = 0; i < slots[e].place.size(); ++i) {
      const int64_t rank = slots[e].place[i] / num_slots;
      const int64_t stay = std::min(left[rank * num_experts + e], slots[e].room[i]);
      out[rank * num_places + slots[e].place[i]] = stay;
      left[rank * num_experts + e] -= stay;
      slots[e].room[i] -= stay;
    }
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (int64_t e = 0; e < num_experts; ++e) {
      int64_t rows = left[rank * num_experts + e];
      Slots& to = slots[e];
      while (rows > 0) {
        const int64_t taken = std::min(rows, to.room[to.next]);
        out[rank * num_places + to.place[to.next]] += taken;
        to.room[to.next] -= taken;
        rows -= taken;
        to.next += to.room[to.next] == 0;
      }
    }
  }
  return num_rows;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ext, CPU, m) {
  m.impl("plan_balance", TORCH_BOX(&plan_balance_cpu));
  m.impl("split_rows", TORCH_BOX(&split_rows_cpu));
}

} // namespace moe_ext::balance
