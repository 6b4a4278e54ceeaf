"""Growth of the error of attention in bfloat16 with the number of ranks."""

import torch
from _harness import Table
from attention_peers import (
    ONE_PROCESS,
    OURS,
    TORCH_RING,
    Case,
    absences,
    present,
    whole_reference,
)
from attention_ranks import Job, measure
from torch import Tensor

CASE = Case(seq_len=2048, heads=2, dtype=torch.bfloat16)
RANKS = (2, 4, 8, 16)
ON_RINGS = (OURS, "ours, bf16 dK and dV", "ours, fast", TORCH_RING)
HEADER = ("contender", "P", "out", "dq", "dk", "dv")


def cells(errors: list[float]) -> list[str]:
    """Text of an error in thousandths, for the table."""
    return [f"{1e3 * error:.3f}" for error in errors] or ["-"] * 4


def rounding(reference: list[Tensor]) -> list[float]:
    """Errors of the float64 results themselves, once rounded to bfloat16."""
    return [float((x.bfloat16().double() - x).norm() / x.norm()) for x in reference]


def errors() -> dict[tuple[str, int], list[float]]:
    """Relative errors of out, dq, dk and dv by contender and number of ranks."""
    reference = whole_reference(CASE)
    found = {("float64, rounded", 0): rounding(reference)}
    alone = measure(1, {ONE_PROCESS: Job(ONE_PROCESS, CASE)}, reference=reference)
    found[ONE_PROCESS, 1] = alone[ONE_PROCESS].errors
    names = present(ON_RINGS)
    for num_ranks in RANKS:
        costs = measure(num_ranks, {n: Job(n, CASE) for n in names}, reference=reference)
        found |= {(name, num_ranks): costs[name].errors for name in names}
    order = ["float64, rounded", ONE_PROCESS, *names]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def table(found: dict[tuple[str, int], list[float]]) -> Table:
    """The table of docs/benchmarks.md."""
    note = (
        f"Relative Frobenius error against float64, in thousandths, with inputs in bfloat16: "
        f"S={CASE.seq_len} H={CASE.heads} D={CASE.dim}, causal, zigzag. *float64, rounded* is what "
        f"one rounding of the right numbers costs.{absences(ON_RINGS)}"
    )
    rows = [
        (name, str(num_ranks) if num_ranks else "-", *cells(values))
        for (name, num_ranks), values in found.items()
    ]
    return Table("Error of attention over ranks", note, HEADER, rows)


if __name__ == "__main__":
    print(table(errors()).markdown())
