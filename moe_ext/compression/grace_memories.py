"""GRACE's memories: what compression left out, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import resolve
from moe_ext.compression.grace_base import Compressor, Memory
from moe_ext.compression.grace_compressors import Context
from moe_ext.distributed.collectives import sum_over_ranks_
from moe_ext.distributed.groups import group_size


class NoneMemory(Memory):
    """Keeps nothing: what is left out is lost."""

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        return tensor.detach().clone()


class _NamedMemory(Memory):
    """Tensors by kind and name; those of a step count once it is committed."""

    def __init__(self, *kinds: str) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        self._open: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}

    def _put(self, kind: str, name: str, tensor: Tensor) -> None:
        self._open[kind][name] = tensor

    def _get(self, kind: str, name: str, like: Tensor) -> Tensor | None:
        kept = self._kept[kind].get(name)
        if kept is not None and kept.shape != like.shape:
            raise ValueError(
                f"{type(self).__name__}: expected {name} to be of shape {tuple(kept.shape)} as "
                f"before, got {tuple(like.shape)}"
            )
        return kept

    def commit(self) -> None:
        """See `Memory`."""
        for kind, tensors in self._open.items():
            self._kept[kind].update(tensors)
            tensors.clear()

    def rollback(self) -> None:
        """See `Memory`."""
        for tensors in self._open.values():
            tensors.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `Memory`."""
        return {
            kind: {name: tensor.clone() for name, tensor in tensors.items()}
            for kind, tensors in self._kept.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Memory`."""
        if set(state) != set(self._kept):
            raise ValueError(
                f"{type(self).__name__}: expected a state of {sorted(self._kept)}, got "
                f"{sorted(state)}"
            )
        for kind, tensors in state.items():
            self._kept[kind] = {name: tensor.clone() for name, tensor in tensors.items()}


class ResidualMemory(_NamedMemory):
    """Error feedback: what was left out is added to the next gradient.

    With both factors at 1, what was applied plus the mean of what is owed is the sum of the means.

    Args:
        beta: factor on what is owed.
        gamma: factor on the gradient.
    """

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        """Nothing is owed."""
        super().__init__("residuals")
        self.beta = beta
        self.gamma = gamma

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Name to what is owed, after the last step."""
        return self._kept["residuals"]

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        whole = self.gamma * tensor.detach().float()
        residual = self._get("residuals", name, tensor)
        return whole if residual is None else whole.add_(residual, alpha=self.beta)

    def update(
        self,
        tensor: Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: Sequence[Tensor],
        ctx: Any,
    ) -> None:
        """See `Memory`."""
        left_N = ctx.left_N if isinstance(ctx, Context) else None
        if left_N is None:
            left_N = tensor - compressor.decompress(list(tensor_compressed), ctx)
        self._put("residuals", name, left_N.view(tensor.shape))


class DgcMemory(_NamedMemory):
    """Momentum correction and factor masking of Deep Gradient Compression.

    ``u = momentum u + g``, ``v = v + u``; of v the largest are sent, and both are zero there. The
    optimizer then runs without momentum.

    Args:
        momentum: in [0, 1).
        gradient_clipping: clamp elements to the root of the mean over ranks of the squared norm.
        world_size: not used; ranks are those of the group.
        group: the ranks, None for the default group.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887).
    """

    def __init__(
        self,
        momentum: float = 0.9,
        gradient_clipping: bool = False,
        world_size: int | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Check the momentum."""
        super().__init__("momenta", "residuals")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"DgcMemory: expected momentum to be in [0, 1), got {momentum!r}")
        self.momentum = momentum
        self.gradient_clipping = gradient_clipping
        self.group = group

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """See `Memory`."""
        gradient = tensor.detach().float()
        if self.gradient_clipping:
            gradient = self._clipped(gradient)
        u, v = self._get("momenta", name, tensor), self._get("residuals", name, tensor)
        u = gradient.clone() if u is None else gradient + self.momentum * u
        v = u.clone() if v is None else v + u
        self._put("momenta", name, u)
        self._put("residuals", name, v)
        return v

    def update(
        self,
        tensor: Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: Sequence[Tensor],
        ctx: Any,
    ) -> None:
        """See `Memory`.

        Raises:
            ValueError: the compressor does not say which elements it sends.
        """
        indices_K = ctx.indices_K if isinstance(ctx, Context) else None
        if indices_K is None:
            raise ValueError(
                "DgcMemory: expected compressor to select elements (topk, dgc, threshold, "
                f"randomk), got {type(compressor).__name__}"
            )
        for kind in ("momenta", "residuals"):
            kept = self._open[kind][name].clone()
            kept.view(-1)[indices_K] = 0.0
            self._put(kind, name, kept)

    def _clipped(self, gradient: Tensor) -> Tensor:
        group = resolve(self.group, "DgcMemory")
        square = gradient.square().sum().view(1)
        sum_over_ranks_(square, group, operation="DgcMemory")
        limit = torch.sqrt(square / group_size(group))
        return torch.minimum(torch.maximum(gradient, -limit), limit)
