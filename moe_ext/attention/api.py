"""The public function: checks, agreement between the ranks, and the choice of a scheme.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention._block import BlockOptions, accumulation_dtype
from moe_ext.attention._compiled import attend_in_graph, set_planner
from moe_ext.attention._options import Inputs, Options, draw_seed, scale_of
from moe_ext.attention.arguments import (
    NUM_FACTS,
    OPERATION,
    PRECISIONS,
    check_numbers,
    check_slopes,
    check_tensors,
    collect_facts,
    require,
    tell_refusal,
)
from moe_ext.attention.choice import SchemeChoice
from moe_ext.attention.exchange import Keys, KeysForm
from moe_ext.attention.grid import split_group
from moe_ext.attention.layouts import LAYOUTS, Layout, make_layout
from moe_ext.attention.masks import Mask, check_cu_seqlens, check_end, check_window
from moe_ext.attention.plan import Plan, Scheme, attend
from moe_ext.attention.schemes import SCHEME_NAMES, check_scheme, explain, settle
from moe_ext.attention.sharding import check_lengths


def check_options(options: Options, seed: int | None = None) -> None:
    """ValueError for options that no tensors could go with."""
    layout, scheme, precision = options.layout, options.scheme, options.precision
    known = isinstance(layout, Layout) or layout in LAYOUTS
    require(known, "layout", f"a Layout or one of {LAYOUTS}", repr(layout))
    require(scheme in SCHEME_NAMES, "scheme", f"one of {SCHEME_NAMES}", repr(scheme))
    require(precision in PRECISIONS, "precision", f"one of {PRECISIONS}", repr(precision))
    allowed = (None, torch.float32, torch.bfloat16)
    wire = options.kv_grad_dtype
    require(wire in allowed, "kv_grad_dtype", f"one of {allowed}", wire)
    check_numbers(options.scale, options.softcap, options.dropout_p, seed)
    check_window(options.window, OPERATION)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
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
        group: the P ranks; None is this process alone. A 2-D DeviceMesh ('ring', 'ulysses') holds
            them in rows; shards then follow the group of all its ranks, whose order is that of
            ascending ranks of the job: row by row for a mesh of `init_device_mesh`.
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
            sequence to shards of the heads and back, for H divisible by P and Hkv by P or P by Hkv;
            "hybrid", this in each row of a mesh, and a ring in each column; "double_ring", rings in
            rows and seldom a hop between them, for a mesh, or a group with as many ranks on each
            host; "auto", the one of least cost by the bytes it sends, see `explain_scheme`.
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
    whole, grid = split_group(group, OPERATION)
    options = Options(
        whole,
        layout,
        is_causal,
        scale,
        window,
        softcap,
        dropout_p,
        scheme,
        precision,
        kv_grad_dtype,
        grid,
    )
    inputs = Inputs(q, k, v, key_mask, alibi_slopes, sinks, cu_seqlens)
    if torch.compiler.is_compiling():
        # Its operator could not tell: autograd is over there.
        check_slopes(alibi_slopes)
        out, lse = attend_in_graph(inputs, options, seed)
    else:
        plan, _, way = plan_call(inputs, options, seed)
        out, lse = attend(q, k, v, sinks, key_mask, plan, way)
    return (out, lse) if return_lse else out


def explain_scheme(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    is_causal: bool = False,
    layout: str | Layout = "zigzag",
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    kv_grad_dtype: torch.dtype | None = None,
) -> SchemeChoice:
    """What `ring_attention(..., scheme="auto")` takes for these arguments, and why.

    Every rank has to call it: they agree on lengths and learn who shares a host, as they do in
    `ring_attention`. Without ranks, `choose_scheme` tells the same from sizes.

    Returns:
        The choice, equal on every rank; `print` it for a table of all candidates.
    """
    whole, grid = split_group(group, OPERATION)
    options = Options(
        whole, layout, is_causal, window=window, kv_grad_dtype=kv_grad_dtype, grid=grid
    )
    inputs = Inputs(q, k, v, key_mask, cu_seqlens=cu_seqlens)
    made, _, form = _agreed_plan(inputs, options)
    return explain(made, q.shape[1], form)


def plan_call(
    inputs: Inputs,
    options: Options,
    seed: int | None = None,
    drawn: int | None = None,
    agreed: tuple[list[int], int] | None = None,
) -> tuple[Plan, list[int], Scheme]:
    """What precedes an attention: all checks, the agreement of the ranks, and what they imply.

    `drawn` is a seed that this rank drew in the place of the missing one; `agreed` is what an
    earlier plan of the same call found, lengths and seed, and spares the message.
    """
    plan, lengths, form = _agreed_plan(inputs, options, seed, drawn, agreed)
    way, settled = settle(options.scheme, plan, inputs.q.shape[1], form, OPERATION)
    return settled, lengths, way


set_planner(plan_call)


def _agreed_plan(
    inputs: Inputs,
    options: Options,
    seed: int | None = None,
    drawn: int | None = None,
    agreed: tuple[list[int], int] | None = None,
) -> tuple[Plan, list[int], KeysForm]:
    """(plan before a scheme is settled, lengths of all shards, form of the keys)."""
    q, k, v, key_mask, alibi_slopes, sinks, cu_seqlens = inputs
    check_options(options, seed)
    window = check_window(options.window, OPERATION)
    mask = Mask(options.is_causal, *window, check_cu_seqlens(cu_seqlens, OPERATION))
    group, grid = options.group, options.grid
    try:
        check_tensors(q, k, v, key_mask, {"alibi_slopes": alibi_slopes, "sinks": sinks})
        check_scheme(options.scheme, q.shape[1], k.shape[1], group, grid, OPERATION)
    except ValueError:
        if agreed is None:
            tell_refusal(OPERATION, NUM_FACTS, group, q.device)
        raise
    factor = scale_of(options.scale, q.shape[3])
    cap, precision = options.softcap or 0.0, options.precision
    block = BlockOptions(factor, mask, cap, options.dropout_p, precision=precision)
    half = options.kv_grad_dtype == torch.bfloat16
    if agreed is None:
        given = [x is not None for x in (seed, key_mask, alibi_slopes, sinks)]
        learns = [x.requires_grad for x in (q, k, v, sinks) if x is not None]
        wants_grad = torch.is_grad_enabled() and any(learns)
        facts = collect_facts(q, k, v, options, block, [*given, half], wants_grad)
        mine = seed if seed is not None else drawn
        if mine is None:
            mine = draw_seed(options.dropout_p)
        agreed = facts.agree(q.shape[2], mine, given[0], group, q.device)
    lengths, common = agreed
    check_end(mask.cu_seqlens, sum(lengths), OPERATION)
    made = make_layout(options.layout, sum(lengths), len(lengths), cu_seqlens=mask.cu_seqlens)
    check_lengths(made, lengths, OPERATION, group)
    wire = torch.bfloat16 if half else accumulation_dtype(q.dtype)
    offsets = None
    if mask.cu_seqlens is not None:
        offsets = torch.tensor(mask.cu_seqlens, device=q.device)
    plan = Plan(group, made, replace(block, seed=common), offsets, alibi_slopes, wire, grid)
    return plan, lengths, Keys(k, v, key_mask).form
