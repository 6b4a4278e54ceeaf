"""What ranks tell each other before a step: that it is the same step, of finite gradients.

One all-gather of a few integers, after which every rank raises the same error or none does. It has
one size on all ranks and at all steps; for more than 496 parameters a second one follows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from moe_ext.compression.agreement import non_finite
from moe_ext.distributed.collectives import check_equal_over_ranks, share
from moe_ext.distributed.gradients import fingerprint
from moe_ext.distributed.groups import group_ranks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROBLEMS: dict[int, tuple[type[Exception], str]] = {
    1: (TypeError, "parameters to be plain tensors, got a DTensor"),
    2: (TypeError, "parameters to be float32, bfloat16 or float16, got another type"),
    3: (TypeError, "gradients to be dense, got a sparse one"),
    4: (ValueError, "gradients to be finite, got NaN or infinity"),
    5: (
        ValueError,
        "parameters to require gradients from the first step on, or from load_state_dict (flush, "
        "and load the state_dict again), got a later one",
    ),
}
_BITS = 62
_FIRST_WORDS = 8


@dataclass(frozen=True)
class Named:
    """A parameter and its name in messages."""

    parameter: nn.Parameter
    label: str
    ranks: tuple[int, ...] | None  # global ranks that hold copies, None for all


def _find_problem(named: Sequence[Named], frozen: Sequence[Named]) -> tuple[int, int]:
    """Number of a problem of this rank and of the parameter, (0, 0) without."""
    for index, entry in enumerate(frozen):
        if entry.parameter.requires_grad:
            return 5, len(named) + index
    for index, entry in enumerate(named):
        grad = entry.parameter.grad
        if isinstance(entry.parameter, DTensor):
            return 1, index
        if entry.parameter.dtype not in _DTYPES:
            return 2, index
        if grad is not None and grad.layout != torch.strided:
            return 3, index
    present, grads = [], []
    for index, entry in enumerate(named):
        if entry.parameter.grad is not None and entry.parameter.numel():
            present.append(index)
            grads.append(entry.parameter.grad)
    if not grads:
        return 0, 0
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    # NOTE: device-to-host sync: a step that must not be taken is known only then.
    finite = torch.isfinite(norms).tolist()
    for index, grad, known in zip(present, grads, finite, strict=True):
        # Squares of finite elements may overflow.
        if not known and non_finite(grad):
            return 4, index
    return 0, 0


def agree_on_step(
    op: str,
    named: Sequence[Named],
    frozen: Sequence[Named],
    step: int,
    group: ProcessGroup | None,
    *,
    options: str | None,
) -> list[bool]:
    """Check the gradients of all ranks, and find out which parameters have one.

    Args:
        op: name for messages.
        named: all parameters that are trained, in the order of all ranks.
        frozen: the others; none of them may require gradients by now.
        step: number of the step.
        group: the ranks, None for this one alone.
        options: at the first step, what must be equal on all ranks beside the values of the
            parameters that all hold; None afterwards.

    Returns:
        For each parameter whether any rank that holds it has a gradient.

    Raises:
        ValueError: on every rank: steps, options or parameters differ, a state was loaded on some
            ranks only, or a gradient is not finite.
        TypeError: on every rank: a parameter or gradient is of a kind that is not supported.
        RankFailureError: a rank died or did not answer.
    """
    problem, which = _find_problem(named, frozen)
    has = [entry.parameter.grad is not None for entry in named]
    if group is None:
        _raise(op, [*named, *frozen], problem, which, None)
        return has
    device, ranks = named[0].parameter.device, group_ranks(group)
    words = [
        sum(1 << bit for bit, flag in enumerate(has[start : start + _BITS]) if flag)
        for start in range(0, len(has), _BITS)
    ]
    facts = _facts(named, step, problem, options)
    # Of one size whatever ranks have: a rank in another place must be told, not waited for.
    head = (words + [0] * _FIRST_WORDS)[:_FIRST_WORDS]
    rows = share([problem, which, *facts.values(), *head], group, device, operation=op)
    _compare(op, [*named, *frozen], list(facts), rows, group)
    masks = {rank: row[2 + len(facts) :] for rank, row in zip(ranks, rows, strict=True)}
    if len(words) > _FIRST_WORDS:
        # Only now is known that this is as long on every rank.
        rows = share(words[_FIRST_WORDS:], group, device, operation=op)
        masks = {rank: masks[rank] + row for rank, row in zip(ranks, rows, strict=True)}
    return [
        any(masks[r][i // _BITS] >> (i % _BITS) & 1 for r in (entry.ranks or ranks))
        for i, entry in enumerate(named)
    ]


def _facts(named: Sequence[Named], step: int, problem: int, options: str | None) -> dict[str, int]:
    """What must be equal on every rank; as many numbers at every step."""
    first, signature = options is not None, ""
    shared: list[tuple[str, nn.Parameter]] = []
    if first:
        signature = "\n".join(f"{tuple(e.parameter.shape)} {e.parameter.dtype}" for e in named)
        # Only ranks with plain tensors can be compared by value; the others raise in any case.
        shared = [(e.label, e.parameter) for e in named if e.ranks is None and not problem]
    return {
        "whether this is the first step since the start or load_state_dict (load a state on all "
        "ranks or on none)": int(first),
        "the number of parameters": len(named),
        "the checksum of their shapes and dtypes": zlib.crc32(signature.encode()),
        "the number of the step": step,
        "the checksum of the options at the first step": zlib.crc32((options or "").encode()),
        "the values of the parameters at the first step (seed every rank alike)": (
            fingerprint(shared) if first else 0
        ),
    }


def _compare(
    op: str,
    everything: Sequence[Named],
    names: list[str],
    rows: list[list[int]],
    group: ProcessGroup,
) -> None:
    """Raise the same on every rank unless all may take the step."""
    checks = list(zip(names, list(zip(*rows, strict=True))[2:], strict=False))
    for name, column in checks[:3]:
        check_equal_over_ranks(name, column, group, op)
    # Only lists of one length name the same parameter by a number.
    for rank, row in zip(group_ranks(group), rows, strict=True):
        _raise(op, everything, row[0], row[1], rank)
    for name, column in checks[3:]:
        check_equal_over_ranks(name, column, group, op)


def _raise(op: str, named: Sequence[Named], problem: int, which: int, rank: int | None) -> None:
    if problem:
        error, rule = _PROBLEMS[problem]
        where = "" if rank is None else f" on rank {rank}"
        raise error(f"{op}: expected {rule} for {named[which].label}{where}")
