"""Codecs that send some elements with their indices, and keep the others in the residual.

Shape suffixes: N elements of a flat gradient, K selected ones.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.compression.agreement import resolve
from moe_ext.compression.codecs import (
    Dense,
    OnNonfinite,
    WithMemory,
    check_choice,
    dense_reduction,
    feed_velocity,
)
from moe_ext.compression.feedback import CodecMemory
from moe_ext.compression.pairs import PAIR_CODECS
from moe_ext.compression.reduction import Reduction
from moe_ext.compression.regions import SplitRegions
from moe_ext.compression.sparse_reduce import ALGORITHMS, SparseLayout, sparse_all_reduce
from moe_ext.distributed.comm import Pending
from moe_ext.distributed.groups import group_size
from moe_ext.ops.topk import scope_size_of

# Above this share of selected elements a dense message is smaller than values with indices.
_DENSE_ABOVE = 0.5
# Slots that a threshold may fill beyond what it aims at.
_CAPACITY_FACTOR = 1.25


def _check_density(owner: str, density: float) -> None:
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"{owner}: expected density to be in [0, 1], got {density!r}")


def _check_momentum(owner: str, momentum: float | None) -> None:
    if momentum is not None and not 0.0 <= momentum < 1.0:
        raise ValueError(f"{owner}: expected momentum to be None or in [0, 1), got {momentum!r}")


def _states(memory: CodecMemory, momentum: float | None) -> dict[str, Any]:
    """What the operators want to know of earlier steps: residual, velocity, and where to write."""
    kinds = ["residual"] if momentum is None else ["residual", "velocity"]
    common: dict[str, Any] = {"momentum": momentum or 0.0}
    found = memory.read_write(*kinds)
    if found is not None:
        return {**common, **found, "residual_scale": memory.factor("residual")}
    common["residual"] = memory.whole_residual()
    return {**common, **{kind: memory.tensor(kind) for kind in kinds[1:]}}


def _pieces_of(states: dict[str, Any], memory: CodecMemory) -> list[dict[str, Any]]:
    """The same for each parameter."""
    cut = {k: memory.pieces(x) if isinstance(x, Tensor) else x for k, x in states.items()}
    return [
        {name: x[i] if isinstance(x, list) else x for name, x in cut.items()}
        for i in range(len(memory.shapes))
    ]


def _checked(
    codec: TopK | Threshold,
    grad_N: Tensor,
    memory: CodecMemory,
    on_nonfinite: OnNonfinite | None,
) -> tuple[Tensor, Tensor]:
    """What is selected; of zeros where something is not finite, since this step fails anyway."""
    if on_nonfinite is None:
        return codec.select(grad_N, memory)
    try:
        return codec.select(grad_N, memory, check_finite=True)
    except RuntimeError:
        fed_N = _fed(grad_N, memory, codec.momentum)
        if bool(torch.isfinite(fed_N).all()):
            raise
    on_nonfinite(fed_N)
    memory.begin()
    return codec.select(torch.zeros_like(grad_N), memory)


def _fed(grad_N: Tensor, memory: CodecMemory, momentum: float | None) -> Tensor:
    """What the operators select from."""
    for kind, factor in (("velocity", momentum), ("residual", 1.0)):
        kept_N = memory.kept(kind)
        if factor is not None and kept_N is not None:
            grad_N = kept_N * (memory.factor(kind) * factor) + grad_N
    return grad_N


def num_selected(numel: int, density: float) -> int:
    """How many of a scope are sent: rounded up, so that a small one sends something."""
    return min(numel, math.ceil(density * numel))


def _layout(count: int, numel: int, world_size: int, codec: TopK | Threshold) -> SparseLayout:
    return SparseLayout(count, numel, world_size, codec.value_codec)


def _sent_bytes(count: int, numel: int, world_size: int, codec: TopK | Threshold) -> int:
    if codec.density > _DENSE_ABOVE:
        return Dense().sent_bytes(numel, world_size)
    layout = _layout(count, numel, world_size, codec)
    return layout.sent_bytes(layout.choose(codec.algorithm, may_split=True))


def _sparse_reduction(
    values_K: Tensor,
    indices_K: Tensor,
    grad_N: Tensor,
    memory: CodecMemory,
    codec: TopK | Threshold,
    group: ProcessGroup | None,
    average: bool,
) -> Reduction:
    size = group_size(resolve(group, codec.name))
    # The gradient has gone into the selection and the residual.
    out_N = grad_N if grad_N.dtype == torch.float32 and grad_N.is_contiguous() else None
    layout = _layout(values_K.shape[0], memory.numel, size, codec)
    regions = None
    if layout.choose(codec.algorithm, may_split=True) == "split":
        regions = memory.carry("regions", lambda: SplitRegions(memory.numel, size), copy.copy)
    found = sparse_all_reduce(
        values_K,
        indices_K,
        memory.numel,
        algorithm=codec.algorithm,
        value_codec=codec.value_codec,
        residual=memory.tensor("residual"),
        regions=regions,
        out=out_N,
        group=group,
        average=average,
        validate=False,
        async_op=True,
    )
    assert isinstance(found, Pending)
    return found


def _decode_rehearsal(values_K: Tensor, indices_K: Tensor, numel: int, world_size: int) -> None:
    sum_N = torch.zeros(numel, device=values_K.device)
    for _ in range(world_size):
        sum_N.index_add_(0, indices_K, values_K)


@dataclass(frozen=True)
class TopK(WithMemory):
    """The largest elements with their indices; the rest stays in the residual.

    Args:
        density: share of the elements to send, in [0, 1]; above one half everything is sent
            densely, since indices would cost more than the zeros.
        scope: which elements compete: all of the "bucket", those of a "parameter", of a "row", of
            an "expert" (one index of the first dimension), or a number of neighbours.
        algorithm: of `sparse_all_reduce`.
        value_codec: what values travel as: "fp32" or a smaller format; what it loses stays in the
            residual.
        momentum: momentum correction and factor masking; the optimizer then runs without momentum.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887).
    """

    name: ClassVar[str] = "topk"
    lossy: ClassVar[bool] = True
    feeds_back: ClassVar[bool] = True

    density: float = 0.01
    scope: str | int = "bucket"
    algorithm: str = "auto"
    value_codec: str = "fp32"
    momentum: float | None = None

    def __post_init__(self) -> None:
        _check_density("TopK", self.density)
        _check_momentum("TopK", self.momentum)
        if isinstance(self.scope, bool) or not isinstance(self.scope, int):
            check_choice("TopK", "scope", self.scope, ("bucket", "parameter", "row", "expert"))
        elif self.scope < 1:
            raise ValueError(f"TopK: expected scope to be at least 1, got {self.scope}")
        check_choice("TopK", "algorithm", self.algorithm, ALGORITHMS)
        check_choice("TopK", "value_codec", self.value_codec, PAIR_CODECS)

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        count = num_selected(numel, self.density)
        return _sent_bytes(count, numel, world_size, self)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return world_size - 1

    def select(
        self, grad_N: Tensor, memory: CodecMemory, *, check_finite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Values and indices that leave this rank; the residual keeps the rest."""
        states = {**_states(memory, self.momentum), "check_finite": check_finite}
        if self.scope == "bucket" or isinstance(self.scope, int):
            size = memory.numel if self.scope == "bucket" else int(self.scope)
            scope = "tensor" if self.scope == "bucket" else size
            k = num_selected(min(size, memory.numel), self.density)
            return ops.topk_compress_(grad_N, k=k, scope=scope, **states)
        values, indices, start = [], [], 0
        for grad, one in zip(memory.pieces(grad_N), _pieces_of(states, memory), strict=True):
            scope = "tensor" if self.scope == "parameter" else self.scope
            size = scope_size_of(grad, scope) or grad.numel()
            k = num_selected(size, self.density)
            found = ops.topk_compress_(grad, k=k, scope=scope, **one)
            values.append(found.values)
            indices.append(found.indices + start)
            start += grad.numel()
        return torch.cat(values), torch.cat(indices)

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
        on_nonfinite: OnNonfinite | None = None,
    ) -> Reduction:
        """See `Codec` and `OnNonfinite`."""
        if self.density > _DENSE_ABOVE:
            x_N = feed_velocity(grad_N, memory, self.momentum)
            memory.take_owed(x_N)
            return dense_reduction(x_N, group, average, on_nonfinite=on_nonfinite)
        values_K, indices_K = _checked(self, grad_N, memory, on_nonfinite)
        return _sparse_reduction(values_K, indices_K, grad_N, memory, self, group, average)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        memory.begin()
        if self.density <= _DENSE_ABOVE:
            values_K, indices_K = self.select(grad_N, memory)
            _decode_rehearsal(values_K, indices_K, grad_N.numel(), world_size)
        memory.commit()


@dataclass(frozen=True)
class Threshold(WithMemory):
    """All elements above a threshold that is carried from step to step: one pass, no search.

    Args:
        density: share of the elements that the threshold aims at; a quarter more has room.
        algorithm: of `sparse_all_reduce`.
        value_codec: as `TopK`.
        momentum: as `TopK`.

    Reference: Li and Hoefler, Ok-Topk, 2022 (arXiv 2201.07598), section 3.1.3.
    """

    name: ClassVar[str] = "threshold"
    lossy: ClassVar[bool] = True
    feeds_back: ClassVar[bool] = True

    density: float = 0.01
    algorithm: str = "auto"
    value_codec: str = "fp32"
    momentum: float | None = None

    def __post_init__(self) -> None:
        _check_density("Threshold", self.density)
        _check_momentum("Threshold", self.momentum)
        check_choice("Threshold", "algorithm", self.algorithm, ALGORITHMS)
        check_choice("Threshold", "value_codec", self.value_codec, PAIR_CODECS)

    def _capacity(self, numel: int) -> int:
        return min(numel, math.ceil(_CAPACITY_FACTOR * num_selected(numel, self.density)))

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return _sent_bytes(self._capacity(numel), numel, world_size, self)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return world_size - 1

    def select(
        self, grad_N: Tensor, memory: CodecMemory, *, check_finite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Values and indices that leave this rank; the residual keeps the rest."""
        kept = memory.kept("threshold")
        # NOTE: only on CPU, where looking waits for nothing.
        known = kept is not None and (kept.device.type != "cpu" or float(kept) > 0.0)
        threshold = memory.tensor("threshold", 1).view(())
        if not known:
            # The first step searches once for what later ones carry; gradients of zero tell
            # nothing, and a threshold of zero would stay.
            owed_N = memory.whole_residual() + grad_N
            start = ops.topk_compress_(
                owed_N, torch.zeros_like(owed_N), num_selected(memory.numel, self.density)
            )
            if start.values.numel():
                threshold.copy_(start.values.abs().min())
        found = ops.threshold_compress_(
            grad_N,
            threshold=threshold,
            capacity=self._capacity(memory.numel),
            target=num_selected(memory.numel, self.density),
            check_finite=check_finite,
            **_states(memory, self.momentum),
        )
        return found.values, found.indices

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
        on_nonfinite: OnNonfinite | None = None,
    ) -> Reduction:
        """See `Codec` and `OnNonfinite`."""
        if self.density > _DENSE_ABOVE:
            x_N = feed_velocity(grad_N, memory, self.momentum)
            memory.take_owed(x_N)
            return dense_reduction(x_N, group, average, on_nonfinite=on_nonfinite)
        values_K, indices_K = _checked(self, grad_N, memory, on_nonfinite)
        return _sparse_reduction(values_K, indices_K, grad_N, memory, self, group, average)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        memory.begin()
        if self.density <= _DENSE_ABOVE:
            values_K, indices_K = self.select(grad_N, memory)
            _decode_rehearsal(values_K, indices_K, grad_N.numel(), world_size)
        memory.commit()
