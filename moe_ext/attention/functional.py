"""Attention over a sequence that the ranks of a group hold in parts: the public functions.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions of this rank,
    D and Dv head dims, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention.auto import SchemeChoice, choose
from moe_ext.attention.autograd import attend, attend_in_graph
from moe_ext.attention.call import (
    OPERATION,
    AttentionOptions,
    Inputs,
    agree_on_call,
    rows_in_line,
)
from moe_ext.attention.checks import message_device
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Offsets, PrefixLen
from moe_ext.comm.agreement import Agreement
from moe_ext.ops.autograd import is_transformed, transforms

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


class _Keywords(TypedDict, total=False):
    """The keywords of `ring_attention` that its result's type does not follow from."""

    group: Required[ProcessGroup | DeviceMesh | None]
    is_causal: bool
    scale: float | None
    layout: str | Layout
    window: tuple[int, int] | None
    cu_seqlens: Offsets | None
    prefix_len: PrefixLen | None
    key_mask: Tensor | None
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | None
    scheme: str
    precision: str
    kv_grad_dtype: torch.dtype | None
    wire: str | None


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **keywords: Unpack[_Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    cu_seqlens: Offsets | None = None,
    prefix_len: PrefixLen | None = None,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scheme: str = "ring",
    precision: str = "exact",
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that the ranks of a group hold in parts, equal to one process's.

    ``softmax(mask(softcap(scale * q k^T) - slope |i - j| + bias)) v`` over the whole sequence, by
    the global positions i and j of queries and keys. A query without any key gives zeros, lse -inf
    and zero gradients. Every rank has to run the backward pass too: it is one ring more.

    Under `torch.autocast`, q, k and v are cast as those of torch's own attention are.

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
            S; a query sees its own document alone. Empty documents are legal. Or `[B, n]`, or B
            rows: offsets of the documents in each row of the batch; not with the layouts that
            follow documents.
        prefix_len: with `is_causal`, the number of positions at the start of each document that all
            of it sees, after the query too (a prefix LM). An integer for every document; or one for
            each row of the batch; with `cu_seqlens`, one for each document, or B rows of these.
            Not with `window`.
        key_mask: `[B, L]` bool, False for this rank's keys that no query sees.
        attn_mask: `[B or 1, H or 1, L, S]`, this rank's queries by all keys in the order of the
            sequence: bool, True for seen, or floating, a bias that is added to the scores, and
            differentiable: its gradient is that of this rank's queries. Beside all other masks. Not
            in the schemes that exchange heads, nor with other documents in each row.
        alibi_slopes: `[H]`; not differentiable.
        softcap: scores become softcap * tanh(score / softcap); None or 0 for none.
        sinks: `[H]`: a score that takes part in the softmax and has no value. Its gradient is that
            of this rank's queries, as for any parameter that every rank holds.
        dropout_p: share of the softmax dropped. The draws depend on seed, batch, head and the two
            positions alone: neither on P nor on the layout.
        seed: of the dropout, equal on every rank; None draws one from torch's generator of the
            first rank.
        scheme: "ring", keys and values go round and memory stays that of a shard; "all_gather", all
            keys and values on every rank at once; "ulysses", an all-to-all from shards of the
            sequence to shards of the heads and back, for P heads at least; "hybrid", "ulysses" in
            each row of a mesh, and a ring in each column; "double_ring", rings in rows and seldom a
            hop between them, for a mesh, or a group with as many ranks on each host; "auto", the
            one of least cost by the bytes it sends, see `explain_scheme`.
        precision: "exact": blocks are summed up in float32 and rounded once. "fast": blocks of 16
            bits that a kernel of torch serves are its, and rounded one by one; see the docs for the
            error of both.
        kv_grad_dtype: of dK and dV underway, None for float32 (float64 for float64);
            torch.bfloat16 halves these bytes and rounds at every hop.
        wire: format that K and V are rounded to once, and travel in: "int8", "fp8" or "mx", a byte
            an element and the scales, see `moe_ext.ops.quantize_rows`. Their own rank too computes
            with what is sent, so that results do not depend on P; gradients are those of the
            rounded K and V and travel as `kv_grad_dtype` says. Not for float64, nor in the schemes
            that exchange heads.
        return_lse: return (out, lse).

    Returns:
        `[B, H, L, Dv]` in the dtype of q; with `return_lse` also `[B, H, L]` float32 (float64), the
        log of the sum of the exponentials of all scores, differentiable.

    Raises:
        ValueError: on every rank: an argument that is wrong by itself on one of them, arguments
            that differ between ranks, or lengths that are not those of the layout.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference:
        Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers (2023).
    """
    options = AttentionOptions.of(
        group,
        OPERATION,
        layout=layout,
        is_causal=is_causal,
        scale=scale,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        scheme=scheme,
        precision=precision,
        kv_grad_dtype=kv_grad_dtype,
        wire=wire,
    )
    inputs = Inputs(q, k, v, key_mask, alibi_slopes, sinks, cu_seqlens, prefix_len, attn_mask)
    return run(inputs, options, seed, return_lse=return_lse)


def run(
    inputs: Inputs, options: AttentionOptions, seed: int | None, *, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The result of `ring_attention` for its arguments."""
    if is_transformed():
        raise RuntimeError(
            f"{OPERATION}: expected to be called outside of torch.func, got {transforms()}"
        )
    q, k, v = map(as_autocast, (inputs.q, inputs.k, inputs.v))
    inputs = inputs._replace(q=q, k=k, v=v)
    # Without an error the call itself compares.
    with Agreement(OPERATION, options.group, message_device(*inputs)):
        line, options = rows_in_line(inputs, options)
    attention = attend_in_graph if torch.compiler.is_compiling() else attend
    out, lse = attention(line, options, seed)
    if line.q is not q:
        batch, heads, length = q.shape[:3]
        out = out.view(heads, batch, length, out.shape[3]).transpose(0, 1)
        lse = lse.view(heads, batch, length).transpose(0, 1)
    return (out, lse) if return_lse else out


def as_autocast(x: Tensor) -> Tensor:
    """As torch casts what its attention reads, which an operator of our own does not get."""
    # Arguments that are no tensors of numbers are left to the checks, which all ranks hear of.
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    kind = x.device.type
    # torch raises on the meta device, which has no autocast.
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if on else x


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
    prefix_len: PrefixLen | None = None,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
) -> SchemeChoice:
    """The scheme that `ring_attention(..., scheme="auto")` takes for these arguments, and why.

    Every rank has to call it: they agree on lengths and learn who shares a host, as they do in
    `ring_attention`. Without ranks, `choose_scheme` tells the same from sizes.

    Returns:
        The choice, equal on every rank; `print` it for a table of all candidates.
    """
    options = AttentionOptions.of(
        group,
        OPERATION,
        layout=layout,
        is_causal=is_causal,
        window=window,
        scheme="auto",
        kv_grad_dtype=kv_grad_dtype,
        wire=wire,
    )
    q, k, v = (as_autocast(x) for x in (q, k, v))
    inputs = Inputs(
        q, k, v, key_mask, cu_seqlens=cu_seqlens, prefix_len=prefix_len, attn_mask=attn_mask
    )
    call = agree_on_call(inputs, options)
    return choose(call.work, options.mesh)
