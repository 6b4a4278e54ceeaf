"""Deltas: the elements of a tensor that differ from an earlier version, and their places.

Elements are compared as bits and stored as they are, so that a chain of deltas never drifts. The
format of a payload is in csrc/delta/delta_format.h. A changed element takes the bytes of its value
and about 1 byte for its place, or 2 if less than 1 in some 300 elements changed.

Shape suffixes: n elements that changed.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ext.ops.fakes import keep_out_of_cuda_graphs, register_fake_like


def delta_encode(x: Tensor, base: Tensor, *, xored: bool = False) -> Tensor:
    """Returns a payload with the elements of x whose bits are not those of base.

    NaN, -0.0 and denormals are values like others.

    Args:
        x (Tensor[...]): contiguous, of any dtype of 8 bytes at most.
        base (Tensor[...]): contiguous, of the shape and dtype of x.
        xored: store the bits that differ instead of the values. These bits have more zeros, which
            helps a compressor.

    Returns:
        Tensor[bytes]: uint8, on the CPU.

    Raises:
        RuntimeError: x or base is strided, or base has another shape, dtype or device.

    Deterministic, with the same bytes on CPU and CUDA. On CUDA it waits for the device.

    Reference: Yu et al., PULSE (arXiv 2602.03839), values instead of differences.
    """
    return torch.ops.moe_ext.delta_encode(x, base, xored).cpu()


def delta_apply_(target: Tensor, payload: Tensor, *, xored: bool = False) -> None:
    """Writes the elements of a payload to a tensor, in a time that grows with the changes alone.

    Args:
        target (Tensor[...]): contiguous; changed in place. With ``xored`` it must be the base.
        payload (Tensor[bytes]): of `delta_encode`, on any device.
        xored: as given to `delta_encode`.

    Raises:
        RuntimeError: the payload is damaged, or has places outside the tensor; nothing has changed
            then.

    On CUDA it waits, before the first write, until the device has checked the payload.
    """
    torch.ops.moe_ext.delta_apply_(target, payload.to(target.device), xored)
    torch.autograd.graph.increment_version(target)


def delta_hash(x: Tensor, seed: int = 0, places: Tensor | None = None) -> int:
    """Sums the hashes of all elements, modulo 2^64 (signed), to find damage but not an attacker.

    Args:
        x (Tensor[...]): contiguous.
        seed: 64 bits, signed; tells equal tensors of different names apart.
        places (Tensor[N]): int64, the place of each element; its number in x by default.
    """
    places = None if places is None else places.to(x.device)
    return torch.ops.moe_ext.delta_hash(x, seed, places)


def delta_hash_change(
    target: Tensor, payload: Tensor, seed: int = 0, *, xored: bool = False
) -> int:
    """Returns the number that a payload would add to `delta_hash`, modulo 2^64 (signed).

    Args:
        target (Tensor[...]): contiguous, as it is before `delta_apply_`; only read.
        payload (Tensor[bytes]): of `delta_encode`.
        seed: as given to `delta_hash`.
        xored: as given to `delta_encode`.

    Raises:
        RuntimeError: as `delta_apply_`.

    The time grows with the number of changes alone.
    """
    here = payload.to(target.device)
    return torch.ops.moe_ext.delta_hash_change(target, here, seed, xored)


def as_signed(number: int) -> int:
    """Returns the number modulo 2^64, in [-2^63, 2^63)."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def delta_pack(places_n: Tensor, values_n: Tensor, numel: int) -> Tensor:
    """Returns a payload of given places and values.

    Args:
        places_n (Tensor[n]): int64, ascending in [0, numel).
        values_n (Tensor[n]): of any dtype of 8 bytes at most, on the device of the places.
        numel: elements of the tensor.

    Returns:
        Tensor[bytes]: uint8, on the CPU.

    Raises:
        RuntimeError: the places do not ascend, or are outside the tensor.
    """
    return torch.ops.moe_ext.delta_pack(places_n, values_n, numel).cpu()


def delta_unpack(payload: Tensor, like: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Returns the places and values of a payload.

    Args:
        payload (Tensor[bytes]): of `delta_encode` or `delta_pack`.
        like (Tensor): has the dtype and the device of the values.
        numel: elements of the tensor.

    Returns:
        places (Tensor[n]): int64, ascending; values (Tensor[n]).

    Raises:
        RuntimeError: as `delta_apply_`.
    """
    return torch.ops.moe_ext.delta_unpack(payload.to(like.device), like, numel)


def _fake_payload(like: Tensor) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake("moe_ext::delta_encode")
def _(x: Tensor, base: Tensor, xored: bool = False) -> Tensor:
    return _fake_payload(x)


@torch.library.register_fake("moe_ext::delta_pack")
def _(places: Tensor, values: Tensor, numel: int) -> Tensor:
    return _fake_payload(values)


@torch.library.register_fake("moe_ext::delta_unpack")
def _(payload: Tensor, like: Tensor, numel: int) -> Any:
    count = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty((count,), dtype=torch.int64), like.new_empty((count,))


register_fake_like("moe_ext::delta_apply_")
keep_out_of_cuda_graphs(
    "moe_ext::delta_apply_", "moe_ext::delta_hash", "moe_ext::delta_hash_change"
)
