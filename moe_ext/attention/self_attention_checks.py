"""What `ring_self_attention` refuses, alone and together with the other ranks.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention._options import draw_seed
from moe_ext.attention.arguments import Facts, check_numbers, check_tensors, requires
from moe_ext.attention.layouts import LAYOUTS, Layout
from moe_ext.attention.masks import Mask

OPERATION = "ring_self_attention"
_require = requires(OPERATION)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    attn_mask: Tensor | None,
    layout: str | Layout,
    scale: float | None,
    dropout_p: float,
    seed: int | None,
) -> None:
    """ValueError for what one rank can tell is wrong."""
    check_tensors(q, k, v, key_mask, {}, _require)
    if attn_mask is not None:
        _require(
            attn_mask.device == q.device, "attn_mask", f"on {q.device} like q", attn_mask.device
        )
        _check_mask(attn_mask, *q.shape[:3])
    known = isinstance(layout, Layout) or layout in LAYOUTS
    _require(known, "layout", f"a Layout or one of {LAYOUTS}", repr(layout))
    check_numbers(scale, None, dropout_p, seed, _require)


def _check_mask(attn_mask: Tensor, batch: int, heads: int, length: int) -> None:
    shape = attn_mask.shape
    fits = attn_mask.dim() == 4 and shape[0] in (1, batch) and shape[1] in (1, heads)
    rule = f"[{batch} or 1, {heads} or 1, {length}, S], this rank's queries by all keys"
    _require(fits and shape[2] == length, "attn_mask", rule, list(shape))
    known = attn_mask.dtype == torch.bool or attn_mask.is_floating_point()
    _require(known, "attn_mask", "bool or floating", attn_mask.dtype)
    _require(not attn_mask.requires_grad, "attn_mask", "without gradient", "requires_grad=True")


def check_attn_mask(attn_mask: Tensor | None, seq_len: int) -> None:
    """ValueError unless the mask has a column for every position; alike on all ranks."""
    if attn_mask is not None:
        columns = attn_mask.shape[3]
        _require(columns == seq_len, "S of attn_mask", f"the {seq_len} keys of all ranks", columns)


def agree_on_call(
    qkv: tuple[Tensor, Tensor, Tensor],
    group: ProcessGroup | None,
    layout: str | Layout,
    mask: Mask,
    scale: float,
    dropout_p: float,
    seed: int | None,
    key_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> tuple[list[int], int]:
    """(lengths of all shards, the seed of all ranks), once every rank holds the same arguments."""
    q, k, v = qkv
    given = seed is not None
    if seed is None:
        seed = draw_seed(dropout_p)
    facts = Facts(OPERATION)
    facts.tensors(q, k, v)
    facts.places(layout, mask)
    facts.number("scale", scale)
    facts.number("dropout_p", dropout_p)
    facts.integer("giving seed", given)
    facts.integer("giving key_mask", key_mask is not None)
    facts.integer("S of attn_mask (0: none)", 0 if attn_mask is None else attn_mask.shape[3])
    # A rank without a backward pass would leave the others waiting in theirs.
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
    facts.integer("requiring a gradient", wants_grad)
    return facts.agree(q.shape[2], seed, given, group, q.device)
