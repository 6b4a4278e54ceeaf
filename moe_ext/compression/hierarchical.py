"""All-reduce in two levels: dense inside a node, anything between nodes.

Shapes: N elements, L ranks of a node.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.compression.agreement import check_call, resolve
from moe_ext.compression.quantized_reduce import shard_numel
from moe_ext.compression.reduction import run
from moe_ext.compression.stages import Stages
from moe_ext.distributed.groups import check_group, group_size

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Reduce(Protocol):
    """What goes between nodes: any collective of moe_ext.compression that returns a tensor."""

    def __call__(self, x: Tensor, *, group: ProcessGroup, average: bool) -> Tensor:
        """The sum over `group` of x (its mean with `average`), in place or not."""


@functools.lru_cache(256)
def _scatter_stages(numel: int, size: int, shard: int, dtype: torch.dtype) -> Stages:
    """This rank's shard of the sum over the ranks of a node."""
    stages = Stages(1)
    (x,) = stages.inputs()
    if size * shard > numel:
        x = stages.call("aten::constant_pad_nd", x, [0, size * shard - numel], 0)
    found = stages.all_to_all(x)
    wide = dtype if dtype == torch.float64 else torch.float32
    total = stages.call("aten::new_zeros", found, [shard], wide)
    for source in range(size):
        part = stages.call("aten::narrow", found, 0, source * shard, shard)
        stages.call("aten::add_.Tensor", total, part)
    stages.results = [total.index]
    return stages


@functools.lru_cache(256)
def _gather_stages(numel: int) -> Stages:
    stages = Stages(2)
    x, shard = stages.inputs()
    found = stages.all_gather(shard)
    stages.call("aten::copy_", x, stages.call("aten::narrow", found, 0, 0, numel))
    stages.results = [x.index]
    return stages


def sum_in_node(
    x_N: Tensor, shard: int, local_group: ProcessGroup | None, operation: str
) -> Tensor:
    """This rank's shard of the sum over the ranks of a node, float32 (float64 for float64)."""
    stages = _scatter_stages(x_N.numel(), group_size(local_group), shard, x_N.dtype)
    found = run(stages, [x_N], local_group, operation, finish=_first, async_op=False)
    assert isinstance(found, Tensor)
    return found


def share_in_node(
    x_N: Tensor, shard_S: Tensor, local_group: ProcessGroup | None, operation: str
) -> None:
    """Write the shards of the ranks of a node into x, whose dtype they have."""
    stages = _gather_stages(x_N.numel())
    run(stages, [x_N, shard_S], local_group, operation, finish=_first, async_op=False)


def _first(found: list[Tensor]) -> Tensor:
    return found[0]


def hierarchical_all_reduce_(
    x: Tensor,
    *,
    local_group: ProcessGroup,
    node_group: ProcessGroup,
    reduce: Reduce,
    average: bool = True,
    validate: bool = True,
) -> Tensor:
    """The mean over all ranks, in place: dense inside a node, `reduce` between nodes.

    The ranks of a node add up their tensors, each of them one shard; shards go between the nodes,
    all at a time; at last the ranks of a node share them.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; changed in
            place.
        local_group: the L ranks of this node.
        node_group: one rank of every node: those with this rank's place in their local_group.
        reduce: called as ``reduce(shard, group=node_group, average=False)`` with the sum over the
            node: a vector of ``shard_numel(N, L, 1)`` elements, float32 (float64 for float64),
            which it may change. What it returns has the same shape. State that it keeps (a
            residual) is of that shape, too.
        average (bool): divide by the number of all ranks.
        validate (bool): compare the arguments over each group first.

    Returns:
        Tensor: x. It has the same bits on all ranks if what `reduce` returns has.

    Raises:
        ValueError: on every rank of a group: an argument has the wrong dtype, shape or value, or
            differs between ranks; the message names them.
        RankFailureError: a rank died or did not answer; x is as it was.

    Deterministic if `reduce` is: inside a node the sum is taken in the order of the ranks.
    """
    name = "hierarchical_all_reduce_"
    for group, what in ((local_group, "local_group"), (node_group, "node_group")):
        check_group(group, name, name=what)
    local, nodes = resolve(local_group, name), resolve(node_group, name)
    problem = None
    if x.dtype not in _DTYPES or not x.is_contiguous():
        problem = (
            "expected x to be contiguous float32, float64, bfloat16 or float16, got "
            f"{x.dtype} of shape {tuple(x.shape)}"
        )
    size, numel = group_size(local), x.numel()
    facts = {
        "numel": numel,
        "dtype": x.dtype,
        "average": average,
        "the size of local_group": size,
        "the size of node_group": group_size(nodes),
    }
    try:
        check_call(name, facts, problem, local, x.device, validate=validate)
    except ValueError as error:
        if not validate:
            raise
        # The other nodes have found nothing, and wait to be told.
        problem = str(error).removeprefix(f"{name}: ")
    check_call(name, facts, problem, nodes, x.device, validate=validate)
    if numel == 0:
        return x
    shard = shard_numel(numel, size, 1)
    flat = x.detach().view(-1)
    total = reduce(sum_in_node(flat, shard, local, name), group=node_group, average=False)
    if average:
        total = total / (size * group_size(nodes))
    share_in_node(flat, total.to(x.dtype), local, name)
    return x
