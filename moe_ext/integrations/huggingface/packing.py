"""Batches of a Hugging Face model whose sequences the ranks of a group share.

Shapes: B batch, S whole sequence, L positions of this rank, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention import shard_sequence, token_mean_loss
from moe_ext.attention import shift_labels as shifted
from moe_ext.attention.layouts import Layout, ranks_of
from moe_ext.distributed.groups import group_size

_KEYS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels")


def document_offsets(
    position_ids: Tensor, given: Sequence[int] | None, operation: str
) -> tuple[int, ...] | None:
    """Offsets of the documents of a batch, None for a single one.

    Args:
        position_ids: `[B, S]` or `[1, S]`, of the whole sequence.
        given: offsets that the caller knows; a count that goes on across them is legal.
        operation: name for error messages.

    Raises:
        ValueError: positions that do not count up from 0 in each document, or documents that differ
            between the sequences of the batch.
    """
    ids_S = position_ids[0].cpu()
    if bool((position_ids != position_ids[:1]).any()):
        raise ValueError(
            f"{operation}: expected position_ids to be equal in all sequences of a batch, got rows "
            "that differ; pack documents into a batch of one, pad on the right"
        )
    starts = torch.ones_like(ids_S, dtype=torch.bool)
    starts[1:] = ids_S.diff() != 1
    found = starts.nonzero()[:, 0].tolist()
    off = [place for place in found if ids_S[place] != 0]
    inside = given is None or set(found) <= set(given)
    if off or not inside:
        place = off[0] if off else next(p for p in found if given is None or p not in given)
        raise ValueError(
            f"{operation}: expected position_ids to count up from 0 in each document of the whole "
            f"sequence, got {ids_S[max(place - 2, 0) : place + 3].tolist()} around position "
            f"{place}; give each rank its shard of the positions (see shard_batch)"
        )
    if given is not None:
        return tuple(given)
    offsets = (*found, len(ids_S))
    return offsets if len(offsets) > 2 else None


def _cu_seqlens(offsets: Sequence[int], device: torch.device) -> dict[str, Tensor | int]:
    """The documents as arguments of transformers' attention functions."""
    row = torch.tensor(offsets, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in itertools.pairwise(offsets))
    return {
        "cu_seq_lens_q": row,
        "cu_seq_lens_k": row,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def shard_batch(
    batch: Mapping[str, Tensor],
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout = "zigzag",
    ignore_index: int = -100,
) -> dict[str, Tensor | int]:
    """This rank's part of a batch that every rank of the group holds whole; no communication.

    `model(**shard_batch(...)).loss` of a causal language model is then this rank's part of the
    loss: the mean over the ranks of the group is the mean over all labels of the batch, so
    `moe_ext.distributed.sync_gradients`, or any other mean over the ranks, gives the gradients of
    one process.

    Args:
        batch: `input_ids` `[B, S]` or `inputs_embeds` `[B, S, D]`; if wanted `labels` `[B, S]`, not
            shifted, `attention_mask` `[B, S]`, and `position_ids` `[B, S]` or `[1, S]`, whose
            resets are packed documents.
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: as in `register_ring_attention`.
        ignore_index: stands for no label.

    Returns:
        Keyword arguments of the model: the shards, `position_ids` always among them; with labels,
        `labels` and `shift_labels`, shifted in the whole sequence, and `num_items_in_batch`, the
        labels of the batch over the ranks; with several documents, their `cu_seq_lens_q` and so on.

    Raises:
        ValueError: a key that is not known, or positions that do not count up from 0 in each
            document.
    """
    op = "shard_batch"
    unknown = [key for key in batch if key not in _KEYS]
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if unknown or tokens is None:
        raise ValueError(
            f"{op}: expected input_ids or inputs_embeds, and other keys to be among {_KEYS}, "
            f"got {list(batch)}"
        )
    seq_len, num_ranks = tokens.shape[1], group_size(ranks_of(group, op))
    for key, tensor in batch.items():
        if tensor.dim() < 2 or tensor.shape[1] != seq_len:
            raise ValueError(f"{op}: expected {key} to be {seq_len} long, got {list(tensor.shape)}")
    whole = dict(batch)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(seq_len, device=tokens.device)[None]
    offsets = document_offsets(whole["position_ids"], None, op)
    extra: dict[str, Tensor | int] = {}
    if "labels" in whole:
        labels = shifted(whole["labels"], cu_seqlens=offsets, ignore_index=ignore_index)
        whole["labels"] = whole["shift_labels"] = labels
        extra["num_items_in_batch"] = (labels != ignore_index).sum() / num_ranks
    if offsets is not None:
        extra.update(_cu_seqlens(offsets, tokens.device))
    parts = {
        key: shard_sequence(tensor, group=group, dim=1, layout=layout, cu_seqlens=offsets)
        for key, tensor in whole.items()
    }
    return {**parts, **extra}


def causal_lm_loss(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    grad_scale: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy over the labels of all ranks, the same number on every rank.

    Args:
        logits: `[B, L, V]` of this rank.
        shift_labels: `[B, L]`, as `shard_batch` gives them.
        group: the ranks that share each sequence.
        grad_scale: factor on the gradient; None for the number of ranks, which suits gradients that
            are averaged over the group, as `moe_ext.distributed.sync_gradients` does.
        ignore_index: stands for no label.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1).float(),
        shift_labels.flatten().to(logits.device),
        ignore_index=ignore_index,
        reduction="sum",
    )
    count = (shift_labels != ignore_index).sum()
    num_ranks = group_size(ranks_of(group, "causal_lm_loss"))
    scale = float(num_ranks) if grad_scale is None else grad_scale
    return token_mean_loss(total, count, group=group, grad_scale=scale)
