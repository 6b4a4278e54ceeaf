"""A rank that dies during attention over ranks, or beside it, is named to all others."""

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from helpers import make_inputs
from rank_checks import ask_briefly, at_once
from test_recurrent import made
from torch.distributed.device_mesh import init_device_mesh

from moe_ext.attention import (
    SequenceParallelMLP,
    gated_delta_rule,
    ring_attention,
    ring_self_attention,
    shard_sequence,
)
from moe_ext.attention.schemes.base import Call
from moe_ext.distributed import RankFailureError
from moe_ext.testing import spawn_ranks

SCHEMES = ("ring", "all_gather", "ulysses", "hybrid", "double_ring")
MODULES = ("ring_self_attention", "SequenceParallelMLP")
# Moment to what runs then. The double ring has the compiled exchange, and the ring that in Python.
WAYS = {
    "forward": ("ring", "hybrid", "double_ring", *MODULES, "gated_delta_rule"),
    "backward": (*SCHEMES, *MODULES),
}


def forward_pass(way):
    """A call without arguments, of a differentiable result."""
    world = dist.group.WORLD
    if way == "SequenceParallelMLP":
        return functools.partial(SequenceParallelMLP(6, 12, group=world), torch.ones(2, 3, 6))
    if way == "gated_delta_rule":
        options = {"group": world, "layout": "contiguous", "scheme": "state"}
        return lambda: gated_delta_rule(**made("delta", 3), **options)[0]
    grouped = {"group": world}
    if way in ("hybrid", "double_ring"):
        grouped["group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    inputs = make_inputs(kv_heads=4)[:3]
    parts = [shard_sequence(x, dim=2, layout="contiguous", **grouped) for x in inputs]
    leaves = [x.requires_grad_() for x in parts]
    if way == "ring_self_attention":
        return functools.partial(ring_self_attention, *leaves, **grouped)
    return functools.partial(ring_attention, *leaves, layout="contiguous", scheme=way, **grouped)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_a_rank_dies(rank, moment, way):
    """(message, ranks named, seconds) of the error that a survivor sees."""
    ask_briefly()
    if way == "ring":
        os.environ["MOE_EXT_RUNTIME"] = "0"
    run = forward_pass(way)
    run()

    def come_to(now):
        if rank != 1 or moment != now:
            return
        if way not in SCHEMES[1:]:
            die()
        # Between two messages of a pass.
        Call.block = die

    started = time.monotonic()
    try:
        come_to("forward")
        out = run()
        come_to("backward")
        out.sum().backward()
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "no error", (), 0.0


@functools.cache
def deaths(moment):
    def run(*case):
        num_ranks = 4 if case[1] in SCHEMES[1:] else 3
        return spawn_ranks(run_until_a_rank_dies, num_ranks, *case, may_die=[1])

    return at_once(run, [(moment, way) for way in WAYS[moment]])


@pytest.mark.parametrize(("moment", "way"), [(m, way) for m, ways in WAYS.items() for way in ways])
def test_a_dead_rank_is_named(moment, way):
    operation = "ring_attention" if way in SCHEMES else way
    for rank, found in enumerate(deaths(moment)[moment, way].result()):
        if rank != 1:
            message, named, seconds = found
            assert named == (1,), message
            assert operation in message and "rank 1 died" in message
            # Well within the 60 s of the group.
            assert seconds < 20
