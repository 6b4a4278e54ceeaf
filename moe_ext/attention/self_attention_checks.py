"""What `ring_self_attention` refuses, alone and together with the other ranks.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention.layouts import LAYOUTS, Layout
from moe_ext.attention.masks import Mask
from moe_ext.distributed.collectives import check_equal_over_ranks, share

OPERATION = "ring_self_attention"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _require(condition: bool, argument: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{OPERATION}: expected {argument} to be {rule}, got {value}")


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
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(x.dtype in _DTYPES, name, "float32, bfloat16, float16 or float64", x.dtype)
        _require(x.dim() == 4, name, "of shape [B, H, L, D]", list(x.shape))
        _require(x.dtype == q.dtype, name, f"{q.dtype} like q", x.dtype)
        _require(x.device == q.device, name, f"on {q.device} like q", x.device)
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    rule = f"[{batch}, Hkv, {length}, {dim}] to go with q"
    _require(k.shape == (batch, kv_heads, length, dim), "k", rule, list(k.shape))
    rule = f"[{batch}, {kv_heads}, {length}, Dv] to go with k"
    _require(v.shape[:3] == k.shape[:3], "v", rule, list(v.shape))
    multiple = heads % kv_heads == 0 if kv_heads else heads == 0
    _require(multiple, "heads of q", f"a multiple of the {kv_heads} heads of k", heads)
    if key_mask is not None:
        fits = key_mask.shape == (batch, length) and key_mask.dtype == torch.bool
        found = f"{key_mask.dtype} {list(key_mask.shape)}"
        _require(fits, "key_mask", f"bool [{batch}, {length}], this rank's keys", found)
    if attn_mask is not None:
        _check_mask(attn_mask, batch, heads, length)
    known = isinstance(layout, Layout) or layout in LAYOUTS
    _require(known, "layout", f"a Layout or one of {LAYOUTS}", repr(layout))
    if scale is not None:
        _require(math.isfinite(scale), "scale", "finite", scale)
    _require(0 <= dropout_p < 1, "dropout_p", "in [0, 1)", dropout_p)
    if seed is not None:
        _require(-(1 << 63) <= seed < 1 << 63, "seed", "a 64-bit integer", seed)


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


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def _checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


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
        seed = int(torch.randint(1 << 62, ())) if dropout_p > 0 else 0
    if group is None:
        return [q.shape[2]], seed
    name = "a Layout" if isinstance(layout, Layout) else layout
    names = (*LAYOUTS, "a Layout")
    facts: dict[str, tuple[int, Callable[[int], object]]] = {
        "the dtype of q": (_DTYPES.index(q.dtype), _DTYPES.__getitem__),
        "B of q": (q.shape[0], int),
        "H of q": (q.shape[1], int),
        "D of q": (q.shape[3], int),
        "Hkv of k": (k.shape[1], int),
        "Dv of v": (v.shape[3], int),
        "layout": (names.index(name), names.__getitem__),
        "layout (checksum)": (_checksum(layout), int),
        "is_causal": (mask.is_causal, bool),
        "window[0]": (mask.left, int),
        "window[1]": (mask.right, int),
        "cu_seqlens (checksum)": (_checksum(mask.cu_seqlens), int),
        "scale": (_bits(scale), _number),
        "dropout_p": (_bits(dropout_p), _number),
        "giving seed": (given, bool),
        "giving key_mask": (key_mask is not None, bool),
        "S of attn_mask (0: none)": (0 if attn_mask is None else attn_mask.shape[3], int),
    }
    words = [int(word) for word, _ in facts.values()]
    rows = share([*words, q.shape[2], seed], group, q.device, operation=OPERATION)
    for i, (fact, (_, shown)) in enumerate(facts.items()):
        check_equal_over_ranks(fact, [shown(row[i]) for row in rows], group, OPERATION)
    if given:
        check_equal_over_ranks("seed", [row[-1] for row in rows], group, OPERATION)
    return [row[-2] for row in rows], rows[0][-1]
