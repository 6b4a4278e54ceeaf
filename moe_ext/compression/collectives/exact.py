"""Exact reductions that skip blocks, masked elements or rows that are zero on every rank.

Shape suffixes: N rows, D elements of a row, U rows of the union.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.comm import workers
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import group_size, resolve_group
from moe_ext.comm.pending import Pending
from moe_ext.comm.workers import Messages
from moe_ext.compression.collectives.arguments import (
    DENSE_DTYPES,
    check_call,
    range_problem,
    tensor_problem,
)
from moe_ext.ops import block_indices


def bitmap_bytes(numel: int, block: int = 256) -> int:
    """Return the bytes of the bitmap that `nonzero_blocks` makes for `numel` elements."""
    return ((numel + block - 1) // block + 7) // 8


def block_sparse_all_reduce_(
    x: Tensor,
    *,
    block: int = 256,
    bitmap: Tensor | None = None,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Take the exact mean over ranks, in place, and skip blocks that are zero on every rank.

    Ranks exchange bitmaps of their non-zero blocks, and reduce the blocks of the union densely.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; changed in
            place.
        block (int): elements of a block, at least 1.
        bitmap (Tensor): uint8, in the format of `nonzero_blocks`: the blocks that may be non-zero,
            if the caller knows them (experts that got tokens). Blocks outside the union of all
            ranks' bitmaps stay unchanged. None searches x.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, or a `Reduction` of it. All ranks get the same bits, except for the sign of
            zeros: -0.0 counts as zero, and a skipped block keeps it.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value, or differs between ranks; the
            message names them. With ``validate`` every rank raises it.
        RankFailureError: a rank died or did not answer; x is unchanged.

    As deterministic as the backend's all-reduce of the union. Synchronises a device with its host,
    because the size of the union depends on the data.

    Reference: Fei et al., OmniReduce, SIGCOMM 2021.
    """
    name = "block_sparse_all_reduce_"
    ranks = resolve_group(group, name)
    size, numel = group_size(ranks), x.numel()
    problem = tensor_problem(x, "x")
    if problem is None and block < 1:
        problem = f"expected block to be at least 1, got {block}"
    if problem is None and bitmap is not None:
        wanted = bitmap_bytes(numel, block)
        if bitmap.dtype != torch.uint8 or bitmap.shape != (wanted,):
            problem = (
                f"expected bitmap to be uint8 of shape ({wanted},), got {bitmap.dtype} of shape "
                f"{tuple(bitmap.shape)}"
            )
    facts = {"block": block, "average": average}
    check_call(name, x, ranks, problem, facts, validate=validate)
    if size == 1 or numel == 0:
        return Pending.done(x) if async_op else x
    args = (x.detach().view(-1), bitmap, block, size if average else 1)
    return _started("block_sum", _block_sum, args, ranks, name, lambda _: x, async_op)


def masked_all_reduce_(
    x: Tensor,
    mask: Tensor,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Take the exact mean over ranks, in place, of the elements that a mask selects.

    Meant for weights that are pruned alike on every rank, because no indices are sent. Elements
    outside the mask stay unchanged.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; changed in
            place.
        mask (Tensor): bool with as many elements as x, or int64 indices into the flattened x,
            ascending and all different. Indices need no search of the mask. Equal on every rank.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first, the mask by a checksum.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, or a `Reduction` of it. Selected elements have the same bits on all ranks.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value, or differs between ranks; the
            message names them. With ``validate`` every rank raises it.
        RankFailureError: a rank died or did not answer; x is unchanged.

    As deterministic as the backend's all-reduce of the selected elements.
    """
    name = "masked_all_reduce_"
    ranks = resolve_group(group, name)
    size, numel = group_size(ranks), x.numel()
    problem = tensor_problem(x, "x") or _mask_problem(mask, x)
    indices = mask
    if problem is None and mask.dtype == torch.bool:
        indices = mask.reshape(-1).nonzero().view(-1)
    checksum = 0
    if problem is None and validate:
        problem = _indices_problem(indices, numel)
        # NOTE: device-to-host sync.
        weights = torch.arange(1, indices.shape[0] + 1, device=indices.device)
        checksum = int((indices * weights).sum())
    facts = {
        "average": average,
        "the number of elements of the mask": indices.shape[0] if indices.dim() else 0,
        "the checksum of the mask": checksum,
    }
    check_call(name, x, ranks, problem, facts, validate=validate)
    if size == 1 or indices.shape[0] == 0:
        return Pending.done(x) if async_op else x
    args = (x.detach().view(-1), indices, size if average else 1)
    return _started("masked_sum", _masked_sum, args, ranks, name, lambda _: x, async_op)


def _mask_problem(mask: Tensor, x: Tensor) -> str | None:
    if mask.dtype == torch.bool and mask.numel() == x.numel():
        return None
    if mask.dtype == torch.int64 and mask.dim() == 1:
        return None
    return (
        f"expected mask to be bool of {x.numel()} elements or a vector of int64, got "
        f"{mask.dtype} of shape {tuple(mask.shape)}"
    )


def _indices_problem(indices: Tensor, numel: int) -> str | None:
    """Check that a mask of indices is ascending and in range. NOTE: device-to-host sync."""
    problem = range_problem(indices, "mask to be indices", numel)
    if problem is None and bool((indices[1:] <= indices[:-1]).any()):
        return "expected mask to be ascending indices, all different, got others"
    return problem


def row_sparse_all_reduce(
    grad: Tensor,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Take the exact mean over ranks of an embedding's sparse gradient.

    Each rank first adds up rows that occur twice. Ranks then exchange bitmaps of their touched
    rows, and reduce the rows of the union densely. A rank without any row takes part as well.

    Args:
        grad (Tensor[N, D]): torch.sparse_coo with one sparse dimension, coalesced or not; float32,
            float64, bfloat16 or float16. Not changed.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first.
        async_op (bool): return a `Reduction` at once.

    Returns:
        Tensor[N, D]: torch.sparse_coo, coalesced, with the same bits on all ranks; or a
        `Reduction` of it. Rows that cancel to zero are kept.

    Raises:
        ValueError: an argument has the wrong layout, dtype or shape, or differs between ranks; the
            message names them. With ``validate`` every rank raises it.
        RankFailureError: a rank died or did not answer.

    As deterministic as the backend's all-reduce of the union. Synchronises a device with its host,
    because the size of the union depends on the data.
    """
    name = "row_sparse_all_reduce"
    ranks = resolve_group(group, name)
    size = group_size(ranks)
    problem = None
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1 or grad.dtype not in DENSE_DTYPES:
        problem = (
            "expected grad to be torch.sparse_coo with one sparse dimension, of float32, float64, "
            f"bfloat16 or float16, got {grad.layout} {grad.dtype} of shape {tuple(grad.shape)}"
        )
    facts = {"shape": tuple(grad.shape), "dtype": grad.dtype, "average": average}
    agreement = Agreement(name, ranks, grad.device, validate=validate)
    agreement.compare(facts, problem=problem)
    num_rows, rest = grad.shape[0], grad.shape[1:]
    values, rows = grad.detach()._values(), grad._indices()[0]
    width = rest.numel()
    sums_UD, touched_U = torch.ops.moe_ext.sum_rows(
        values.reshape(rows.shape[0], width), rows.contiguous(), num_rows
    )

    def finish(found: list[Tensor]) -> Tensor:
        sums, union = found
        return torch.sparse_coo_tensor(
            union[None], sums.view(-1, *rest), tuple(grad.shape), is_coalesced=True
        )

    if size == 1 or grad.numel() == 0:
        whole = finish([sums_UD, touched_U])
        return Pending.done(whole) if async_op else whole
    args = (sums_UD, touched_U, num_rows, size if average else 1)
    return _started("row_sum", _row_sum, args, ranks, name, finish, async_op)


def _started(
    compiled: str,
    twin: Callable[..., list[Tensor]],
    args: tuple[Any, ...],
    ranks: ProcessGroup | None,
    name: str,
    finish: Callable[[list[Tensor]], Tensor],
    async_op: bool,
) -> Tensor | Pending[Tensor]:
    """Run `compiled`, or its Python version `twin`; return the result, or a handle of it."""
    pending = workers.start(
        twin, args, ranks, name, compiled=(compiled,), finish=finish, async_op=async_op
    )
    return pending if async_op else pending.wait()


def _union(bitmap: Tensor, messages: Messages) -> Tensor:
    """Return the indices of the bits that are set in the bitmap of at least one rank."""
    found = messages.gather(bitmap)
    joined = found[0].clone()
    for theirs in found[1:]:
        joined |= theirs
    return block_indices(joined)


def _average_(x: Tensor, divisor: int, messages: Messages) -> None:
    messages.all_reduce(x)
    if divisor != 1:
        x.div_(divisor)


def _block_sum(
    x: Tensor, bitmap: Tensor | None, block: int, divisor: int, messages: Messages
) -> list[Tensor]:
    marked = torch.ops.moe_ext.nonzero_blocks(x, block) if bitmap is None else bitmap
    blocks = _union(marked, messages)
    packed = torch.ops.moe_ext.gather_blocks(x, blocks, block)
    _average_(packed, divisor, messages)
    torch.ops.moe_ext.scatter_blocks_(x, packed, blocks, block)
    return [x]


def _masked_sum(x: Tensor, indices: Tensor, divisor: int, messages: Messages) -> list[Tensor]:
    packed = x[indices]
    _average_(packed, divisor, messages)
    x.index_copy_(0, indices, packed)
    return [x]


def _row_sum(
    sums_UD: Tensor, touched_U: Tensor, num_rows: int, divisor: int, messages: Messages
) -> list[Tensor]:
    marks = torch.zeros(-(-num_rows // 8) * 8, device=touched_U.device)
    marks[touched_U] = 1
    union = _union(torch.ops.moe_ext.nonzero_blocks(marks, 1), messages)
    # Row of this rank's sums for each row of the union. Row 0 is the zero row that `pad` puts in
    # front, for rows that this rank did not touch.
    place = touched_U.new_zeros(num_rows)
    place[touched_U] = torch.arange(1, touched_U.shape[0] + 1, device=touched_U.device)
    packed = torch.nn.functional.pad(sums_UD, (0, 0, 1, 0))[place[union]]
    _average_(packed, divisor, messages)
    return [packed, union]
