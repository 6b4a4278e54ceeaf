"""Codecs that send some elements with their indices, and keep the others in the residual.

Shape suffixes: N elements of a flat gradient, K selected elements.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext._checks import check_choice, check_numbers_of_fields, check_rule
from moe_ext.comm.groups import group_size
from moe_ext.comm.pending import Pending
from moe_ext.compression.codecs.base import (
    Calls,
    Codec,
    OnNonfinite,
    PayloadCodec,
    StartOptions,
    Unsent,
    nothing_to_do,
    with_velocity,
)
from moe_ext.compression.codecs.dense import Dense, dense_reduction
from moe_ext.compression.collectives.coding import PAIR_CODECS, Coding, PairCoding
from moe_ext.compression.collectives.sparse import (
    ALGORITHMS,
    SparseLayout,
    SplitRegions,
    sparse_all_reduce,
)
from moe_ext.compression.feedback import CodecMemory, committing
from moe_ext.ops.topk import scope_size_of

# Above this share of selected elements a dense message is smaller than values with indices.
_DENSE_ABOVE = 0.5
# Ratio of the slots of a message to the number of elements that a threshold aims at.
_CAPACITY_FACTOR = 1.25


class _Sparse(PayloadCodec):
    """Base of `TopK` and `Threshold`, which differ in the selection.

    `encode` selects the largest elements of the whole tensor, because it has no memory. A
    threshold, a velocity and scopes by parameter need the memory that `start` receives.
    """

    finds_nonfinite: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True

    density: float
    algorithm: str
    value_codec: str
    momentum: float | None
    scope: str | int = "bucket"

    def __post_init__(self) -> None:
        check_numbers_of_fields(self)
        owner, density, momentum = type(self).__name__, self.density, self.momentum
        check_rule(owner, "density", density, "in [0, 1]", 0.0 <= density <= 1.0)
        fits = momentum is None or 0.0 <= momentum < 1.0
        check_rule(owner, "momentum", momentum, "None or in [0, 1)", fits)
        check_choice(owner, "algorithm", self.algorithm, ALGORITHMS)
        check_choice(owner, "value_codec", self.value_codec, PAIR_CODECS)

    @abstractmethod
    def select(
        self, grad_N: Tensor, memory: CodecMemory, *, check_finite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the values and indices that this rank sends; the residual keeps the rest."""

    def _capacity(self, numel: int) -> int:
        """Return the number of pairs that are sent for `numel` elements."""
        return num_selected(numel, self.density)

    def with_density(self, density: float) -> Codec:
        """See `Codec`."""
        # `replace` needs a dataclass; this class is none, but every subclass is one.
        return replace(self, density=density)  # type: ignore[type-var]

    def coding(self) -> Coding:
        """See `PayloadCodec`; ValueError for options that need the memory of `start`."""
        for option, value, plain in (
            ("momentum", self.momentum, None),
            ("scope", self.scope, "bucket"),
        ):
            rule = f"{plain!r} where parts of a gradient are sent by themselves"
            check_rule(type(self).__name__, option, value, rule, value == plain)
        return super().coding()

    def _pairs(self, numel: int) -> PairCoding:
        return PairCoding(num_selected(numel, self.density), numel, self.value_codec)

    def payload_bytes(self, numel: int) -> int:
        """See `PayloadCodec`."""
        return self._pairs(numel).num_bytes

    def encode(
        self,
        x_N: Tensor,
        residual_N: Tensor | None = None,
        *,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        """See `PayloadCodec`."""
        pairs = self._pairs(x_N.numel())
        owed_N = torch.zeros_like(x_N, dtype=torch.float32) if residual_N is None else residual_N
        found = ops.topk_compress_(x_N, owed_N, pairs.count, check_finite=False)
        payload = pairs.encode(found.values, found.indices)
        pairs.add_lost_(owed_N, payload, found.values)
        return payload

    def decode_add_(self, out_N: Tensor, payload: Tensor) -> None:
        """See `PayloadCodec`."""
        self._pairs(out_N.numel()).decode_add_(out_N, payload)

    @property
    def _is_dense(self) -> bool:
        return self.density > _DENSE_ABOVE

    def _layout(self, count: int, numel: int, world_size: int) -> tuple[SparseLayout, str]:
        """Return the sizes of the messages, and the algorithm that sends them."""
        layout = SparseLayout(count, numel, world_size, self.value_codec)
        return layout, layout.choose(self.algorithm, may_split=True)

    def sent_bytes(self, numel: int, world_size: int) -> int:
        """See `Codec`."""
        if self._is_dense:
            return Dense().sent_bytes(numel, world_size)
        layout, algorithm = self._layout(self._capacity(numel), numel, world_size)
        return layout.sent_bytes(algorithm)

    def num_rounds(self, world_size: int) -> int:
        """See `Codec`."""
        return world_size - 1

    def alone(self) -> Codec:
        """See `Codec`."""
        return Unsent(self.momentum)

    def _start(self, grad_N: Tensor, memory: CodecMemory, how: StartOptions) -> Pending[Tensor]:
        """See `Codec`."""
        if self._is_dense:
            x_N = with_velocity(grad_N, memory, self.momentum)
            memory.take_owed(x_N)
            return dense_reduction(x_N, how.group, how.average, on_nonfinite=how.on_nonfinite)
        values_K, indices_K = self._select_finite(grad_N, memory, how.on_nonfinite)
        size = group_size(how.group)
        # The selection and the residual hold the gradient by now, so the result may overwrite it.
        out_N = grad_N if grad_N.dtype == torch.float32 and grad_N.is_contiguous() else None
        regions = None
        if self._layout(values_K.shape[0], memory.numel, size)[1] == "split":
            regions = memory.carry("regions", lambda: SplitRegions(memory.numel, size), copy.copy)
        found = sparse_all_reduce(
            values_K,
            indices_K,
            memory.numel,
            algorithm=self.algorithm,
            value_codec=self.value_codec,
            residual=memory.tensor("residual"),
            regions=regions,
            out=out_N,
            group=how.group,
            average=how.average,
            validate=False,
            async_op=True,
        )
        assert isinstance(found, Pending)
        return found

    def _select_finite(
        self, grad_N: Tensor, memory: CodecMemory, on_nonfinite: OnNonfinite | None
    ) -> tuple[Tensor, Tensor]:
        """Select elements; if one is not finite, report it and select from zeros.

        The step fails in that case, but other ranks still wait for this rank's message.
        """
        if on_nonfinite is None:
            return self.select(grad_N, memory)
        try:
            return self.select(grad_N, memory, check_finite=True)
        except RuntimeError:
            whole_N = self._whole(grad_N, memory)
            if bool(torch.isfinite(whole_N).all()):
                raise
        on_nonfinite(whole_N)
        memory.begin()
        return self.select(torch.zeros_like(grad_N), memory)

    def _whole(self, grad_N: Tensor, memory: CodecMemory) -> Tensor:
        """Return the numbers that the operators select from: gradient, velocity and residual."""
        for kind, factor in (("velocity", self.momentum), ("residual", 1.0)):
            kept_N = memory.kept(kind)
            if factor is not None and kept_N is not None:
                grad_N = kept_N * (memory.factor(kind) * factor) + grad_N
        return grad_N

    def _arguments(self, memory: CodecMemory) -> dict[str, Any]:
        """Return the residual and the velocity for the operators, as tensors to read and write."""
        kinds = ["residual"] if self.momentum is None else ["residual", "velocity"]
        common: dict[str, Any] = {"momentum": self.momentum or 0.0}
        found = memory.read_write(*kinds)
        if found is not None:
            return {**common, **found, "residual_scale": memory.factor("residual")}
        common["residual"] = memory.whole_residual()
        return {**common, **{kind: memory.tensor(kind) for kind in kinds[1:]}}

    def passes(self, world_size: int) -> tuple[float, float]:
        """See `Codec`."""
        return 1.0, float(world_size)

    def rehearsal(self, grad_N: Tensor, memory: CodecMemory) -> Calls:
        """See `Codec`."""
        if self._is_dense:
            return nothing_to_do()

        def encode() -> tuple[Tensor, Tensor]:
            with committing(memory):
                return self.select(grad_N, memory)

        values_K, indices_K = encode()
        sum_N = torch.zeros_like(grad_N, dtype=values_K.dtype)
        return encode, lambda: sum_N.index_add_(0, indices_K, values_K)


def num_selected(numel: int, density: float) -> int:
    """Return how many elements of a scope are sent, rounded up so that a small scope sends one."""
    return min(numel, math.ceil(density * numel))


def _pieces_of(states: dict[str, Any], memory: CodecMemory) -> list[dict[str, Any]]:
    """Split the arguments of the operators by parameter."""
    cut = {k: memory.pieces(x) if isinstance(x, Tensor) else x for k, x in states.items()}
    return [
        {name: x[i] if isinstance(x, list) else x for name, x in cut.items()}
        for i in range(len(memory.shapes))
    ]


@dataclass(frozen=True)
class TopK(_Sparse):
    """Sends the largest elements with their indices; the residual keeps the rest.

    Args:
        density: share of the elements to send, in [0, 1]. Above one half everything is sent
            densely, because indices would take more bytes than zeros.
        scope: elements that compete with each other: all of the "bucket", of a "parameter", of a
            "row", of an "expert" (one index of the first dimension), or a number of neighbours.
        algorithm: algorithm of `sparse_all_reduce`.
        value_codec: format of the sent values, "fp32" or a smaller format; the residual keeps the
            rounding error.
        momentum: momentum correction and factor masking; the optimizer then runs without momentum.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887).
    """

    name: ClassVar[str] = "topk"

    density: float = 0.01
    scope: str | int = "bucket"
    algorithm: str = "auto"
    value_codec: str = "fp32"
    momentum: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scope, bool) or not isinstance(self.scope, int):
            check_choice("TopK", "scope", self.scope, ("bucket", "parameter", "row", "expert"))
        else:
            check_rule("TopK", "scope", self.scope, "at least 1", self.scope >= 1)

    @property
    def shardable(self) -> bool:
        """See `Codec`."""
        return self.scope not in ("row", "expert")

    def select(
        self, grad_N: Tensor, memory: CodecMemory, *, check_finite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Codec.start`."""
        states = {**self._arguments(memory), "check_finite": check_finite}
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


@dataclass(frozen=True)
class Threshold(_Sparse):
    """Sends all elements above a threshold that is carried from step to step.

    The selection is one pass without a search.

    Args:
        density: share of the elements that the threshold aims at; up to a quarter more are sent.
        algorithm: algorithm of `sparse_all_reduce`.
        value_codec: as `TopK`.
        momentum: as `TopK`.

    Reference: Li and Hoefler, Ok-Topk, 2022 (arXiv 2201.07598), section 3.1.3.
    """

    name: ClassVar[str] = "threshold"

    density: float = 0.01
    algorithm: str = "auto"
    value_codec: str = "fp32"
    momentum: float | None = None

    def _capacity(self, numel: int) -> int:
        return min(numel, math.ceil(_CAPACITY_FACTOR * num_selected(numel, self.density)))

    def select(
        self, grad_N: Tensor, memory: CodecMemory, *, check_finite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Codec.start`."""
        kept = memory.kept("threshold")
        # NOTE: the value is read on CPU only. On other devices this would be a host
        # synchronisation.
        known = kept is not None and (kept.device.type != "cpu" or float(kept) > 0.0)
        threshold = memory.tensor("threshold", 1).view(())
        if not known:
            # The first threshold is found by a search, and later steps adapt it. A threshold of
            # zero, after gradients of zero, would stay zero, so the search is repeated.
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
            **self._arguments(memory),
        )
        return found.values, found.indices
