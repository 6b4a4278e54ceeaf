"""Reductions that leave out what is zero everywhere: blocks, masked elements, untouched rows.

Shape suffixes: N rows, D their width, U rows of the union, B blocks of the union.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import check_call, resolve
from moe_ext.compression.reduction import Reduction, run
from moe_ext.compression.stages import Slot, Stages
from moe_ext.distributed.groups import group_size

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _tensor_problem(x: Tensor) -> str | None:
    if x.dtype not in _DTYPES or x.layout != torch.strided or not x.is_contiguous():
        return (
            "expected x to be contiguous float32, float64, bfloat16 or float16, got "
            f"{x.dtype} of shape {tuple(x.shape)}"
        )
    return None


def _union(stages: Stages, bitmap: Slot, num_bytes: int, size: int) -> Slot:
    """Indices of the bits that are set on any rank."""
    found = stages.all_gather(bitmap)
    union = stages.call("aten::clone", stages.call("aten::narrow", found, 0, 0, num_bytes))
    for rank in range(1, size):
        theirs = stages.call("aten::narrow", found, 0, rank * num_bytes, num_bytes)
        stages.call("aten::bitwise_or_.Tensor", union, theirs)
    places = stages.call("aten::new_ones", union, [8])
    places = stages.call("aten::sub.Scalar", stages.call("aten::cumsum", places, 0, torch.uint8), 1)
    bits = stages.call("aten::unsqueeze", union, 1)
    bits = stages.call("aten::bitwise_right_shift.Tensor", bits, places)
    bits = stages.call("aten::bitwise_and.Scalar", bits, 1)
    return stages.call(
        "aten::view", stages.call("aten::nonzero", stages.call("aten::view", bits, [-1])), [-1]
    )


def _mean(stages: Stages, x: Slot, divisor: int) -> None:
    stages.all_reduce(x)
    if divisor != 1:
        stages.call("aten::div_.Scalar", x, divisor)


@functools.lru_cache(256)
def _block_stages(numel: int, block: int, size: int, divisor: int, scans: bool) -> Stages:
    stages = Stages(1 if scans else 2)
    x, *given = stages.inputs()
    bitmap = stages.call("moe_ext::nonzero_blocks", x, block) if scans else given[0]
    blocks = _union(stages, bitmap, bitmap_bytes(numel, block), size)
    packed = stages.call("moe_ext::gather_blocks", x, blocks, block)
    _mean(stages, packed, divisor)
    stages.call_many("moe_ext::scatter_blocks_", 0, x, packed, blocks, block)
    stages.results = [x.index]
    return stages


def bitmap_bytes(numel: int, block: int = 256) -> int:
    """Bytes of the map of blocks that `nonzero_blocks` returns."""
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
) -> Tensor | Reduction:
    """The exact mean over ranks, in place, without the blocks that are zero on every rank.

    Ranks join their maps of non-zero blocks, and reduce the blocks of the union densely.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; changed in
            place.
        block (int): elements of a block, at least 1.
        bitmap (Tensor): uint8, as `nonzero_blocks`: the blocks that may be other than zero, where
            they are known without a look (experts that got tokens). Others stay as they are.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, with the same bits on all ranks; or a `Reduction` of it.

    Raises:
        ValueError: on every rank (of the others only with ``validate``): an argument has the wrong
            dtype, shape or value, or differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer; x is as it was.

    Deterministic as the backend's all-reduce of the union. Synchronises a device with its host,
    since the size of the union depends on the data.

    Reference: Fei et al., OmniReduce, SIGCOMM 2021.
    """
    name = "block_sparse_all_reduce_"
    ranks = resolve(group, name)
    size, numel = group_size(ranks), x.numel()
    problem = _tensor_problem(x)
    if problem is None and block < 1:
        problem = f"expected block to be at least 1, got {block}"
    if problem is None and bitmap is not None:
        wanted = bitmap_bytes(numel, block)
        if bitmap.dtype != torch.uint8 or bitmap.shape != (wanted,):
            problem = (
                f"expected bitmap to be uint8 of shape ({wanted},), got {bitmap.dtype} of shape "
                f"{tuple(bitmap.shape)}"
            )
    facts = {"numel": numel, "dtype": x.dtype, "block": block, "average": average}
    check_call(name, facts, problem, ranks, x.device, validate=validate)
    if size == 1 or numel == 0:
        return Reduction.done(x) if async_op else x
    divisor = size if average else 1
    stages = _block_stages(numel, block, size, divisor, bitmap is None)
    inputs = [x.detach().view(-1)] + ([] if bitmap is None else [bitmap])
    return run(stages, inputs, ranks, name, finish=lambda _: x, async_op=async_op)


@functools.lru_cache(256)
def _masked_stages(divisor: int) -> Stages:
    stages = Stages(2)
    x, indices = stages.inputs()
    packed = stages.call("aten::index_select", x, 0, indices)
    _mean(stages, packed, divisor)
    stages.call("aten::index_copy_", x, 0, indices, packed)
    stages.results = [x.index]
    return stages


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
    """NOTE: device-to-host sync."""
    if indices.shape[0] == 0:
        return None
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= numel:
        return f"expected mask to be indices in [0, {numel}), got {low if low < 0 else high}"
    if bool((indices[1:] <= indices[:-1]).any()):
        return "expected mask to be ascending indices, all different, got others"
    return None


def masked_all_reduce_(
    x: Tensor,
    mask: Tensor,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    """The exact mean over ranks, in place, of the elements that a mask names on all of them.

    For weights that are pruned alike everywhere: no indices travel. Other elements stay.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; changed in
            place.
        mask (Tensor): bool of as many elements, or int64 indices into the flattened x, ascending
            and all different (which saves their search); the same on every rank.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first, the mask by a checksum.
        async_op (bool): return a `Reduction` at once. Nothing may touch the tensors before its end.

    Returns:
        Tensor: x, with the same bits on all ranks in what the mask names; or a `Reduction` of it.

    Raises:
        ValueError: on every rank (of the others only with ``validate``): an argument has the wrong
            dtype, shape or value, or differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer; x is as it was.

    Deterministic as the backend's all-reduce of what is named.
    """
    name = "masked_all_reduce_"
    ranks = resolve(group, name)
    size, numel = group_size(ranks), x.numel()
    problem = _tensor_problem(x) or _mask_problem(mask, x)
    indices = mask
    if problem is None and mask.dtype == torch.bool:
        indices = mask.reshape(-1).nonzero().view(-1)
    if problem is None and validate:
        problem = _indices_problem(indices, numel)
    checksum = 0
    if problem is None and validate:
        # NOTE: device-to-host sync.
        weights = torch.arange(1, indices.shape[0] + 1, device=indices.device)
        checksum = int((indices * weights).sum())
    facts = {
        "numel": numel,
        "dtype": x.dtype,
        "average": average,
        "the number of elements of the mask": indices.shape[0] if indices.dim() else 0,
        "the checksum of the mask": checksum,
    }
    check_call(name, facts, problem, ranks, x.device, validate=validate)
    if size == 1 or indices.shape[0] == 0:
        return Reduction.done(x) if async_op else x
    stages = _masked_stages(size if average else 1)
    inputs = [x.detach().view(-1), indices]
    return run(stages, inputs, ranks, name, finish=lambda _: x, async_op=async_op)


@functools.lru_cache(256)
def _row_stages(num_rows: int, size: int, divisor: int) -> Stages:
    stages = Stages(2)
    sums_UD, touched_U = stages.inputs()
    num_bytes = -(-num_rows // 8)
    marks = stages.call("aten::new_zeros", touched_U, [num_bytes * 8], torch.float32)
    stages.call("aten::index_fill_.int_Scalar", marks, 0, touched_U, 1)
    bitmap = stages.call("moe_ext::nonzero_blocks", marks, 1)
    union = _union(stages, bitmap, num_bytes, size)
    # Where the row of each union index is among this rank's: the zero row in front if nowhere.
    place = stages.call("aten::new_zeros", touched_U, [num_rows])
    order = stages.call("aten::cumsum", stages.call("aten::ones_like", touched_U), 0)
    stages.call("aten::index_copy_", place, 0, touched_U, order)
    padded = stages.call("aten::constant_pad_nd", sums_UD, [0, 0, 1, 0], 0)
    own = stages.call("aten::index_select", place, 0, union)
    packed = stages.call("aten::index_select", padded, 0, own)
    _mean(stages, packed, divisor)
    stages.results = [packed.index, union.index]
    return stages


def row_sparse_all_reduce(
    grad: Tensor,
    *,
    group: ProcessGroup | None = None,
    average: bool = True,
    validate: bool = True,
    async_op: bool = False,
) -> Tensor | Reduction:
    """The exact mean over ranks of an embedding's sparse gradient: of the rows touched by any.

    Rows that occur twice are added up first; then ranks join their maps of touched rows and reduce
    the rows of the union densely. A rank without any row takes part like the others.

    Args:
        grad (Tensor[N, D]): torch.sparse_coo with one sparse dimension, coalesced or not; float32,
            float64, bfloat16 or float16. Not changed.
        group: the ranks; None is the default group.
        average (bool): divide by P.
        validate (bool): compare the arguments of all ranks first.
        async_op (bool): return a `Reduction` at once.

    Returns:
        Tensor[N, D]: torch.sparse_coo, coalesced, with the same bits on all ranks; or a
        `Reduction` of it. Rows that cancel stay in it.

    Raises:
        ValueError: on every rank (of the others only with ``validate``): an argument has the wrong
            layout, dtype or shape, or differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer.

    Deterministic as the backend's all-reduce of the union. Synchronises a device with its host,
    since the size of the union depends on the data.
    """
    name = "row_sparse_all_reduce"
    ranks = resolve(group, name)
    size = group_size(ranks)
    problem = None
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1 or grad.dtype not in _DTYPES:
        problem = (
            "expected grad to be torch.sparse_coo with one sparse dimension, of float32, float64, "
            f"bfloat16 or float16, got {grad.layout} {grad.dtype} of shape {tuple(grad.shape)}"
        )
    facts = {"shape": tuple(grad.shape), "dtype": grad.dtype, "average": average}
    check_call(name, facts, problem, ranks, grad.device, validate=validate)
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
        return Reduction.done(whole) if async_op else whole
    stages = _row_stages(num_rows, size, size if average else 1)
    return run(stages, [sums_UD, touched_U], ranks, name, finish=finish, async_op=async_op)
