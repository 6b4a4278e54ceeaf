"""The public function: checks, agreement between the ranks, and the choice of a scheme.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims, P ranks of the group.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_ext.attention._block import BlockOptions, accumulation_dtype
from moe_ext.attention._compiled import attend_in_graph, set_planner
from moe_ext.attention._options import Options
from moe_ext.attention.gathered import AllGather
from moe_ext.attention.layouts import LAYOUTS, Layout, make_layout
from moe_ext.attention.masks import Mask, check_cu_seqlens, check_end, check_window
from moe_ext.attention.plan import Plan, Scheme, attend
from moe_ext.attention.ring import Ring
from moe_ext.attention.sharding import check_lengths
from moe_ext.attention.ulysses import Ulysses, check_heads
from moe_ext.distributed.collectives import check_equal_over_ranks, share
from moe_ext.distributed.groups import check_group, group_size

_OP = "ring_attention"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCHEMES: dict[str, Scheme] = {"ring": Ring(), "all_gather": AllGather(), "ulysses": Ulysses()}
_PRECISIONS = ("exact", "fast")


def _require(condition: bool, argument: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{_OP}: expected {argument} to be {rule}, got {value}")


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, per_head: dict[str, Tensor | None]
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(x.dtype in _DTYPES, name, "float32, bfloat16, float16 or float64", x.dtype)
        _require(x.dim() == 4, name, "of shape [B, H, S/P, D]", list(x.shape))
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
    for name, values in per_head.items():
        if values is not None:
            _require(values.shape == (heads,), name, f"[{heads}]", list(values.shape))


def _check_numbers(
    scale: float | None, softcap: float | None, dropout_p: float, seed: int | None
) -> None:
    if scale is not None:
        _require(math.isfinite(scale), "scale", "finite", scale)
    if softcap is not None:
        _require(0 <= softcap < math.inf, "softcap", "0 (none) or more", softcap)
    _require(0 <= dropout_p < 1, "dropout_p", "in [0, 1)", dropout_p)
    if seed is not None:
        _require(-(1 << 63) <= seed < 1 << 63, "seed", "a 64-bit integer", seed)


def check_options(options: Options, seed: int | None = None) -> None:
    """ValueError or TypeError for options that no tensors could go with."""
    check_group(options.group, _OP, name="group")
    layout, scheme, precision = options.layout, options.scheme, options.precision
    known = isinstance(layout, Layout) or layout in LAYOUTS
    _require(known, "layout", f"a Layout or one of {LAYOUTS}", repr(layout))
    _require(scheme in SCHEMES, "scheme", f"one of {tuple(SCHEMES)}", repr(scheme))
    _require(precision in _PRECISIONS, "precision", f"one of {_PRECISIONS}", repr(precision))
    allowed = (None, torch.float32, torch.bfloat16)
    wire = options.kv_grad_dtype
    _require(wire in allowed, "kv_grad_dtype", f"one of {allowed}", wire)
    _check_numbers(options.scale, options.softcap, options.dropout_p, seed)
    check_window(options.window, _OP)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


class _Facts:
    """What ranks have to agree on, as integers to send and as values to print."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._shown: list[tuple[str, tuple[object, ...] | str]] = []

    def integer(self, name: str, value: int) -> None:
        self.words.append(int(value))
        self._shown.append((name, "integer"))

    def number(self, name: str, value: float) -> None:
        self.words.append(_bits(value))
        self._shown.append((name, "number"))

    def choice(self, name: str, value: object, choices: Sequence[object]) -> None:
        self.words.append(list(choices).index(value))
        self._shown.append((name, tuple(choices)))

    def checksum(self, name: str, value: object) -> None:
        self.words.append(zlib.crc32(repr(value).encode()))
        self._shown.append((f"{name} (checksum)", "integer"))

    def check(self, rows: list[list[int]], group: ProcessGroup) -> None:
        """ValueError on every rank, naming the first fact that differs and every rank's value."""
        for i, (name, kind) in enumerate(self._shown):
            column: list[object] = [row[i] for row in rows]
            if kind == "number":
                column = [_number(row[i]) for row in rows]
            elif isinstance(kind, tuple):
                column = [kind[row[i]] for row in rows]
            check_equal_over_ranks(name, column, group, _OP)


def _facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str | Layout,
    scheme: str,
    options: BlockOptions,
    flags: list[bool],
) -> _Facts:
    facts = _Facts()
    facts.choice("the dtype of q", q.dtype, _DTYPES)
    for name, value in zip("BHD", (q.shape[0], q.shape[1], q.shape[3]), strict=True):
        facts.integer(f"{name} of q", value)
    facts.integer("Hkv of k", k.shape[1])
    facts.integer("Dv of v", v.shape[3])
    name = "a Layout" if isinstance(layout, Layout) else layout
    facts.choice("layout", name, (*LAYOUTS, "a Layout"))
    facts.checksum("layout", layout)
    facts.choice("scheme", scheme, tuple(SCHEMES))
    facts.choice("precision", options.precision, _PRECISIONS)
    facts.integer("is_causal", options.mask.is_causal)
    facts.integer("window[0]", options.mask.left)
    facts.integer("window[1]", options.mask.right)
    facts.checksum("cu_seqlens", options.mask.cu_seqlens)
    facts.number("scale", options.scale)
    facts.number("softcap", options.softcap)
    facts.number("dropout_p", options.dropout_p)
    for name, flag in zip(
        ("seed", "key_mask", "alibi_slopes", "sinks", "bfloat16 for kv_grad_dtype"),
        flags,
        strict=True,
    ):
        facts.integer(f"giving {name}", flag)
    return facts


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str | Layout = "zigzag",
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scheme: str = "ring",
    precision: str = "exact",
    kv_grad_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that the ranks of a group hold in parts, equal to one process's.

    softmax(mask(softcap(scale * q k^T) - slope |i - j|)) v over the whole sequence, by the global
    positions i and j of queries and keys. A query without any key gives zeros, lse -inf and zero
    gradients. Every rank has to run the backward pass too: it is one ring more.

    NOTE: device-to-host sync, since the ranks agree on shapes in a message of fixed size first.

    Args:
        q: `[B, H, L, D]`, this rank's queries; L as `layout` says for any S.
        k: `[B, Hkv, L, D]`; H is a multiple of Hkv.
        v: `[B, Hkv, L, Dv]`.
        group: the P ranks; None is this process alone.
        is_causal: a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(D).
        layout: who holds which positions, see `make_layout`.
        window: (left, right): a query sees that many keys before and after it; -1 is no limit.
        cu_seqlens: offsets `[documents + 1]` of packed documents in the whole sequence, from 0 to
            S; a query sees its own document alone. Empty documents are legal.
        key_mask: `[B, L]` bool, False for this rank's keys that no query sees.
        alibi_slopes: `[H]`; not differentiable.
        softcap: scores become softcap * tanh(score / softcap); None or 0 for none.
        sinks: `[H]`: a score that takes part in the softmax and has no value. Its gradient is that
            of this rank's queries, as for any parameter that every rank holds.
        dropout_p: share of the softmax dropped. What is dropped depends on seed, batch, head and
            the two positions alone: neither on P nor on the layout.
        seed: of the dropout, equal on every rank; None draws one from torch's generator of the
            first rank.
        scheme: "ring", keys and values go round and memory stays that of a shard; "all_gather", all
            keys and values on every rank at once; "ulysses", an all-to-all from shards of the
            sequence to shards of the heads and back, for H divisible by P and Hkv by P or P by Hkv.
        precision: "exact": blocks are summed up in float32 and rounded once. "fast": blocks of 16
            bits that a kernel of torch serves are its, and rounded one by one; see the docs for the
            error of both.
        kv_grad_dtype: of dK and dV underway, None for float32 (float64 for float64);
            torch.bfloat16 halves these bytes and rounds at every hop.
        return_lse: return (out, lse).

    Returns:
        `[B, H, L, Dv]` in the dtype of q; with `return_lse` also `[B, H, L]` float32 (float64), the
        log of the sum of the exponentials of all scores, differentiable.

    Raises:
        ValueError: an argument that is wrong by itself, before any communication; arguments that
            differ between ranks or lengths that are not those of the layout, on every rank.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference:
        Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers (2023).
    """
    options = Options(
        group,
        layout,
        is_causal,
        scale,
        window,
        softcap,
        dropout_p,
        scheme,
        precision,
        kv_grad_dtype,
    )
    tensors = (q, k, v, key_mask, alibi_slopes, sinks)
    if torch.compiler.is_compiling():
        out, lse = attend_in_graph(*tensors, cu_seqlens, options, seed)
    else:
        plan, _, way = plan_call(*tensors, cu_seqlens, options, seed)
        out, lse = attend(q, k, v, sinks, key_mask, plan, way)
    return (out, lse) if return_lse else out


def plan_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    options: Options,
    seed: int | None = None,
    drawn: int | None = None,
    agreed: tuple[list[int], int] | None = None,
) -> tuple[Plan, list[int], Scheme]:
    """What precedes an attention: all checks, the agreement of the ranks, and what they imply.

    `drawn` is a seed that this rank drew in the place of the missing one; `agreed` is what an
    earlier plan of the same call found, lengths and seed, and spares the message.
    """
    check_options(options, seed)
    _check_tensors(q, k, v, key_mask, {"alibi_slopes": alibi_slopes, "sinks": sinks})
    window = check_window(options.window, _OP)
    mask = Mask(options.is_causal, *window, check_cu_seqlens(cu_seqlens, _OP))
    group, scheme = options.group, options.scheme
    if scheme == "ulysses":
        check_heads(q.shape[1], k.shape[1], group_size(group), _OP)
    factor = options.scale if options.scale is not None else 1 / math.sqrt(max(q.shape[3], 1))
    numbers = (factor, mask, options.softcap or 0.0, options.dropout_p)
    block = BlockOptions(*numbers, precision=options.precision)
    half = options.kv_grad_dtype == torch.bfloat16
    if agreed is None:
        given = [x is not None for x in (seed, key_mask, alibi_slopes, sinks)]
        facts = _facts(q, k, v, options.layout, scheme, block, [*given, half])
        mine = seed if seed is not None else drawn
        if mine is None:
            mine = int(torch.randint(1 << 62, ())) if options.dropout_p > 0 else 0
        agreed = _agree(facts, q.shape[2], mine, given[0], group, q.device)
    lengths, common = agreed
    check_end(mask.cu_seqlens, sum(lengths), _OP)
    made = make_layout(options.layout, sum(lengths), len(lengths), cu_seqlens=mask.cu_seqlens)
    check_lengths(made, lengths, _OP)
    wire = torch.bfloat16 if half else accumulation_dtype(q.dtype)
    slopes = None if alibi_slopes is None else alibi_slopes.detach()
    offsets = None
    if mask.cu_seqlens is not None:
        offsets = torch.tensor(mask.cu_seqlens, device=q.device)
    plan = Plan(group, made, replace(block, seed=common), offsets, slopes, wire)
    return plan, lengths, SCHEMES[scheme]


set_planner(plan_call)


def _agree(
    facts: _Facts,
    length: int,
    seed: int,
    given: bool,
    group: ProcessGroup | None,
    device: torch.device,
) -> tuple[list[int], int]:
    """(lengths of all shards, the seed of all ranks), once every rank holds the same facts."""
    if group is None:
        return [length], seed
    rows = share([*facts.words, length, seed], group, device, operation=_OP)
    facts.check(rows, group)
    if given:
        check_equal_over_ranks("seed", [row[-1] for row in rows], group, _OP)
    return [row[-2] for row in rows], rows[0][-1]
