"""Attention with all keys and values on every rank: one all-gather, and a reduce-scatter back.

Shapes: B batch, H heads, Hkv heads of keys and values, L positions of this rank, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext.attention._block import accumulation_dtype, attend_, block_backward
from moe_ext.attention.exchange import Keys, KeysForm
from moe_ext.attention.plan import Plan, Saved
from moe_ext.attention.sequence_collectives import Shards, start_all_gather, sum_shards


def _gathered(own: Keys, form: KeysForm, plan: Plan, operation: str) -> list[Keys]:
    """The keys of every rank."""
    if plan.group is None:
        return [own]
    lengths = plan.layout.sizes
    shards = Shards(plan.group, tuple(form.num_bytes(length) for length in lengths), operation)
    rows = start_all_gather(own.packed(), shards).wait().split(shards.sizes)
    # A shard of odd length leaves the next one at an address that its dtype cannot have.
    return [form.unpacked(row.clone(), n) for row, n in zip(rows, lengths, strict=True)]


class AllGather:
    """Gathers again in the backward pass: between the two a rank holds its own keys alone."""

    @staticmethod
    def forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, None)."""
        dtype = accumulation_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], own.v.shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        for source, keys in enumerate(_gathered(own, own.form, plan, "ring_attention")):
            if plan.route.needs[plan.rank][source]:
                attend_(out, lse, plan.block(q, source, keys), plan.options)
        return out, lse, None

    @staticmethod
    def backward(
        saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        plan, form, q, op = saved.plan, saved.form, saved.q, "ring_attention backward"
        assert saved.own is not None
        grad_q = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        sizes = [form.num_elements(length) for length in plan.layout.sizes]
        row = grad_q.new_zeros(sum(sizes), dtype=plan.grad_dtype)
        parts = row.split(sizes)
        for source, keys in enumerate(_gathered(saved.own, form, plan, op)):
            if plan.route.needs[plan.rank][source]:
                block = plan.block(q, source, keys)
                partial, *grads = block_backward(grad_out, lse, delta, block, plan.options)
                grad_q += partial
                parts[source].copy_(torch.cat([grad.reshape(-1) for grad in grads]))
        if plan.group is not None:
            row = sum_shards(row, Shards(plan.group, tuple(sizes), op))
        return grad_q, *form.split(row, plan.layout.sizes[plan.rank])
