"""Attention with all keys and values on every rank: one all-gather, and a reduce-scatter back.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.attention.block import Keys, accumulation_dtype, attend_, block_backward
from moe_ext.attention.layouts import Grid
from moe_ext.attention.schemes.base import (
    Call,
    Gradients,
    Pass,
    Saved,
    Scheme,
    SchemeTraffic,
    Workload,
    empty_sums,
)
from moe_ext.attention.sharding import Shards, sum_shards


class AllGather(Scheme):
    """All-gathers the keys in the forward pass, and again in the backward pass.

    Between the passes a rank holds only its own keys.
    """

    name = "all_gather"
    # A rank holds the keys of the whole sequence, which grow with S. Up to this size the memory
    # does not matter.
    most_held_bytes = 64 << 20

    def traffic(self, work: Workload, grid: Grid) -> SchemeTraffic:
        """Keys of every rank go to all ranks, padded to the longest shard, and gradients back."""
        forward, backward = Pass(work.hosts), Pass(work.hosts)
        sizes, ranks = work.layout.sizes, range(len(work.hosts))
        longest = max(sizes)
        keys, grads = work.form.num_bytes(longest), [work.grad_bytes(n) for n in sizes]
        for sender in ranks:
            for receiver in ranks:
                if sender != receiver:
                    forward.add(sender, receiver, keys, hop=False)
                    backward.add(sender, receiver, keys + grads[receiver], hop=False)
        if len(ranks) > 1 and longest:
            forward.rounds, backward.rounds = 1, 2
        # A rank holds all keys, its own gradients of all keys, and the gradients of its own keys
        # from all ranks.
        return SchemeTraffic(forward, backward, len(ranks) * (keys + 2 * max(grads)))

    def forward(self, q: Tensor, own: Keys, call: Call) -> tuple[Tensor, Tensor, None]:
        """(out, lse, None)."""
        out, lse = empty_sums(q, call.work.dims[1])
        for source, keys in enumerate(_gathered(own, call, "ring_attention")):
            if call.work.needs[call.rank][source]:
                attend_(out, lse, call.block(q, source, keys), call.options)
        return out, lse, None

    def backward(self, saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Gradients:
        """(dq, dk, dv)."""
        call, q, op = saved.call, saved.q, "ring_attention backward"
        assert saved.own is not None
        grad_q = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        sizes = [call.work.form.num_elements(length) for length in call.work.layout.sizes]
        row = grad_q.new_zeros(sum(sizes), dtype=call.work.grad_dtype)
        parts = row.split(sizes)
        for source, keys in enumerate(_gathered(saved.own, call, op)):
            if call.work.needs[call.rank][source]:
                block = call.block(q, source, keys)
                partial, *pair = block_backward(grad_out, lse, delta, block, call.options)
                grads = call.contracted(keys, *pair)
                grad_q += partial
                parts[source].copy_(torch.cat([grad.reshape(-1) for grad in grads]))
        if call.group is not None:
            row = sum_shards(row, Shards(call.group, tuple(sizes), op))
        return grad_q, *call.work.form.split(row, call.work.layout.sizes[call.rank])


def _gathered(own: Keys, call: Call, operation: str) -> list[Keys]:
    """All-gather the keys of every rank."""
    if call.group is None:
        return [own]
    form, lengths = call.work.form, call.work.layout.sizes
    shards = Shards(call.group, tuple(form.num_bytes(length) for length in lengths), operation)
    rows = shards.gathered(own.packed()).split(shards.sizes)
    # Rows are copied, because after a shard with an odd number of bytes the next one begins at an
    # address that is not aligned for its dtype.
    return [form.unpacked(row.clone(), n) for row, n in zip(rows, lengths, strict=True)]
