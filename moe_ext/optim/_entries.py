"""Parameters within a step of an optimizer that communicates, and dense means of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from moe_ext.comm.collectives import all_reduce_
from moe_ext.comm.groups import group_size
from moe_ext.distributed.dtensor import local_part

_BUCKET_NUMEL = 25 * 2**18


@dataclass
class Entry:
    """A parameter within a step.

    Attributes:
        number: number of the parameter in a state of torch's form.
        group: parameter group, with the options.
        label: name for error messages.
        ranks: ranks that hold copies of the parameter; None is this rank alone.
        optimizer: optimizer that keeps the state of the parameter.
        sent_dtype: dtype of the message in which its gradient is averaged.
        grad: gradient of this rank, later the mean over ranks; None if there is none.
        active: whether any rank has a gradient.
    """

    parameter: nn.Parameter
    number: int
    group_index: int
    group: dict[str, Any]
    label: str
    ranks: ProcessGroup | None
    optimizer: Optimizer
    sent_dtype: torch.dtype
    grad: Tensor | None = None
    active: bool = True

    @property
    def part(self) -> Tensor:
        """The parameter, or this rank's part if the parameter is divided over ranks."""
        return local_part(self.parameter)

    @property
    def device(self) -> torch.device:
        """The device of the parameter."""
        return self.parameter.device

    @property
    def state(self) -> dict[str, Any]:
        """State that the optimizer keeps for the parameter."""
        state: dict[str, Any] = self.optimizer.state[self.parameter]
        return state

    @property
    def is_compressed(self) -> bool:
        """True if the momentum may be sent compressed."""
        return not self.group.get("non_freeze", False) and self.part.numel() > 0

    @property
    def is_apart(self) -> bool:
        """True if the parameter differs between ranks now."""
        return bool(self.optimizer.state.get(self.parameter, {}).get("apart", False))

    @property
    def is_idle(self) -> bool:
        """True if a step changes neither the parameter nor its moments."""
        return not self.active and not self.is_apart

    def make(self, names: Sequence[str]) -> None:
        """Add missing buffers to the state: float32 zeros."""
        for name in names:
            if name not in self.state:
                self.state[name] = torch.zeros_like(self.part, dtype=torch.float32)

    def move_momentum(self, momentum: Tensor) -> None:
        """Update a momentum, in place, by this rank's gradient."""
        beta1 = self.group["betas"][0]
        if self.grad is None:
            momentum.mul_(beta1)
        else:
            momentum.lerp_(self.grad, 1 - beta1)


def mask_problem(group: Mapping[str, Any], parameter: Tensor, name: str) -> str | None:
    """Return the reason why an exp_avg_mask does not fit a parameter, as text; None if it fits."""
    mask, shape = group.get("exp_avg_mask"), parameter.shape
    if mask is None or mask.numel() == shape.numel():
        return None
    with contextlib.suppress(RuntimeError):
        if torch.broadcast_shapes(mask.shape, shape) == shape:
            return None
    return (
        "expected exp_avg_mask to have as many elements as each parameter of its group, "
        f"{shape.numel()} in shape {tuple(shape)} of {name}, or to broadcast to it, got shape "
        f"{tuple(mask.shape)}"
    )


def clip_factor(entries: Iterable[Entry], max_norm: float) -> Tensor | None:
    """Return the factor that bounds the gradients' norm; None if `max_norm` is 0, for no bound."""
    grads = [entry.grad for entry in entries if entry.grad is not None]
    if max_norm == 0 or not grads:
        return None
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2)))
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip(entries: Sequence[Entry], max_norm: float) -> None:
    """Clip the norm of the gradients to `max_norm`. Entries get new tensors."""
    scale = clip_factor(entries, max_norm)
    for entry in entries:
        if entry.grad is not None and scale is not None:
            entry.grad = entry.grad * scale


def alike(entries: Iterable[Entry], name: str) -> list[list[Entry]]:
    """Split entries into lists with equal ranks and an equal attribute of this name."""
    found: dict[tuple[int, Any], list[Entry]] = {}
    for entry in entries:
        found.setdefault((id(entry.ranks), getattr(entry, name)), []).append(entry)
    return list(found.values())


def mean_over_ranks(
    parts: list[Tensor],
    group: ProcessGroup | None,
    operation: str,
    *,
    dtype: torch.dtype = torch.float32,
    halvings: int = 0,
) -> list[Tensor]:
    """Average float32 tensors over ranks by one all-reduce, sent in `dtype`.

    For the message values are halved `halvings` times, so that they fit into `dtype`.
    """
    size = group_size(group)
    if size == 1:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts]).div_(size * 2.0**halvings).to(dtype)
    all_reduce_(flat, group, operation=operation)
    pieces = (flat.float() * 2.0**halvings).split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def average_gradients(entries: Sequence[Entry], operation: str, halvings: int) -> None:
    """Replace the gradients of active entries by their means over ranks."""
    for members in alike((e for e in entries if e.active), "sent_dtype"):
        runs: list[list[Entry]] = [[]]
        for entry in members:
            if sum(e.part.numel() for e in runs[-1]) >= _BUCKET_NUMEL:
                runs.append([])
            runs[-1].append(entry)
        for run in runs:
            parts = [
                torch.zeros_like(e.part, dtype=torch.float32) if e.grad is None else e.grad
                for e in run
            ]
            ranks, dtype = run[0].ranks, run[0].sent_dtype
            means = mean_over_ranks(parts, ranks, operation, dtype=dtype, halvings=halvings)
            for entry, mean in zip(run, means, strict=True):
                entry.grad = mean
