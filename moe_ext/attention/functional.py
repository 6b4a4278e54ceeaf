"""Attention over a sequence that the ranks of a group hold in parts: the public functions.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions (T tokens) of
    this rank, D and Dv head dims, C of a latent, N of a key without rotation, R of the rotated key
    that all heads share, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._compile import outside_graphs
from moe_ext.attention.auto import SchemeChoice, choose
from moe_ext.attention.autograd import attend, attend_in_graph
from moe_ext.attention.call import (
    OPERATION,
    AttentionOptions,
    Inputs,
    agree_on_call,
    rows_in_line,
)
from moe_ext.attention.checks import message_device, requires
from moe_ext.attention.layouts import Layout, ranks_of
from moe_ext.attention.masks import Offsets, PrefixLen
from moe_ext.comm.agreement import Agreement
from moe_ext.nn import torch_state
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
    is_ours = isinstance(x, Tensor) and x.is_floating_point()
    return torch_state.as_autocast(x) if is_ours else x


def ring_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None,
    layout: str | Layout = "zigzag",
    scheme: str = "ring",
    precision: str = "exact",
    prefix_len: PrefixLen | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | None = None,
    wire: str | None = None,
) -> Tensor:
    """`ring_attention` of one row of packed documents, called as flash_attn_varlen_func is.

    Tokens are those that `layout` gives this rank; the offsets are of the whole sequence.

    Args:
        q: `[T, H, D]`, this rank's queries.
        k: `[T, Hkv, D]`; H is a multiple of Hkv.
        v: `[T, Hkv, Dv]`.
        cu_seqlens_q: `[documents + 1]`, offsets in the sequence of all ranks.
        cu_seqlens_k: the same: queries and keys are those of the same tokens. Give the same tensor
            under `torch.compile`, which cannot compare two.
        max_seqlen_q: not needed, and not read.
        max_seqlen_k: likewise.
        dropout_p: share of the softmax dropped; 0 in evaluation.
        softmax_scale: factor on q k^T; None for 1 / sqrt(D).
        causal: a query sees no key after it.
        window_size: (left, right), -1 for no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: `[H]`.
        group: see `ring_attention`, as for all that follows.
        layout: see `make_layout`; `cu_seqlens` of its functions is `cu_seqlens_q`.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        prefix_len: positions at the start of each document that all of it sees.
        attn_mask: `[H or 1, T, S]`, this rank's queries by all tokens of all ranks: bool, or a bias
            with its gradient, beside all other masks.
        sinks: `[H]`.
        seed: of the dropout.
        wire: format that `k` and `v` are rounded to and travel in.

    Returns:
        `[T, H, Dv]`.

    Raises:
        ValueError: on every rank: tensors of another number of dims, offsets of keys that are not
            those of queries, or what `ring_attention` refuses.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    op = "ring_attention_varlen"
    require = requires(op)
    # Without an error `ring_attention` compares.
    with Agreement(op, ranks_of(group, op), message_device(q, k, v)):
        for name, x in (("q", q), ("k", k), ("v", v)):
            fits = isinstance(x, Tensor) and x.dim() == 3
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            require(fits, name, "packed tokens [T, heads, dim] of this rank", found)
        one_row = isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.dim() == 1
        require(one_row, "cu_seqlens_q", "a tensor of integers [documents + 1]", cu_seqlens_q)
        if attn_mask is not None:
            fits = isinstance(attn_mask, Tensor) and attn_mask.dim() == 3
            found = list(attn_mask.shape) if isinstance(attn_mask, Tensor) else attn_mask
            require(fits, "attn_mask", "a tensor [H or 1, T, S]", found)
        same = cu_seqlens_k is cu_seqlens_q or torch.equal(cu_seqlens_k, cu_seqlens_q)
        require(same, "cu_seqlens_k", "equal to cu_seqlens_q", cu_seqlens_k)
    out = ring_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        group=group,
        is_causal=causal,
        scale=softmax_scale,
        layout=layout,
        window=window_size,
        cu_seqlens=cu_seqlens_q,
        attn_mask=None if attn_mask is None else attn_mask[None],
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        prefix_len=prefix_len,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        scheme=scheme,
        precision=precision,
        wire=wire,
    )
    return out[0].transpose(0, 1)


@outside_graphs
def latent_ring_attention(
    q: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str | Layout = "zigzag",
    window: tuple[int, int] | None = None,
    cu_seqlens: Offsets | None = None,
    prefix_len: PrefixLen | None = None,
    key_mask: Tensor | None = None,
    scheme: str = "ring",
    precision: str = "exact",
    kv_grad_dtype: torch.dtype | None = None,
    wire: str | None = None,
) -> Tensor:
    """`ring_attention` of multi-head latent attention, with C + R numbers a position on the wire.

    The keys of head h are ``[latent @ up_k[h]^T, rope_key]``, its values ``latent @ up_v[h]^T``:
    H (N + R + Dv) numbers a position, which each rank makes of what arrives, a shard at a time.
    Gradients of `latent` and `rope_key` are summed over all heads before they travel home. The
    gradients of `up_k` and `up_v` are of this rank's queries, as for any parameter that every rank
    holds: sum them over the group.

    A compiled graph breaks here.

    Args:
        q: `[B, H, L, N + R]`, the rotated part last.
        latent: `[B, L, C]`, as the up-projection takes it: normalised.
        rope_key: `[B, L, R]`, rotated.
        up_k: `[H, N, C]`.
        up_v: `[H, Dv, C]`.
        group: see `ring_attention`, as all that follow.
        is_causal: a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(N + R).
        layout: see `make_layout`.
        window: (left, right), -1 for no limit.
        cu_seqlens: offsets of packed documents.
        prefix_len: positions that all of a document sees.
        key_mask: `[B, L]` bool.
        scheme: "ring", "double_ring", "all_gather", or "auto" for the cheapest of these: a latent
            has no heads to exchange.
        precision: "exact" or "fast".
        kv_grad_dtype: of the gradients of `latent` and `rope_key` underway.
        wire: format that `latent` and `rope_key` are rounded to.

    Returns:
        `[B, H, L, Dv]` in the dtype of q.

    Raises:
        ValueError: see `ring_attention`.
        RankFailureError: a rank died or did not answer; the message names it.

    Reference: DeepSeek-V2, 2024 (arXiv 2405.04434), section 2.1.
    """
    options = AttentionOptions.of(
        group,
        OPERATION,
        layout=layout,
        is_causal=is_causal,
        scale=scale,
        window=window,
        scheme=scheme,
        precision=precision,
        kv_grad_dtype=kv_grad_dtype,
        wire=wire,
    )
    q, latent, rope_key, up_k, up_v = map(as_autocast, (q, latent, rope_key, up_k, up_v))
    keys = (latent.unsqueeze(1), rope_key.unsqueeze(1))
    inputs = Inputs(q, *keys, key_mask, None, None, cu_seqlens, prefix_len, None, up_k, up_v)
    out = run(inputs, options, None, return_lse=False)
    assert isinstance(out, Tensor)
    return out


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
