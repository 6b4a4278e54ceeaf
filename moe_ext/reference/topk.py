"""Gradient selection with error feedback, by sorting.

Shape suffixes: N elements of the gradient, K selected ones.
"""

import math

import torch
from torch import Tensor

from moe_ext.ops.topk import SparseGradient, ThresholdGradient, scope_size_of


def _feed_(
    grad: Tensor,
    residual: Tensor,
    velocity: Tensor | None,
    momentum: float,
    residual_scale: float,
    name: str,
) -> None:
    acc = grad.to(residual.dtype)
    moved = acc if velocity is None else velocity * momentum + acc
    owed = residual * residual_scale + moved
    if not owed.isfinite().all():
        raise RuntimeError(f"{name}: expected grad plus residual to be finite, got others")
    if velocity is not None:
        velocity.copy_(moved)
    residual.copy_(owed)


def _take_(indices_K: Tensor, residual: Tensor, velocity: Tensor | None) -> Tensor:
    values_K = residual.view(-1)[indices_K]
    for state in (residual, velocity):
        if state is not None:
            state.view(-1)[indices_K] = 0
    return values_K


def _largest(magnitudes_N: Tensor, k: int) -> Tensor:
    """Return ascending indices of the k largest; among equals, the lower ones are chosen."""
    order_N = magnitudes_N.sort(descending=True, stable=True).indices
    return order_N[:k].sort().values


def topk_compress_(
    grad: Tensor,
    residual: Tensor,
    k: int,
    *,
    scope: str | int = "tensor",
    velocity: Tensor | None = None,
    momentum: float = 0.9,
    residual_scale: float = 1.0,
    check_finite: bool = True,
    residual_in: Tensor | None = None,
    velocity_in: Tensor | None = None,
) -> SparseGradient:
    """Same as `moe_ext.ops.topk_compress_`."""
    if residual_in is not None:
        residual.copy_(residual_in)
    if velocity is not None and velocity_in is not None:
        velocity.copy_(velocity_in)
    _feed_(grad, residual, velocity, momentum, residual_scale, "topk_compress_")
    size = scope_size_of(grad, scope) or max(1, grad.numel())
    magnitudes = residual.view(-1).abs().split(size) if residual.numel() else ()
    chosen = [i * size + _largest(scope_N, k) for i, scope_N in enumerate(magnitudes)]
    indices_K = torch.cat(chosen) if chosen else residual.new_empty(0, dtype=torch.int64)
    return SparseGradient(_take_(indices_K, residual, velocity), indices_K)


def threshold_compress_(
    grad: Tensor,
    residual: Tensor,
    threshold: float | Tensor,
    capacity: int,
    *,
    target: int = 0,
    scope: str | int = "tensor",
    velocity: Tensor | None = None,
    momentum: float = 0.9,
    residual_scale: float = 1.0,
    check_finite: bool = True,
    residual_in: Tensor | None = None,
    velocity_in: Tensor | None = None,
) -> ThresholdGradient:
    """Same as `moe_ext.ops.threshold_compress_`."""
    if residual_in is not None:
        residual.copy_(residual_in)
    if velocity is not None and velocity_in is not None:
        velocity.copy_(velocity_in)
    _feed_(grad, residual, velocity, momentum, residual_scale, "threshold_compress_")
    numel = grad.numel()
    size = scope_size_of(grad, scope, "threshold_compress_")
    scopes = residual.view(-1).abs().split(size) if size else (residual.view(-1).abs(),)
    if size and numel == 0:
        scopes = ()
    values, indices, counts = [], [], []
    for s, magnitudes_N in enumerate(scopes):
        bound = threshold.view(-1)[s] if isinstance(threshold, Tensor) else threshold
        passed_N = (magnitudes_N >= bound) & (magnitudes_N > 0)
        found = int(passed_N.sum())
        chosen_K = _largest(magnitudes_N.where(passed_N, -1.0), min(found, capacity)) + s * size
        free = capacity - len(chosen_K)
        values_K = _take_(chosen_K, residual, velocity)
        values += [values_K, values_K.new_zeros(free)]
        last = s * size + len(magnitudes_N) - 1
        indices += [chosen_K, chosen_K.new_full((free,), last)]
        counts.append(len(chosen_K))
        if target > 0:
            assert isinstance(bound, Tensor)
            eighth_root = math.sqrt(math.sqrt(math.sqrt(found / target)))
            bound.copy_(bound.double() * min(2.0, max(0.5, eighth_root)))
    shape = (len(scopes),) if size else ()
    return ThresholdGradient(
        torch.cat(values) if values else residual.new_empty(0),
        torch.cat(indices) if indices else residual.new_empty(0, dtype=torch.int64),
        torch.tensor(counts, device=grad.device, dtype=torch.int64).view(shape),
    )
