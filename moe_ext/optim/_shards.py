"""Sums over sharded parameters: the local part of a DTensor, and one fused all-reduce per mesh.

Shapes: G slices of a parameter that have a norm each: its experts on this rank, or one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate

from moe_ext.distributed.failures import naming_failed_ranks
from moe_ext.distributed.traffic import record_traffic


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_placements(op: str, parameter: Tensor, grad: Tensor, name: str) -> None:
    """ValueError unless a parameter's shards can be summed and its gradient lies as they do."""
    if not isinstance(parameter, DTensor):
        if isinstance(grad, DTensor):
            raise ValueError(f"{op}: expected a plain gradient for {name}, got a DTensor")
        return
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(
            f"{op}: expected DTensor parameters to be sharded or replicated, got "
            f"{parameter.placements} for {name}"
        )
    found = grad.placements if isinstance(grad, DTensor) else "a plain tensor"
    if found != parameter.placements:
        raise ValueError(
            f"{op}: expected gradients to be placed as their parameters, "
            f"{parameter.placements}, got {found} for {name}"
        )


def sharding_groups(parameter: Tensor, dims: Collection[int] | None = None) -> list[ProcessGroup]:
    """The groups over which parts must be summed, for all or some of the sharded dimensions."""
    if not isinstance(parameter, DTensor):
        return []
    groups = []
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate) or parameter.device_mesh.size(axis) == 1:
            continue
        # A strided shard (FSDP over tensor parallelism) has a dim too, and is no Shard by type.
        if dims is None or getattr(placement, "dim", None) in dims:
            groups.append(parameter.device_mesh.get_group(axis))
    return groups


def sum_over_groups(
    parts: Sequence[Tensor], groups: Sequence[Sequence[ProcessGroup]]
) -> list[Tensor]:
    """Sum each part over its own groups, one all-reduce for all parts that share them.

    Args:
        parts: tensors of any shape; not changed.
        groups: for each part the groups to sum over, one after the other; none leaves it.

    Returns:
        The sums, in the dtype of the parts and the same bits on every rank.
    """
    sums = list(parts)
    fused: dict[tuple[object, ...], list[int]] = {}
    for index, (part, over) in enumerate(zip(parts, groups, strict=True)):
        if over:
            fused.setdefault((part.dtype, part.device, *over), []).append(index)
    for key, members in fused.items():
        flat = torch.cat([parts[index].reshape(-1) for index in members])
        for group in key[2:]:
            assert isinstance(group, ProcessGroup)
            with naming_failed_ranks(group, "optimizer step"):
                dist.all_reduce(flat, group=group)
            size = dist.get_world_size(group)
            record_traffic("all_reduce", 2 * (size - 1) * flat.nbytes // size)
        pieces = flat.split([parts[index].numel() for index in members])
        for index, piece in zip(members, pieces, strict=True):
            sums[index] = piece.view(parts[index].shape)
    return sums


class SliceNorms:
    """Norms of whole tensors, or of each expert of stacked ones, over all shards."""

    def __init__(self, parameters: Sequence[Tensor], per_expert: Sequence[bool]) -> None:
        self._parameters = parameters
        self._per_expert = per_expert
        # Along dimension 0 a rank holds whole experts: nothing is summed over that.
        self._groups = [
            sharding_groups(p, range(1, p.dim())) if each else sharding_groups(p)
            for p, each in zip(parameters, per_expert, strict=True)
        ]

    def norms(self, *families: Sequence[Tensor]) -> list[list[Tensor]]:
        """The norms of several local tensors per parameter, in one all-reduce per mesh.

        Args:
            families: lists of local parts, in the order of the parameters.

        Returns:
            For each family and parameter float64 norms: of this rank's experts, else ``[1]``.
        """
        parts = [square_G for family in families for square_G in self._local_squares(family)]
        sums = sum_over_groups(parts, self._groups * len(families))
        norms = [total.sqrt() for total in sums]
        count = len(self._parameters)
        return [norms[i * count : (i + 1) * count] for i in range(len(families))]

    def factors(self, values: Sequence[Tensor]) -> list[Tensor]:
        """A value for each slice, shaped to multiply with the local parts."""
        return [
            value_G.view(-1, *[1] * (parameter.dim() - 1)) if each else value_G.reshape(())
            for value_G, parameter, each in zip(
                values, self._parameters, self._per_expert, strict=True
            )
        ]

    def _local_squares(self, family: Sequence[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for dtype in (torch.float32, torch.float64):
            chosen = [
                i
                for i, tensor in enumerate(family)
                if torch.promote_types(tensor.dtype, torch.float32) == dtype
            ]
            whole = [i for i in chosen if not self._per_expert[i]]
            if whole:
                norms = torch._foreach_norm([family[i] for i in whole], 2, dtype=dtype)
                found |= {i: norm.reshape(1) for i, norm in zip(whole, norms, strict=True)}
            for i in (i for i in chosen if self._per_expert[i]):
                rows = family[i].reshape(family[i].shape[0], math.prod(family[i].shape[1:]))
                found[i] = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
        return [found[i].to(torch.float64).square() for i in range(len(family))]


def like_placed(parameter: Tensor, local: Tensor, summed_dim: int) -> Tensor:
    """A DTensor from local parts of a sharded parameter with one dimension summed to length 1."""
    if not isinstance(parameter, DTensor):
        return local
    summed_dim %= parameter.dim()
    shape = [1 if dim == summed_dim else n for dim, n in enumerate(parameter.shape)]
    placements: list[Placement] = [
        Replicate() if getattr(placement, "dim", None) == summed_dim else placement
        for placement in parameter.placements
    ]
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.insert(0, step)
        step *= max(1, length)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
