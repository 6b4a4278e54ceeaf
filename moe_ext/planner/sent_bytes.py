"""Exact numbers of bytes that a rank sends, for known routing and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from moe_ext.comm.collectives import all_reduce_bytes
from moe_ext.dispatch.parts import sum_dtype
from moe_ext.dispatch.wire import LOSSLESS, Wire, sent_row_bytes


def exchange_bytes(
    topk_idx_TK: Sequence[Tensor],
    rank: int,
    *,
    num_experts: int,
    model_dim: int,
    dispatcher: str = "alltoall",
    wire: Wire | str | None = None,
    combine: str = "exact",
    dtype: torch.dtype = torch.float32,
    weighed: bool = True,
    backward: bool = False,
) -> int:
    """Compute the bytes that a rank sends in a layer, to experts and back, for given routing.

    The bytes are those of `count_traffic`: rows, and the indices and weights sent with them.

    Args:
        topk_idx_TK: for each rank, the experts `[T, K]` of its tokens; -1 for dropped slots.
        rank: rank that sends.
        num_experts: E, experts of a layer.
        model_dim: D, the elements of a token.
        dispatcher: "alltoall", "dedup" or "allgather".
        wire: see `MoELayer`.
        combine: "exact" or "reduced", see `MoELayer`.
        dtype: dtype of rows.
        weighed: whether experts multiply by the weights, as those of `MoELayer` do; "reduced"
            implies it.
        backward: count the backward pass instead of the forward pass.

    Raises:
        ValueError: dispatcher is none of these; or wire has "lossless", for which the length of
            messages depends on the data.
    """
    ways = ("alltoall", "dedup", "allgather")
    if dispatcher not in ways:
        raise ValueError(f"exchange_bytes: expected dispatcher to be in {ways}, got {dispatcher!r}")
    ranks, made = len(topk_idx_TK), Wire.of("exchange_bytes", wire)
    if LOSSLESS in astuple(made):
        raise ValueError(
            f"exchange_bytes: expected wire to have formats of rows of one length, got {wire!r}: "
            "how long lossless messages are depends on the numbers in them"
        )
    owner = [idx.div(num_experts // ranks, rounding_mode="floor") for idx in topk_idx_TK]
    others = [p for p in range(ranks) if p != rank]

    def rows(source: int, target: int, once: bool) -> int:
        hit = owner[source] == target
        return int((hit.any(1) if once else hit).sum())

    def sent(once: bool) -> int:
        return sum(rows(rank, p, once) for p in others)

    def returned(once: bool) -> int:
        return sum(rows(p, rank, once) for p in others)

    once, top_k = dispatcher != "alltoall", topk_idx_TK[rank].shape[1]
    weight = sum_dtype(dtype).itemsize
    formats = (made.backward_dispatch, made.backward_combine)
    if not backward:
        formats = (made.dispatch, made.combine)
    row, row_back = (sent_row_bytes(each, model_dim, dtype) for each in formats)
    weighed = weighed or combine == "reduced"
    back = returned(once and combine == "reduced") * row_back
    if not once:
        weights = weight if weighed else 0
        if backward:
            return sent(False) * row + back + returned(False) * weights
        return sent(False) * (row + weights) + back
    if backward:
        return sent(True) * row + back + returned(True) * top_k * weight * weighed
    beside = top_k * (2 + weight)
    if dispatcher == "allgather":
        return (ranks - 1) * max(map(len, topk_idx_TK)) * (row + beside) + back
    return sent(True) * (row + beside) + back


def gradient_bytes(buckets: Sequence[int], num_ranks: int) -> int:
    """Compute the bytes that a rank sends to average buckets of gradients of these sizes."""
    return sum(all_reduce_bytes(each, num_ranks) for each in buckets)
