"""What the sequence-parallel block refuses, and what it says when a rank dies."""

import os
import signal

import pytest
import torch
from test_sequence_parallel_mlp import FFN, D, group, make

from moe_ext.attention import SequenceParallelMLP
from moe_ext.distributed import RankFailureError
from moe_ext.testing import spawn_ranks


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model_dim": 0}, "model_dim to be at least 1, got 0"),
        ({"ffn_dim": 0}, "ffn_dim to be a multiple of the 1 ranks, got 0"),
        ({"norm": "batch_norm"}, "norm to be one of .* got 'batch_norm'"),
        ({"dropout": 1.0}, r"dropout to be in \[0, 1\), got 1.0"),
        ({"layout": "spiral"}, "layout to be a Layout or one of"),
        ({"grad_reduction": "max"}, "grad_reduction to be one of .* got 'max'"),
        ({"activation": "softmax"}, "activation to be one of"),
    ],
)
def test_modules_refused(kwargs, message):
    with pytest.raises(ValueError, match=f"SequenceParallelMLP: expected {message}"):
        SequenceParallelMLP(**{"model_dim": D, "ffn_dim": FFN, "group": None, **kwargs})


def test_inputs_refused():
    module = make(None)
    with pytest.raises(ValueError, match=r"x to be of shape \[..., L, 6\], got \[2, 5\]"):
        module(torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="x to be torch.float64 like the weights, got torch.float"):
        module(torch.zeros(2, 5, D))
    with pytest.raises(ValueError, match="shards of a contiguous layout of 6"):
        module(torch.zeros(2, 5, D, dtype=torch.float64), seq_len=6)
    with pytest.raises(ValueError, match="cu_seqlens to be given for 'per_document'"):
        module(torch.zeros(2, 5, D, dtype=torch.float64), layout="per_document")
    with pytest.raises(ValueError, match=f"seed to be a 64-bit integer, got {1 << 63}"):
        module(torch.zeros(2, 5, D, dtype=torch.float64), seed=1 << 63)


def run_until_a_rank_dies(rank, moment):
    """(message, ranks named) of the error that a survivor sees."""
    module, x = make(group()), torch.ones(2, 3, D, dtype=torch.float64)
    module(x).sum().backward()
    try:
        if moment == "forward" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y = module(x)
        if moment == "backward" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        y.sum().backward()
    except RankFailureError as error:
        return str(error), error.ranks
    return "no error", ()


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_survivors_name_the_rank_that_died(moment):
    found = spawn_ranks(run_until_a_rank_dies, 3, moment, may_die=[1])
    for rank in (0, 2):
        message, named = found[rank]
        assert named == (1,), message
        assert "SequenceParallelMLP" in message and "rank 1 died" in message
