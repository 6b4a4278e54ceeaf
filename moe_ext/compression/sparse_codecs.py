"""Codecs that send some elements with their indices, and keep the others in the residual.

Shape suffixes: N elements of a flat gradient, K selected ones.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.compression.agreement import resolve
from moe_ext.compression.codecs import (
    Dense,
    WithMemory,
    check_choice,
    dense_reduction,
    feed_velocity,
)
from moe_ext.compression.memory import CodecMemory
from moe_ext.compression.pairs import PAIR_CODECS
from moe_ext.compression.reduction import Reduction
from moe_ext.compression.regions import SplitRegions
from moe_ext.compression.sparse_reduce import ALGORITHMS, SparseLayout, sparse_all_reduce
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


def _selected(
    grad_N: Tensor, memory: CodecMemory, codec: TopK, velocity_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values and indices that leave this rank; the residual keeps the rest."""
    residual_N = memory.whole_residual()
    common: dict[str, Any] = {"momentum": codec.momentum or 0.0, "check_finite": False}
    if codec.scope == "bucket" or isinstance(codec.scope, int):
        size = memory.numel if codec.scope == "bucket" else int(codec.scope)
        scope = "tensor" if codec.scope == "bucket" else size
        k = num_selected(min(size, memory.numel), codec.density)
        return ops.topk_compress_(grad_N, residual_N, k, scope=scope, velocity=velocity_N, **common)
    values, indices, start = [], [], 0
    velocities = memory.pieces(velocity_N) if velocity_N is not None else None
    residuals = memory.pieces(residual_N)
    for i, (grad, residual) in enumerate(zip(memory.pieces(grad_N), residuals, strict=True)):
        scope = "tensor" if codec.scope == "parameter" else codec.scope
        size = scope_size_of(grad, scope) or grad.numel()
        found = ops.topk_compress_(
            grad,
            residual,
            num_selected(size, codec.density),
            scope=scope,
            velocity=None if velocities is None else velocities[i],
            **common,
        )
        values.append(found.values)
        indices.append(found.indices + start)
        start += grad.numel()
    return torch.cat(values), torch.cat(indices)


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
    assert isinstance(found, Reduction)
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

    @property
    def name(self) -> str:
        """See `Codec`."""
        return "topk"

    @property
    def lossy(self) -> bool:
        """See `Codec`."""
        return True

    @property
    def feeds_back(self) -> bool:
        """See `Codec`."""
        return True

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        count = num_selected(numel, self.density)
        return _sent_bytes(count, numel, world_size, self)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return world_size - 1

    def start(
        self,
        grad_N: Tensor,
        memory: CodecMemory,
        *,
        group: ProcessGroup | None = None,
        average: bool = True,
        step: int = 0,
    ) -> Reduction:
        """See `Codec`."""
        if self.density > _DENSE_ABOVE:
            x_N = feed_velocity(grad_N, memory, self.momentum)
            memory.take_owed(x_N)
            return dense_reduction(x_N, group, average)
        velocity_N = memory.tensor("velocity") if self.momentum is not None else None
        values_K, indices_K = _selected(grad_N, memory, self, velocity_N)
        return _sparse_reduction(values_K, indices_K, grad_N, memory, self, group, average)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        memory.open()
        if self.density <= _DENSE_ABOVE:
            velocity_N = memory.tensor("velocity") if self.momentum is not None else None
            values_K, indices_K = _selected(grad_N, memory, self, velocity_N)
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

    density: float = 0.01
    algorithm: str = "auto"
    value_codec: str = "fp32"
    momentum: float | None = None

    def __post_init__(self) -> None:
        _check_density("Threshold", self.density)
        _check_momentum("Threshold", self.momentum)
        check_choice("Threshold", "algorithm", self.algorithm, ALGORITHMS)
        check_choice("Threshold", "value_codec", self.value_codec, PAIR_CODECS)

    @property
    def name(self) -> str:
        """See `Codec`."""
        return "threshold"

    @property
    def lossy(self) -> bool:
        """See `Codec`."""
        return True

    @property
    def feeds_back(self) -> bool:
        """See `Codec`."""
        return True

    def _capacity(self, numel: int) -> int:
        return min(numel, math.ceil(_CAPACITY_FACTOR * num_selected(numel, self.density)))

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        return _sent_bytes(self._capacity(numel), numel, world_size, self)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return world_size - 1

    def _select(self, grad_N: Tensor, memory: CodecMemory) -> tuple[Tensor, Tensor]:
        capacity = self._capacity(memory.numel)
        velocity_N = memory.tensor("velocity") if self.momentum is not None else None
        known = memory.has("threshold")
        threshold = memory.tensor("threshold", 1).view(())
        if not known:
            # The first step searches once for what later ones carry.
            owed_N = memory.whole_residual() + grad_N
            start = ops.topk_compress_(
                owed_N, torch.zeros_like(owed_N), num_selected(memory.numel, self.density)
            )
            if start.values.numel():
                threshold.copy_(start.values.abs().min())
        found = ops.threshold_compress_(
            grad_N,
            memory.whole_residual(),
            threshold,
            capacity,
            target=num_selected(memory.numel, self.density),
            velocity=velocity_N,
            momentum=self.momentum or 0.0,
            check_finite=False,
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
    ) -> Reduction:
        """See `Codec`."""
        if self.density > _DENSE_ABOVE:
            x_N = feed_velocity(grad_N, memory, self.momentum)
            memory.take_owed(x_N)
            return dense_reduction(x_N, group, average)
        values_K, indices_K = self._select(grad_N, memory)
        return _sparse_reduction(values_K, indices_K, grad_N, memory, self, group, average)

    def rehearse(self, grad_N: Tensor, memory: CodecMemory, world_size: int) -> None:
        """See `Codec`."""
        memory.open()
        if self.density <= _DENSE_ABOVE:
            values_K, indices_K = self._select(grad_N, memory)
            _decode_rehearsal(values_K, indices_K, grad_N.numel(), world_size)
        memory.commit()
