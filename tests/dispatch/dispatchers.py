"""Tokens of a rank, dispatchers by name, and the messages that they send."""

import functools
from unittest import mock

import torch
import torch.distributed as dist

from moe_ext.comm import collectives
from moe_ext.dispatch.by_name import _CLASSES


def tokens(size, dim, dtype=torch.float32, rank=None):
    """Tokens of this rank, or of another one."""
    generator = torch.Generator().manual_seed(5 + (dist.get_rank() if rank is None else rank))
    return torch.randn(size, dim, generator=generator, dtype=torch.float64).to(dtype)


@functools.cache
def dispatcher(way, num_experts, group=None, **options):
    """One for all ranks; of four ranks each two are a node, of fewer each one."""
    if way == "alltoall":
        options.pop("combine", None)  # it sends a row for each expert
    if way == "hierarchical":
        options["node_size"] = 2 if dist.get_world_size() == 4 else 1
    return _CLASSES[way](num_experts, group or dist.group.WORLD, **options)


def sent_messages():
    """A context whose value has the calls that send: (out, x, group, send, receive, ...)."""
    return mock.patch.object(collectives, "_post", wraps=collectives._post)


def assert_same_bits(found, want):
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
