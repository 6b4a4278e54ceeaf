"""Batches of a Hugging Face model whose sequences are sharded over the ranks of a group.

Shapes: B batch, S whole sequence, L positions of this rank, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, DistributedSampler

from moe_ext.attention.checks import requires
from moe_ext.attention.layouts import Layout, ranks_of
from moe_ext.attention.sharding import shard_sequence, token_mean_loss
from moe_ext.attention.sharding import shift_labels as shifted
from moe_ext.comm.agreement import Agreement
from moe_ext.comm.groups import (
    global_rank,
    group_ranks,
    group_size,
    resolve_group,
)
from moe_ext.comm.reports import telling

KEYS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "labels",
)

# Factor of a checksum, odd and with many bits, so that a swap of two neighbours changes the sum.
_FACTOR = 0x1E3779B97F4A7C15
# Offsets of documents, once for the whole batch or for each of its rows.
FoundOffsets = tuple[int, ...] | tuple[tuple[int, ...], ...]


def document_offsets(
    position_ids: Tensor, given: Sequence[int] | None, operation: str
) -> FoundOffsets | None:
    """Offsets of the documents of a batch, for each row if rows differ; None for one document.

    Args:
        position_ids: `[B, S]` or `[1, S]`, positions of the whole sequence.
        given: offsets that the caller knows, or None. Positions may go on counting across them.
        operation: name for error messages.

    Raises:
        ValueError: positions that do not count up from 0 in each document.
    """
    if bool((position_ids != position_ids[:1]).any()):
        # The recursive call returns None for a row with a single document.
        whole = (0, position_ids.shape[1])
        rows: list[Any] = [
            document_offsets(row[None], given, operation) or whole for row in position_ids
        ]
        if given is not None:
            return tuple(given)
        most = max(map(len, rows))
        # Empty documents at the end give all rows the same length, as a tensor requires.
        return tuple((*row, *row[-1:] * (most - len(row))) for row in rows)
    ids_S = position_ids[0].cpu()
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
    """Documents in the form of arguments of transformers' attention functions."""
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
    """This rank's part of a batch that every rank of the group holds whole.

    The ranks compare checksums of their batches in one small message. Call this function in the
    process that has the group, not in a worker process of a DataLoader.

    `model(**shard_batch(...)).loss` of a causal language model is then this rank's part of the
    loss, such that its mean over the ranks is the mean over all labels of the batch.
    `moe_ext.distributed.sync_gradients`, or any other mean over the ranks, then gives the gradients
    of one process.

    Args:
        batch: `input_ids` `[B, S]` or `inputs_embeds` `[B, S, D]`. Optional are `labels` `[B, S]`,
            not shifted, `attention_mask` `[B, S]`, and `position_ids` `[B, S]` or `[1, S]`, which
            start again at 0 in each packed document.
        group: the ranks that share each sequence, see `ring_attention`; None is this process alone.
        layout: as in `register_ring_attention`.
        ignore_index: value that stands for no label.

    Returns:
        Keyword arguments of the model: the shards, always with `position_ids`. With labels also
        `labels` and `shift_labels`, shifted in the whole sequence, and `num_items_in_batch`, the
        number of labels of the batch divided by the number of ranks. With several documents, the
        same in all rows, also `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`.

    Raises:
        ValueError: on every rank, if batches differ between the ranks, a key is unknown, or
            positions do not count up from 0 in each document.
        RankFailureError: a rank died or did not answer.
    """
    op = "shard_batch"
    ranks = ranks_of(group, op)
    with Agreement(op, ranks) as agreement:
        facts = {"the keys of the batch": sorted(batch), **batch_facts(batch)}
        tokens, whole = check_batch(batch, op), dict(batch)
        if "position_ids" not in whole:
            whole["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        offsets = document_offsets(whole["position_ids"], None, op)
        parts = cut_batch(whole, offsets, group=group, layout=layout, ignore_index=ignore_index)
        agreement.compare(facts)
    if offsets is None or isinstance(offsets[0], tuple):
        return parts
    return {**parts, **_cu_seqlens(offsets, tokens.device)}


def batch_facts(batch: Mapping[str, Any], keys: Sequence[str] = KEYS) -> dict[str, object]:
    """Checksums of a batch, for the ranks to compare that all were given the same whole batch."""
    found = {key: batch.get(key) for key in keys}
    return {
        f"{key} (every rank is given the same whole batch, which is cut here)": (
            None if x is None else _checksum(x)
        )
        for key, x in found.items()
    }


def _checksum(x: Tensor) -> str:
    """Shape and checksum of a tensor. Only the first number of an embedding is read.

    NOTE: device-to-host sync.
    """
    values = (x[..., 0] if x.dim() == 3 else x).detach().flatten()
    if values.is_floating_point():
        values = values.double().view(torch.int64)
    factors = torch.arange(1, len(values) + 1, device=x.device) * _FACTOR
    total = int((values * factors).sum()) % (1 << 64)
    return f"{list(x.shape)} with checksum {total:016x}"


def check_batch(batch: Mapping[str, Tensor], operation: str) -> Tensor:
    """Tokens `[B, S]` or embeddings `[B, S, D]` of a whole batch; ValueError for other keys."""
    unknown = [key for key in batch if key not in KEYS]
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if unknown or tokens is None:
        raise ValueError(
            f"{operation}: expected input_ids or inputs_embeds, and other keys to be among {KEYS}, "
            f"got {list(batch)}"
        )
    require = requires(operation)
    name = "input_ids" if "input_ids" in batch else "inputs_embeds"
    require(tokens.dim() >= 2, name, "[B, S] or [B, S, D]", list(tokens.shape))
    rows, length = tokens.shape[:2]
    for key, x in batch.items():
        fits = x.dim() >= 2 and len(x) in (1, rows) and x.shape[1] == length
        require(fits, key, f"of shape [{rows} or 1, {length}, ...]", list(x.shape))
    return tokens


def cut_batch(
    batch: Mapping[str, Tensor],
    offsets: FoundOffsets | None,
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout,
    shifts: bool = True,
    num_items: Tensor | float | None = None,
    ignore_index: int = -100,
) -> dict[str, Tensor | int]:
    """This rank's part of a whole batch with its positions, see `shard_batch`.

    Args:
        batch: tensors of the keys that `check_batch` takes.
        offsets: offsets of its documents.
        group: see `shard_batch`.
        layout: see `shard_batch`.
        shifts: if True, the loss is of the next token, and labels are shifted.
        num_items: number by which the loss is divided; None for the number of labels.
        ignore_index: value that stands for no label.
    """
    whole = dict(batch)
    extra: dict[str, Tensor | int] = {}
    if "labels" in whole:
        labels = whole["labels"]
        if shifts:
            labels = shifted(labels, cu_seqlens=offsets, ignore_index=ignore_index)
            whole["labels"] = whole["shift_labels"] = labels
        count = (labels != ignore_index).sum() if num_items is None else torch.as_tensor(num_items)
        # The count becomes float32, because a default dtype of 16 bits cannot hold every count.
        extra["num_items_in_batch"] = count.float() / group_size(ranks_of(group, "shard_batch"))
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
        shift_labels: `[B, L]`, as returned by `shard_batch`.
        group: the ranks that share each sequence.
        grad_scale: factor on the gradient. None for the number of ranks, which is right if
            gradients are then averaged over the group, as by `moe_ext.distributed.sync_gradients`.
        ignore_index: value that stands for no label.

    Raises:
        RankFailureError: a rank died or did not answer.
    """
    op = "causal_lm_loss"
    ranks = ranks_of(group, op)
    with telling(ranks, logits.device, op):
        total = F.cross_entropy(
            logits.flatten(0, 1).float(),
            shift_labels.flatten().to(logits.device),
            ignore_index=ignore_index,
            reduction="sum",
        )
    count = (shift_labels != ignore_index).sum()
    num_ranks = group_size(ranks)
    scale = float(num_ranks) if grad_scale is None else grad_scale
    return token_mean_loss(total, count, group=ranks, grad_scale=scale)


def group_sampler(
    dataset: Dataset[object],
    *,
    group: ProcessGroup | DeviceMesh | None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler[object]:
    """A sampler that gives all ranks of a group the same samples, and each group different ones.

    Every rank of the job has to call it. The groups must have one size and not overlap.

    Args:
        dataset: dataset to sample from.
        group: the ranks that share each sequence; None is this process alone, with samples of its
            own.
        shuffle: see `torch.utils.data.DistributedSampler`.
        seed: see `torch.utils.data.DistributedSampler`.
        drop_last: see `torch.utils.data.DistributedSampler`.

    Raises:
        ValueError: the groups of the ranks differ in size or overlap.
        RankFailureError: a rank died or did not answer.
    """
    op = "group_sampler"
    ranks = ranks_of(group, op)
    firsts, mine = [0], global_rank() if ranks is None else min(group_ranks(ranks))
    world = resolve_group(None, op)
    if world is not None:
        sizes = {"the size of group": group_size(ranks)}
        rows = Agreement(op, world).compare(sizes, values=[mine])
        firsts = sorted({row[0] for row in rows})
        if len(firsts) * group_size(ranks) != len(rows):
            raise ValueError(
                f"{op}: expected the groups of {group_size(ranks)} to hold each of {len(rows)} "
                f"ranks once, got {len(firsts)} groups"
            )
    return DistributedSampler(
        dataset,
        num_replicas=len(firsts),
        rank=firsts.index(mine),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
