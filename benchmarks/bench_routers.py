"""Each router's gate against its formula in eager torch; a router is one entry of `CASES`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from _harness import Table, interleaved, milliseconds, ratio

from moe_ext import ops, reference

Tensor = torch.Tensor
Gate = Callable[..., Sequence[Tensor]]

NUM_TOKENS = 16384
NUM_EXPERTS = 64


@dataclass(frozen=True)
class Case:
    """A gate, and what a layer without the operator runs.

    Attributes:
        name: of the row.
        ours: the operator, called with `num_inputs` tensors [T, E]; those of its results that
            require a gradient are differentiated.
        formula: the same in eager torch.
        num_inputs: float32 logits that it takes.
        backward: whether it has a gradient to time.
    """

    name: str
    ours: Gate
    formula: Gate
    num_inputs: int = 1
    backward: bool = True


GIVEN = torch.rand(NUM_TOKENS, NUM_EXPERTS).argsort(dim=1)[:, :8].contiguous()


@functools.cache
def two_choices() -> Tensor:
    """Two experts of each token, the first ones crowded."""
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS) + torch.linspace(1, 0, NUM_EXPERTS)
    return logits.topk(2).indices


def limited_by_cumsum(idx_TK: Tensor, capacity: int) -> tuple[Tensor]:
    """Choices within the capacity, choice by choice: a running count over one-hot rows."""
    order_N = idx_TK.t().reshape(-1)
    rank_NE = torch.nn.functional.one_hot(order_N, NUM_EXPERTS).cumsum(dim=0)
    rank_N = rank_NE.gather(1, order_N[:, None])[:, 0]
    return (order_N.where(rank_N <= capacity, -1).view(idx_TK.shape[1], -1).t(),)


CASES = (
    Case(
        "softmax, 8 given experts",
        lambda x: ops.gate_weights(x, GIVEN),
        lambda x: reference.gate_weights(x, GIVEN),
    ),
    Case(
        "softmax top-8",
        lambda x: ops.topk_gate(x, 8),
        lambda x: reference.topk_gate(x, 8),
    ),
    Case(
        "sigmoid top-8",
        lambda x: ops.topk_gate(x, 8, score_fn="sigmoid"),
        lambda x: reference.topk_gate(x, 8, score_fn="sigmoid"),
    ),
    Case(
        "expert choice, 2 experts a token",
        lambda x: ops.expert_choice_gate(x, 2 * NUM_TOKENS // NUM_EXPERTS),
        lambda x: reference.expert_choice_gate(x, 2 * NUM_TOKENS // NUM_EXPERTS),
    ),
    Case(
        "Sinkhorn top-1",
        lambda x: ops.sinkhorn_gate(x, 1),
        lambda x: reference.sinkhorn_gate(x, 1),
    ),
    Case(
        "Sinkhorn top-2",
        lambda x: ops.sinkhorn_gate(x, 2),
        lambda x: reference.sinkhorn_gate(x, 2),
    ),
    Case(
        "load of 8 sequences",
        lambda x: ops.sequence_load(x, two_choices(), 8),
        lambda x: reference.sequence_load(x, two_choices(), 8),
    ),
    Case(
        "capacity by choice",
        lambda _: ops.limit_capacity(two_choices(), NUM_EXPERTS, 512, policy="choice"),
        lambda _: limited_by_cumsum(two_choices(), 512),
        backward=False,
    ),
)


def train(gate: Gate, inputs: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Forward, and backward from the same gradients for every contender."""
    outputs = [out for out in gate(*inputs) if out.requires_grad]
    while len(grads) < len(outputs):
        grads.append(torch.randn_like(outputs[len(grads)]))
    torch.autograd.grad(outputs, inputs, grads[: len(outputs)])


def row(case: Case) -> tuple[str, ...]:
    """One gate, forward and forward plus backward."""
    logits = [torch.randn(NUM_TOKENS, NUM_EXPERTS) for _ in range(case.num_inputs)]
    leaves = [x.clone().requires_grad_() for x in logits]
    grads: list[Tensor] = []
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: case.ours(*logits),
        "formula": lambda: case.formula(*logits),
    }
    if case.backward:
        runs["ours train"] = lambda: train(case.ours, leaves, grads)
        runs["formula train"] = lambda: train(case.formula, leaves, grads)
    times = interleaved(runs)
    cells = [case.name]
    for ours, formula in (("ours", "formula"), ("ours train", "formula train")):
        if ours in times:
            cells += [milliseconds(times[ours]), milliseconds(times[formula])]
            cells.append(ratio(times[formula], times[ours]))
        else:
            cells += ["-"] * 3
    return tuple(cells)


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = (
        "gate",
        "ms",
        "formula ms",
        "formula / ours",
        "with backward ms",
        "formula with backward ms",
        "formula / ours with backward",
    )
    note = f"T={NUM_TOKENS}, E={NUM_EXPERTS}, float32; the formula is that of `moe_ext.reference`."
    return [Table("Routers", note, header, [row(case) for case in CASES])]
