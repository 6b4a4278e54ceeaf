#include "balance/balance.h"

#include "common/library.h"

namespace moe_ext::balance {

MOE_EXT_SCHEMAS(m) {
  m.def("plan_balance(Tensor num_tokens_per_expert, int num_ranks) -> (Tensor slot_expert, Tensor slot_rows)");
  m.def("split_rows(Tensor counts, Tensor slot_expert, Tensor slot_rows) -> Tensor");
}

void check_plan_balance(const Tensor& num_tokens_per_expert, int64_t num_ranks) {
  const char* op = "plan_balance";
  check_dtype(op, "num_tokens_per_expert", num_tokens_per_expert, ScalarType::Long);
  check_dim(op, "num_tokens_per_expert", num_tokens_per_expert, 1, "[E]");
  MOE_CHECK(
      num_ranks >= 1 && num_tokens_per_expert.size(0) % num_ranks == 0, op,
      ": expected num_ranks to be a divisor of the ", num_tokens_per_expert.size(0), " experts, got ", num_ranks);
}

void check_split_rows(const Tensor& counts, const Tensor& slot_expert, const Tensor& slot_rows) {
  const char* op = "split_rows";
  check_dtype(op, "counts", counts, ScalarType::Long);
  check_dtype(op, "slot_expert", slot_expert, ScalarType::Long);
  check_dtype(op, "slot_rows", slot_rows, ScalarType::Long);
  check_dim(op, "counts", counts, 2, "[P, E]");
  check_dim(op, "slot_expert", slot_expert, 2, "[P, S]");
  check_dim(op, "slot_rows", slot_rows, 2, "[P, S]");
  for (const auto& [name, t] : {std::pair{"slot_expert", &slot_expert}, std::pair{"slot_rows", &slot_rows}}) {
    check_size(op, name, *t, 0, counts.size(0), "the ranks");
    MOE_CHECK(
        t->size(0) * t->size(1) == 2 * counts.size(1), op, ": expected ", name, " to have two slots for each of the ",
        counts.size(1), " experts, got shape ", shape_string(*t));
  }
}

} // namespace moe_ext::balance
