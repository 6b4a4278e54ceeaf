"""Peak memory of a rank, counted from every allocation and release of its process."""

import functools

import pytest
import torch
import torch.distributed as dist
from peak_memory import peak_bytes

from moe_ext.attention import ring_attention
from moe_ext.testing import spawn_ranks

LENGTH = 384
CASES = (("exact", torch.float32), ("exact", torch.bfloat16), ("fast", torch.bfloat16))


def peak_of(precision, dtype):
    """Most bytes of tensors alive at once in forward and backward, beside the inputs."""
    where = {"group": dist.group.WORLD, "is_causal": True, "precision": precision}
    q, k, v, grad = (torch.randn(1, 4, LENGTH, 32).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(ring_attention(*leaves, **where), leaves, grad)
    return peak_bytes(lambda: torch.autograd.grad(ring_attention(*leaves, **where), leaves, grad))


def all_peaks(rank):
    return {case: peak_of(*case) for case in CASES}


@functools.cache
def peaks(num_ranks):
    return spawn_ranks(all_peaks, num_ranks)


@pytest.mark.parametrize(("precision", "dtype"), CASES)
def test_twice_the_ranks_and_twice_the_length_need_no_more(precision, dtype):
    two, few, many = (
        max(found[precision, dtype] for found in peaks(num_ranks)) for num_ranks in (2, 4, 8)
    )
    assert many < 1.05 * few
    # On two ranks no keys arrive while others are sent on: one shard of keys and values less.
    shard = 2 * 4 * LENGTH * 32 * dtype.itemsize
    assert few < two + 1.05 * shard
    assert few > 4 * LENGTH * 32 * torch.float32.itemsize, "no allocation was counted"
