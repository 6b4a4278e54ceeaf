"""Attention by an all-to-all from shards of the sequence to shards of the heads, and back.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_ext.attention._block import (
    Block,
    BlockOptions,
    accumulation_dtype,
    attend_,
    block_backward,
)
from moe_ext.attention.exchange import Keys
from moe_ext.attention.plan import Plan, Saved
from moe_ext.distributed.collectives import all_to_all_rows


def check_heads(heads: int, kv_heads: int, num_ranks: int, operation: str) -> None:
    """ValueError unless each rank gets as many heads, each with its own head of keys."""
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        raise ValueError(
            f"{operation}: expected the heads of q to be a multiple of {num_ranks} ranks for "
            f"scheme 'ulysses', and those of k a multiple or a divisor, got {heads} and {kv_heads}"
        )


def _heads(total: int, rank: int, num_ranks: int) -> slice:
    """Heads of a rank; where ranks outnumber them, several have the same one."""
    each = max(total // num_ranks, 1)
    first = rank * total // num_ranks
    return slice(first, first + each)


def _to_heads(tensors: Sequence[Tensor], plan: Plan, operation: str) -> list[Tensor]:
    """Each `[B, heads, L, D]` as `[B, heads of this rank, S, D]`, positions in shard order."""
    num_ranks, sizes = plan.layout.num_ranks, plan.layout.sizes
    if plan.group is None:
        return list(tensors)
    messages = [
        torch.cat([x[:, _heads(x.shape[1], p, num_ranks)].reshape(-1) for x in tensors])
        for p in range(num_ranks)
    ]
    per_position = [x.shape[0] * max(x.shape[1] // num_ranks, 1) * x.shape[3] for x in tensors]
    receive = [sum(per_position) * size for size in sizes]
    send = [len(message) for message in messages]
    row = all_to_all_rows(torch.cat(messages), plan.group, send, receive, operation=operation)
    parts: list[list[Tensor]] = [[] for _ in tensors]
    for part, size in zip(row.split(receive), sizes, strict=True):
        pieces = part.split([count * size for count in per_position])
        for i, (piece, x) in enumerate(zip(pieces, tensors, strict=True)):
            parts[i].append(
                piece.view(x.shape[0], max(x.shape[1] // num_ranks, 1), size, x.shape[3])
            )
    return [torch.cat(part, dim=2) for part in parts]


def _to_positions(x: Tensor, total: int, plan: Plan, operation: str) -> Tensor:
    """`[B, heads of this rank, S, D]` as `[B, total, L, D]`; copies of a head are summed up."""
    num_ranks, sizes = plan.layout.num_ranks, plan.layout.sizes
    if plan.group is None:
        return x
    batch, each, _, dim = x.shape
    length = sizes[plan.rank]
    row = torch.cat([part.reshape(-1) for part in x.split(list(sizes), dim=2)])
    send = [batch * each * size * dim for size in sizes]
    receive = [batch * each * length * dim] * num_ranks
    found = all_to_all_rows(row, plan.group, send, receive, operation=operation)
    found = found.view(num_ranks, batch, each, length, dim).transpose(0, 1)
    copies = num_ranks * each // total
    if copies > 1:
        return found.reshape(batch, total, copies, length, dim).sum(2)
    return found.reshape(batch, total, length, dim)


def _setting(plan: Plan, heads: int, device: torch.device) -> tuple[Tensor, BlockOptions, Plan]:
    """Positions in shard order, and options and slopes of this rank's heads."""
    num_ranks = plan.layout.num_ranks
    mine = _heads(heads, plan.rank, num_ranks)
    positions_S = torch.cat([plan.layout.positions(r, device) for r in range(num_ranks)])
    slopes = None if plan.alibi_slopes is None else plan.alibi_slopes[mine]
    options = replace(plan.options, first_head=mine.start)
    return positions_S, options, replace(plan, alibi_slopes=slopes)


def _block(q: Tensor, own: Keys, plan: Plan, operation: str) -> tuple[Block, BlockOptions]:
    """All positions of this rank's heads."""
    positions_S, options, mine = _setting(plan, q.shape[1], q.device)
    q_heads, k_heads, v_heads = _to_heads([q, own.k, own.v], plan, operation)
    key_mask = own.key_mask
    if key_mask is not None:
        # As a head that every rank has.
        bytes_B1L1 = key_mask[:, None, :, None].to(torch.uint8)
        key_mask = _to_heads([bytes_B1L1], plan, operation)[0][:, 0, :, 0].bool()
    keys = Keys(k_heads, v_heads, key_mask)
    block = mine.block_at(q_heads, positions_S, keys, positions_S)
    return block, options


class Ulysses:
    """Exchanges again in the backward pass: between the two a rank holds its own shard alone."""

    @staticmethod
    def forward(q: Tensor, own: Keys, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse, None)."""
        op, heads = "ring_attention", q.shape[1]
        block, options = _block(q, own, plan, op)
        dtype = accumulation_dtype(q.dtype)
        out = block.q.new_zeros((*block.q.shape[:3], own.v.shape[3]), dtype=dtype)
        lse = block.q.new_full(block.q.shape[:3], -torch.inf, dtype=dtype)
        attend_(out, lse, block, options)
        both = _to_positions(torch.cat([out, lse[..., None]], -1), heads, plan, op)
        return both[..., :-1].contiguous(), both[..., -1].contiguous(), None

    @staticmethod
    def backward(
        saved: Saved, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        plan, q, op = saved.plan, saved.q, "ring_attention backward"
        assert saved.own is not None
        heads, kv_heads = q.shape[1], saved.form.heads
        block, options = _block(q, saved.own, plan, op)
        (grad_heads,) = _to_heads([grad_out], plan, op)
        lse_heads, delta_heads = _to_heads([lse[..., None], delta[..., None]], plan, op)
        grads = block_backward(grad_heads, lse_heads[..., 0], delta_heads[..., 0], block, options)
        grad_q = _to_positions(grads[0].to(q.dtype), heads, plan, op)
        wire = plan.grad_dtype if plan.layout.num_ranks > kv_heads else q.dtype
        both = torch.cat([grads[1], grads[2]], dim=-1).to(wire)
        both = _to_positions(both, kv_heads, plan, op)
        return grad_q, both[..., : saved.form.dim], both[..., saved.form.dim :]
