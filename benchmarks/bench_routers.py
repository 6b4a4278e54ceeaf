"""Gates of all routers against their formulas in eager torch; `CASES` has an entry for each."""

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
MODEL_DIM = 1024
RNG_STATE = torch.tensor([1, 0, 0, 0])
GIVEN = torch.rand(NUM_TOKENS, NUM_EXPERTS).argsort(dim=1)[:, :8].contiguous()


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


def eager_gshard(logits: Tensor) -> Sequence[Tensor]:
    """GShard's top-2 with torch's random numbers."""
    p = logits.softmax(dim=1)
    g, idx = p.topk(2, dim=1)
    g = g / g.sum(dim=1, keepdim=True)
    kept = torch.stack([torch.ones(len(g)), torch.rand(len(g))], dim=1) < 2 * g
    kept[:, 0] = True
    counts = idx[kept].bincount(minlength=logits.shape[1])
    firsts = idx[:, 0].bincount(minlength=logits.shape[1])
    return g * kept, idx.masked_fill(~kept, -1), counts, p.sum(dim=0), firsts


def eager_noisy(clean: Tensor, raw_noise: Tensor, top_k: int) -> Sequence[Tensor]:
    """Noisy top-k with torch's random numbers: eq. 3 to 10 of the paper."""
    deviation = torch.nn.functional.softplus(raw_noise) + 0.01
    noisy = clean + torch.randn_like(clean) * deviation
    top, idx = noisy.topk(top_k + 1, dim=1)
    gates = top[:, :top_k].softmax(dim=1)
    importance = torch.zeros_like(clean).scatter(1, idx[:, :top_k], gates).sum(dim=0)
    is_in = noisy > top[:, top_k:]
    threshold = torch.where(is_in, top[:, top_k:], top[:, top_k - 1 : top_k])
    load = torch.special.ndtr((clean - threshold) / deviation).sum(dim=0)
    counts = idx[:, :top_k].flatten().bincount(minlength=clean.shape[1])
    return gates, idx[:, :top_k], counts, importance, load


def noisy_case(top_k: int) -> Case:
    """Noisy top-k, its noise logits given."""
    return Case(
        f"noisy top-{top_k}",
        lambda c, n: ops.noisy_topk_gate(c, n, RNG_STATE, top_k, noise_epsilon=0.01),
        lambda c, n: eager_noisy(c, n, top_k),
        num_inputs=2,
    )


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
    Case(
        "Switch top-1",
        lambda x: ops.topk_gate(x, 1, renormalize=False),
        lambda x: reference.topk_gate(x, 1, renormalize=False),
    ),
    Case("GShard top-2", lambda x: ops.gshard_gate(x, RNG_STATE), eager_gshard),
    noisy_case(2),
    noisy_case(8),
)


def train(gate: Gate, inputs: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Forward, and backward from the same gradients for every contender."""
    outputs = [out for out in gate(*inputs) if out.requires_grad]
    while len(grads) < len(outputs):
        grads.append(torch.randn_like(outputs[len(grads)]))
    torch.autograd.grad(outputs, inputs, grads[: len(outputs)])


def row(case: Case) -> tuple[str, ...]:
    """Rows of a gate: forward, and forward plus backward."""
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


def product_row(dtype: torch.dtype) -> tuple[str, ...]:
    """The router's product, forward and with both gradients, beside upcast tokens and linear."""
    x = torch.randn(NUM_TOKENS, MODEL_DIM).to(dtype).requires_grad_()
    weight = torch.randn(NUM_EXPERTS, MODEL_DIM).to(dtype).requires_grad_()
    grad = torch.randn(NUM_TOKENS, NUM_EXPERTS)
    x_plain, weight_plain = x.detach(), weight.detach()
    times = interleaved(
        {
            "ours": lambda: ops.router_logits(x_plain, weight_plain),
            "upcast": lambda: upcast_logits(x_plain, weight_plain),
            "ours train": lambda: torch.autograd.grad(
                ops.router_logits(x, weight), (x, weight), grad
            ),
            "upcast train": lambda: torch.autograd.grad(
                upcast_logits(x, weight), (x, weight), grad
            ),
        }
    )
    return (
        str(dtype).removeprefix("torch."),
        milliseconds(times["ours"]),
        milliseconds(times["upcast"]),
        ratio(times["upcast"], times["ours"]),
        milliseconds(times["ours train"]),
        milliseconds(times["upcast train"]),
        ratio(times["upcast train"], times["ours train"]),
    )


def upcast_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Eager code that keeps float32 logits without the operator."""
    return torch.nn.functional.linear(x.float(), weight.float())


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md."""
    header = (
        "gate",
        "ms",
        "formula ms",
        "formula / ours",
        "with backward ms",
        "formula with backward ms",
        "formula / ours with backward",
    )
    note = (
        f"T={NUM_TOKENS}, E={NUM_EXPERTS}, float32; the formula is eager torch, with torch's own "
        "random numbers where a gate draws."
    )
    product_header = ("dtype", *(name.replace("formula", "upcast") for name in header[1:]))
    product_note = (
        f"T={NUM_TOKENS}, D={MODEL_DIM}, E={NUM_EXPERTS}; upcast is x.float() and linear."
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [
        Table("Routers", note, header, [row(case) for case in CASES]),
        Table("Router product", product_note, product_header, [product_row(d) for d in dtypes]),
    ]
