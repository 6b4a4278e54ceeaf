"""All-reduce in two levels: dense inside a node, any reduction between nodes.

Shapes: N elements, L ranks of a node.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext._bytes import as_bytes
from moe_ext.comm import workers
from moe_ext.comm.groups import check_group, group_size, resolve_group
from moe_ext.comm.workers import Messages
from moe_ext.compression.collectives.arguments import check_call, tensor_problem
from moe_ext.compression.collectives.quantized import shard_numel


class Reduce(Protocol):
    """Reduction between nodes: any collective of moe_ext.compression that returns a tensor."""

    def __call__(self, x: Tensor, *, group: ProcessGroup, average: bool) -> Tensor:
        """Return the sum over `group` of x (the mean with `average`), in place or not."""


def sum_in_node(
    x_N: Tensor, shard: int, local_group: ProcessGroup | None, operation: str
) -> Tensor:
    """Return this rank's shard of the sum over a node, in float32 (float64 for float64)."""

    def add_up(x_N: Tensor, messages: Messages) -> list[Tensor]:
        missing = messages.size * shard - x_N.numel()
        padded = torch.nn.functional.pad(x_N, (0, missing)) if missing else x_N
        found = messages.exchange(as_bytes(padded))
        wide = torch.promote_types(x_N.dtype, torch.float32)
        total = torch.zeros(shard, dtype=wide, device=x_N.device)
        for theirs in found.view(x_N.dtype):
            total += theirs
        return [total]

    return workers.start(
        add_up, (x_N,), local_group, operation, finish=lambda found: found[0], async_op=False
    ).wait()


def share_in_node(
    x_N: Tensor, shard_S: Tensor, local_group: ProcessGroup | None, operation: str
) -> None:
    """Gather the shards of the ranks of a node into x. Shards have the dtype of x."""

    def gather(x_N: Tensor, shard_S: Tensor, messages: Messages) -> list[Tensor]:
        found = messages.gather(as_bytes(shard_S)).view(x_N.dtype).view(-1)
        return [x_N.copy_(found[: x_N.numel()])]

    workers.start(gather, (x_N, shard_S), local_group, operation, finish=len, async_op=False)


def hierarchical_all_reduce_(
    x: Tensor,
    *,
    local_group: ProcessGroup,
    node_group: ProcessGroup,
    reduce: Reduce,
    average: bool = True,
    validate: bool = True,
) -> Tensor:
    """Take the mean over all ranks, in place: dense inside a node, by `reduce` between nodes.

    Each rank of a node adds up one shard of the node's tensors. All shards are reduced between the
    nodes at the same time. Then the ranks of a node gather the reduced shards.

    Args:
        x (Tensor): float32, float64, bfloat16 or float16, contiguous, of any shape; changed in
            place.
        local_group: the L ranks of this node.
        node_group: one rank of every node: those that have the same rank in their local_group.
        reduce: called as ``reduce(shard, group=node_group, average=False)`` with this rank's shard
            of the sum over the node. The shard is a vector of ``shard_numel(N, L, 1)`` elements,
            float32 (float64 for float64), that `reduce` may change. Its result, and any state such
            as a residual, have the same shape.
        average (bool): divide by the number of all ranks.
        validate (bool): compare the arguments over each group first.

    Returns:
        Tensor: x. All ranks get the same bits if `reduce` returns the same bits on all nodes.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value, or differs between ranks; the
            message names them. With ``validate`` every rank of a group raises it.
        RankFailureError: a rank died or did not answer; x is unchanged.

    Deterministic if `reduce` is. Inside a node the sum is taken in the order of the ranks.
    """
    name = "hierarchical_all_reduce_"
    for group, what in ((local_group, "local_group"), (node_group, "node_group")):
        check_group(group, name, name=what)
    local, nodes = resolve_group(local_group, name), resolve_group(node_group, name)
    problem = tensor_problem(x, "x")
    size, numel = group_size(local), x.numel()
    facts = {
        "average": average,
        "the size of local_group": size,
        "the size of node_group": group_size(nodes),
    }
    try:
        check_call(name, x, local, problem, facts, validate=validate)
    except ValueError as error:
        if not validate:
            raise
        # Other nodes may have found no problem and wait for this rank in the next comparison, so
        # the problem is raised there, on every rank.
        problem = str(error).removeprefix(f"{name}: ")
    check_call(name, x, nodes, problem, facts, validate=validate)
    if numel == 0:
        return x
    shard = shard_numel(numel, size, 1)
    flat = x.detach().view(-1)
    total = reduce(sum_in_node(flat, shard, local, name), group=node_group, average=False)
    if average:
        total = total / (size * group_size(nodes))
    share_in_node(flat, total.to(x.dtype), local, name)
    return x
