"""Gradient selection with error feedback: exact top-k, and a carried threshold.

Shape suffixes: K selected elements, S scopes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_SCOPES = ("tensor", "row", "expert")


class SparseGradient(NamedTuple):
    """Selection of `topk_compress_`.

    Attributes:
        values (Tensor[K]): float32, or float64 for float64 gradients.
        indices (Tensor[K]): int64, ascending and all different, into the flattened gradient.
    """

    values: Tensor
    indices: Tensor

    @property
    def num_selected(self) -> Tensor:
        """Tensor[]: number of values that are not zero; zeros only fill up K slots."""
        return self.values.count_nonzero()


class ThresholdGradient(NamedTuple):
    """Selection of `threshold_compress_`; K slots, or S scopes of K slots.

    Attributes:
        values (Tensor[K] | Tensor[S*K]): float32, or float64 for float64 gradients; zeros from
            ``count`` on.
        indices (Tensor[K] | Tensor[S*K]): int64, ascending, into the flattened gradient. From
            ``count`` on they are the last index of the gradient, or of the scope, so that adding
            all values at all indices is right.
        count (Tensor[] | Tensor[S]): int64, number of filled slots.
    """

    values: Tensor
    indices: Tensor
    count: Tensor  # type: ignore[assignment]  # hides a method of tuple


def scope_size_of(grad: Tensor, scope: str | int, op: str = "topk_compress_") -> int:
    """Return the number of elements in a scope, 0 for the whole tensor; refuse an unknown scope."""
    if isinstance(scope, str) and scope in _SCOPES:
        if scope == "tensor" or grad.dim() == 0 or grad.numel() == 0:
            return 0
        return grad.shape[-1] if scope == "row" else grad.numel() // grad.shape[0]
    if isinstance(scope, bool) or not isinstance(scope, int) or scope < 1:
        raise ValueError(
            f"{op}: expected scope to be one of {_SCOPES} or a number of elements, got {scope!r}"
        )
    return scope


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
    r"""Adds a gradient to the residual, takes the k largest elements out and keeps the rest.

    .. math::
        u \leftarrow m u + g,\quad a = s e + u,\quad S = \mathrm{top}_k |a|,\quad
        e \leftarrow a \text{ with } a_S = 0,\quad u_S \leftarrow 0

    Without ``velocity``, :math:`u = g`. The choice is exact; among equal magnitudes the lower index
    comes first. Nothing is lost: the returned values plus the residual are :math:`a`, bit for bit.
    If fewer than k elements are not zero, zeros of the lowest indices fill up. Every index is then
    valid and differs from the others, and a zero changes nothing wherever it is added.

    Args:
        grad (Tensor): float32, float64, bfloat16 or float16, of any shape; not changed.
        residual (Tensor): e, float32 (float64 for float64), contiguous, of the gradient's shape;
            changed in place.
        k (int): elements to select from each scope, in [0, its elements].
        scope (str | int): the elements that compete: "tensor" all of them (a parameter, or a bucket
            that holds many); "row" those of the last dimension; "expert" those of one index of the
            first dimension; a number B those of B neighbours. The last scope may be smaller, and
            gives all that it has if that is less than k.
        velocity (Tensor): u, like the residual, for momentum correction and factor masking of Deep
            Gradient Compression. The optimizer then runs without momentum.
        momentum (float): m in [0, 1); for ``velocity`` alone.
        residual_scale (float): s, finite and at least 0. When the learning rate changes, the last
            rate over the new one keeps a residual of gradients right. 0 drops the residual.
        check_finite (bool): refuse NaN and infinity. False is for gradients that clipping or a loss
            scaler has checked: a NaN is then selected as the largest of all.
        residual_in (Tensor): e is read from here, and ``residual`` is only written. The tensor is
            like ``residual``, in memory of its own, and not changed. The bits are the same with
            less memory traffic, and the check costs next to nothing. A step that may fail keeps
            both tensors, and swaps them when it is done.
        velocity_in (Tensor): the same for ``velocity``; given with ``residual_in`` if there is a
            velocity.

    Returns:
        SparseGradient: k values and indices a scope, in the order of the indices.

    Raises:
        ValueError: an unknown scope.
        RuntimeError: an argument has the wrong device, dtype, shape or value, or shares memory with
            another one; an element of :math:`a` is NaN or infinite (the message names the first).
            Neither residual nor velocity has changed then. With ``residual_in`` they hold nothing
            of use, and the tensors that were read have not changed.

    Deterministic, with the same bits for any number of threads and every instruction set.

    Reference: Lin et al., Deep Gradient Compression, 2018 (arXiv 1712.01887), algorithm 1;
    Stich et al., Sparsified SGD with Memory, 2018 (arXiv 1809.07599).
    """
    found = torch.ops.moe_ext.topk_compress_(
        grad,
        residual,
        k,
        scope_size_of(grad, scope),
        velocity,
        momentum if velocity is not None else 0.0,
        residual_scale,
        check_finite,
        residual_in,
        velocity_in,
    )
    written = [residual] if velocity is None else [residual, velocity]
    torch.autograd.graph.increment_version(written)
    return SparseGradient(*found)


@torch.library.register_fake("moe_ext::topk_compress_")
def _(
    grad: Tensor, residual: Tensor, k: int, scope_size: int = 0, *_rest: Any
) -> tuple[Tensor, Tensor]:
    numel = grad.numel()
    total = k
    if scope_size != 0:
        total = numel // scope_size * k + torch.sym_min(numel % scope_size, k)
    return residual.new_empty((total,)), residual.new_empty((total,), dtype=torch.int64)


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
    r"""Adds a gradient to the residual and takes out the elements that reach a threshold.

    The formula is that of `topk_compress_` with :math:`S = \{i : |a_i| \ge t,\ a_i \ne 0\}`, which
    takes one pass and no search. If more than ``capacity`` elements pass, the largest of them are
    taken (the lower index first among equals) and the others stay in the residual.

    A threshold that is carried from step to step follows the gradient: with ``target`` it is
    multiplied by :math:`(\mathrm{found} / \mathrm{target})^{1/8}`, by at least 1/2 and at most 2,
    where `found` counts elements that passed, the overflow included. With a ``scope`` other than
    "tensor" every scope has its threshold, capacity, target and count; S is the number of scopes.

    Args:
        grad (Tensor): as `topk_compress_`.
        residual (Tensor): as `topk_compress_`.
        threshold (float | Tensor[] | Tensor[S]): t, finite and at least 0; a tensor has the dtype
            and device of the residual, and is changed in place with ``target``.
        capacity (int): K, slots of the result (of each scope), in [0, elements of the gradient, or
            of a scope].
        target (int): elements that should pass (in each scope); 0 leaves the threshold as it is.
        scope (str | int): as `topk_compress_`; slots of scope s are [s K, (s + 1) K), also for a
            last scope that is smaller.
        velocity (Tensor): as `topk_compress_`.
        momentum (float): as `topk_compress_`.
        residual_scale (float): as `topk_compress_`.
        check_finite (bool): as `topk_compress_`.
        residual_in (Tensor): as `topk_compress_`.
        velocity_in (Tensor): as `topk_compress_`.

    Returns:
        ThresholdGradient: values and indices, in the order of the indices, and their count.

    Raises:
        ValueError: ``target`` is given with a threshold that is not a tensor.
        RuntimeError: as `topk_compress_`; the threshold, which has not changed then, is negative,
            infinite or NaN.

    Deterministic, with the same bits for any number of threads and every instruction set.

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017 (arXiv
    1704.05021); Li and Hoefler, Ok-Topk, 2022 (arXiv 2201.07598), section 3.1.3 (reuse).
    """
    scope_size = scope_size_of(grad, scope, "threshold_compress_")
    if not isinstance(threshold, Tensor):
        if target != 0:
            raise ValueError(
                "threshold_compress_: expected threshold to be a tensor where a target adapts it, "
                f"got {threshold!r}"
            )
        shape = (-(-grad.numel() // scope_size),) if scope_size else ()
        threshold = residual.new_full(shape, threshold)
    found = torch.ops.moe_ext.threshold_compress_(
        grad,
        residual,
        threshold,
        capacity,
        target,
        velocity,
        momentum if velocity is not None else 0.0,
        residual_scale,
        check_finite,
        scope_size,
        residual_in,
        velocity_in,
    )
    written = [residual, threshold] if velocity is None else [residual, threshold, velocity]
    torch.autograd.graph.increment_version(written)
    return ThresholdGradient(*found)


@torch.library.register_fake("moe_ext::threshold_compress_")
def _(
    grad: Tensor, residual: Tensor, threshold: Tensor, capacity: int, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    # Each scope has a threshold and `capacity` slots.
    slots = threshold.numel() * capacity
    return (
        residual.new_empty((slots,)),
        residual.new_empty((slots,), dtype=torch.int64),
        residual.new_empty(threshold.shape, dtype=torch.int64),
    )
