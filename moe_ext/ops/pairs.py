"""Values and indices of a sparse gradient: indices as bytes of a known number, and sums of pairs.

Shape suffixes: K pairs.
"""

import torch
from torch import Tensor

from moe_ext.ops.fakes import register_fake_like

_RUN = 65536


def packed_index_bytes(count: int, numel: int) -> int:
    """Returns the bytes that `pack_indices` makes of `count` indices into `numel` elements."""
    runs = (numel + _RUN - 1) // _RUN
    in_runs = 2 * runs < count or numel > 2**31
    return -(-(4 * runs + 2 * count if in_runs else 4 * count) // 16) * 16


def pack_indices(indices_K: Tensor, numel: int) -> Tensor:
    """Writes ascending indices as bytes whose number depends on K and numel alone.

    The bytes have, for each run of 65536 elements, the number of indices below its end (int32), and
    then offsets in the runs (uint16). If int32 indices take no more bytes, and numel is at most
    2^31, the bytes have these instead. Numbers are little-endian, and zeros fill up to a multiple
    of 16 bytes. There is no header as in `encode_gradient`, because both ends know K and numel.

    Args:
        indices_K (Tensor[K]): int64 in [0, numel), not descending, at most 2^31 - 1.
        numel (int): elements of the tensor that they point into, at most 2^62.

    Returns:
        Tensor[packed_index_bytes(K, numel)]: uint8.

    Raises:
        RuntimeError: an argument has the wrong dtype, shape or value. On CUDA values are not
            checked.

    Deterministic.
    """
    return torch.ops.moe_ext.pack_indices(indices_K, numel)


@torch.library.register_fake("moe_ext::pack_indices")
def _(indices: Tensor, numel: int) -> Tensor:
    return indices.new_empty((packed_index_bytes(indices.shape[0], numel),), dtype=torch.uint8)


def unpack_indices(packed: Tensor, count: int, numel: int) -> Tensor:
    """Reads the indices that `pack_indices` wrote.

    Args:
        packed (Tensor): uint8, contiguous, at an address that is a multiple of 4 bytes.
        count (int): K.
        numel (int): as given to `pack_indices`.

    Returns:
        Tensor[K]: int64; in [0, numel) whatever the bytes say.

    Raises:
        RuntimeError: an argument has the wrong dtype or value, or there is another number of bytes.

    Deterministic.
    """
    return torch.ops.moe_ext.unpack_indices(packed, count, numel)


@torch.library.register_fake("moe_ext::unpack_indices")
def _(packed: Tensor, count: int, numel: int) -> Tensor:
    return packed.new_empty((count,), dtype=torch.int64)


def add_pairs_(
    out: Tensor,
    values_K: Tensor,
    packed: Tensor,
    numel: int,
    *,
    start: int = 0,
    divisor: float = 1.0,
) -> None:
    r"""Adds the values of packed indices to a dense tensor.

    .. math:: out_{i_k - start} \mathrel{+}= v_k / divisor

    for all k whose value is not zero. ``out`` is a part of the tensor. An index outside of that
    part counts as the nearest one in it, so that nothing is written elsewhere whatever the bytes
    say.

    Args:
        out (Tensor): float32, contiguous, of any shape; changed in place.
        values_K (Tensor[K]): float32. Of values with the same index, one at most is not zero.
        packed (Tensor): uint8, contiguous, as `pack_indices` wrote it, at an address that is a
            multiple of 4 bytes.
        numel (int): as given to `pack_indices`.
        start (int): index of the first element of ``out``, in [0, numel].
        divisor (float): finite and not zero; rounded to float32.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; nothing has changed
            then.

    Deterministic; on CUDA, only if values of repeated indices are as above.
    """
    torch.ops.moe_ext.add_pairs_(out, values_K, packed, numel, start, divisor)
    torch.autograd.graph.increment_version(out)


register_fake_like("moe_ext::add_pairs_")
