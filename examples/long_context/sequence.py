"""One packed sequence, cut to this rank's part or whole, and the loss of a model on it.

Shape suffixes: S bytes of the whole sequence, L bytes of this rank, B = 1 sequence, H heads,
C channels of a head, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from moe_lm.data import TextData, packed_documents
from moe_lm.model import Attend, LanguageModel, ModelConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext import attention

NO_LABEL = -100


@dataclass(frozen=True)
class Shard:
    """Part of a sequence on a rank: bytes, the byte after each, places in the documents."""

    tokens_BL: Tensor
    labels_BL: Tensor
    ids_L: Tensor
    attend: Attend


def attend_documents(
    q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, *, offsets: list[int]
) -> Tensor:
    """Causal attention of one process by PyTorch, one document after the other."""
    mixed = [
        F.scaled_dot_product_attention(
            q_BHSC[:, :, a:b], k_BHSC[:, :, a:b], v_BHSC[:, :, a:b], is_causal=True
        )
        for a, b in itertools.pairwise(offsets)
    ]
    return torch.cat(mixed, dim=2)


def cut(
    args: argparse.Namespace,
    tokens_S: Tensor,
    offsets: list[int],
    group: ProcessGroup | None,
    *,
    ring: bool = True,
) -> Shard:
    """This rank's part under --layout; without `ring` the whole, with PyTorch's attention."""
    labels_S = attention.shift_labels(tokens_S, cu_seqlens=offsets, ignore_index=NO_LABEL)
    if not ring:
        group = None
    where = {"group": group, "cu_seqlens": offsets, "layout": args.layout if ring else "contiguous"}
    attend = functools.partial(attend_documents, offsets=offsets)
    if ring:
        attend = functools.partial(
            attention.ring_attention,
            is_causal=True,
            scheme=args.scheme,
            precision=args.precision,
            **where,
        )
    tokens_L = attention.shard_sequence(tokens_S, dim=0, **where)
    labels_L = attention.shard_sequence(labels_S, dim=0, **where)
    ids_L = attention.position_ids(len(tokens_S), **where)
    return Shard(tokens_L[None], labels_L[None], ids_L, attend)


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The sizes of a dense model; ValueError for those that make none."""
    sizes = {"model_dim", "num_layers", "num_heads", "ffn_dim", "seq_len"}
    return ModelConfig(**{name: getattr(args, name) for name in sizes}, top_k=1, num_experts=1)


def sequence_of(args: argparse.Namespace, data: TextData, step: int) -> tuple[Tensor, list[int]]:
    """The bytes of a step's sequence, and where its documents begin."""
    return packed_documents(
        data, step=step, seed=args.seed, seq_len=args.seq_len, longest=args.longest
    )


def loss_of(
    args: argparse.Namespace, model: LanguageModel, shard: Shard, group: ProcessGroup | None
) -> Tensor:
    """The mean over all labels of the sequence, on every rank; nats a byte."""
    bf16 = args.dtype == "bf16"
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        logits_BLV = model(shard.tokens_BL, shard.ids_L, shard.attend)
    loss_sum = F.cross_entropy(
        logits_BLV.float().flatten(0, 1),
        shard.labels_BL.flatten(),
        ignore_index=NO_LABEL,
        reduction="sum",
    )
    count = (shard.labels_BL != NO_LABEL).sum()
    # sync_gradients takes the mean of the ranks' gradients, where their sum is wanted.
    scale = 1.0 if group is None else float(group.size())
    return attention.token_mean_loss(loss_sum, count, group=group, grad_scale=scale)
