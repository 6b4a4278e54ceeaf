"""Attention over a sequence that is sharded over the ranks of a group: the public functions.

Shapes: B batch, H heads, Hkv heads of keys and values, S whole sequence, L positions (T tokens) of
    this rank, D and Dv head dims, C elements of a latent, N of a key without rotation, R of the
    rotated key that all heads share, P ranks of the group.
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
    """The keywords of `ring_attention` that do not change the type of its result."""

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
    """Attention over a sequence that is sharded over the ranks of a group.

    Equal to attention in one process: ``softmax(mask(softcap(scale * q k^T) - slope |i - j| +
    bias)) v`` over the whole sequence, with global positions i and j of queries and keys. A query
    without any key gives zeros, lse -inf and zero gradients. Every rank has to run the backward
    pass as well, because the ranks exchange messages in it.

    Under `torch.autocast`, q, k and v are cast as torch casts the inputs of its own attention.

    NOTE: device-to-host sync, because the ranks first agree on shapes in a message of fixed size.

    Args:
        q: `[B, H, L, D]`, this rank's queries. L follows from `layout`, for any S.
        k: `[B, Hkv, L, D]`; H is a multiple of Hkv.
        v: `[B, Hkv, L, Dv]`.
        group: the P ranks; None is this process alone. A 2-D DeviceMesh ('ring', 'ulysses')
            arranges the ranks in rows. Shards then belong to its ranks in ascending order, which is
            row by row for a mesh of `init_device_mesh`.
        is_causal: if True, a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(D).
        layout: which rank holds which positions, see `make_layout`.
        window: (left, right), the number of keys before and after itself that a query sees; -1 for
            no limit.
        cu_seqlens: offsets `[documents + 1]` of packed documents in the whole sequence, from 0 to
            S. A query sees only keys of its own document. Documents may be empty. If the rows of
            the batch differ, `[B, n]` or B lists with the offsets of each row; then `layout` may
            not be one that follows documents.
        prefix_len: with `is_causal`, the number of positions at the start of each document that
            every query of the document sees, even earlier queries (a prefix LM). An integer for all
            documents; or one for each row of the batch; with `cu_seqlens`, one for each document,
            or B rows with one for each document. Not together with `window`.
        key_mask: `[B, L]` bool, False for those of this rank's keys that no query sees.
        attn_mask: `[B or 1, H or 1, L, S]`, from this rank's queries to all keys in the order of
            the sequence. Either bool, True for seen, or a floating-point bias that is added to the
            scores and gets the gradient of this rank's queries. All other masks still apply. Not
            for schemes that exchange heads, nor if documents differ between rows.
        alibi_slopes: `[H]`; not differentiable.
        softcap: scores become softcap * tanh(score / softcap); None or 0 for no cap.
        sinks: `[H]`, for each head a score that takes part in the softmax without a value. Each
            rank gets the gradient of its own queries, as for any replicated parameter.
        dropout_p: share of the softmax that is dropped. The draws depend on seed, batch, head and
            the two positions, but not on P or the layout.
        seed: seed of the dropout, equal on every rank; None draws one from torch's generator of the
            first rank.
        scheme: "ring", keys and values travel round, and memory stays that of a shard;
            "all_gather", all keys and values are on every rank at once; "ulysses", an all-to-all
            from shards of the sequence to shards of the heads and back, for at least P heads;
            "hybrid", "ulysses" in each row of a mesh and a ring in each column; "double_ring",
            rings in rows with few hops between rows, for a mesh, or for hosts with equally many
            ranks; "auto", the scheme of least cost by its bytes, see `explain_scheme`.
        precision: "exact": blocks are summed up in float32 and rounded once. "fast": 16-bit blocks
            that a kernel of torch supports go to that kernel, and each is rounded. The docs have
            the errors of both.
        kv_grad_dtype: dtype in which dK and dV travel, None for float32 (float64 for float64).
            torch.bfloat16 halves their bytes and rounds at every hop.
        wire: format in which K and V travel, after they are rounded once: "int8", "fp8" or "mx",
            one byte an element and the scales, see `moe_ext.ops.quantize_rows`. A rank rounds its
            own K and V as well, so that results do not depend on P. Gradients are those of the
            rounded K and V, and travel in `kv_grad_dtype`. Not for float64, nor for schemes that
            exchange heads.
        return_lse: if True, return (out, lse).

    Returns:
        `[B, H, L, Dv]` in the dtype of q. With `return_lse` also `[B, H, L]` float32 (float64), the
        log of the sum of the exponentials of all scores; differentiable.

    Raises:
        ValueError: on every rank, if an argument is invalid on any rank or differs between ranks,
            or if lengths do not match the layout.
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
    """Run `ring_attention`, whose arguments are collected in `inputs` and `options`."""
    if is_transformed():
        raise RuntimeError(
            f"{OPERATION}: expected to be called outside of torch.func, got {transforms()}"
        )
    q, k, v = map(as_autocast, (inputs.q, inputs.k, inputs.v))
    inputs = inputs._replace(q=q, k=k, v=v)
    # An error of this rank is sent here. Without an error, the ranks compare in the call itself.
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
    """Cast as `torch.autocast` casts inputs of torch's attention; custom operators are not cast."""
    # Anything else than a floating-point tensor is left for the checks, whose errors are raised on
    # all ranks.
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
    """`ring_attention` of packed documents with the signature of `flash_attn_varlen_func`.

    Tensors hold the tokens that `layout` assigns to this rank. Offsets are in the whole sequence.

    Args:
        q: `[T, H, D]`, this rank's queries.
        k: `[T, Hkv, D]`; H is a multiple of Hkv.
        v: `[T, Hkv, Dv]`.
        cu_seqlens_q: `[documents + 1]`, offsets in the sequence of all ranks.
        cu_seqlens_k: equal to `cu_seqlens_q`, because queries and keys are of the same tokens.
            Under `torch.compile` it has to be the same tensor, since a graph cannot compare values.
        max_seqlen_q: not needed, and not read.
        max_seqlen_k: not needed, and not read.
        dropout_p: share of the softmax that is dropped; pass 0 in evaluation.
        softmax_scale: factor on q k^T; None for 1 / sqrt(D).
        causal: if True, a query sees no key after it.
        window_size: (left, right), -1 for no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
        alibi_slopes: `[H]`.
        group: see `ring_attention`.
        layout: see `make_layout`, with `cu_seqlens_q` for `cu_seqlens`.
        scheme: see `ring_attention`.
        precision: see `ring_attention`.
        prefix_len: number of positions at the start of each document that all its queries see.
        attn_mask: `[H or 1, T, S]`, from this rank's queries to the tokens of all ranks: bool, or a
            differentiable bias. All other masks still apply.
        sinks: `[H]`, see `ring_attention`.
        seed: seed of the dropout.
        wire: format in which `k` and `v` travel, after they are rounded.

    Returns:
        `[T, H, Dv]`.

    Raises:
        ValueError: on every rank, if tensors have another number of dims, offsets of keys and
            queries differ, or `ring_attention` refuses an argument.
        RankFailureError: a rank died or did not answer; the message names it.
    """
    op = "ring_attention_varlen"
    require = requires(op)
    # An error of this rank is sent here. Without an error, the ranks compare in `ring_attention`.
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
    """`ring_attention` for multi-head latent attention, which sends C + R numbers a position.

    The keys of head h are ``[latent @ up_k[h]^T, rope_key]``, its values ``latent @ up_v[h]^T``.
    They have H (N + R + Dv) numbers a position. Each rank computes them from the latents that
    arrive, one shard at a time. Gradients of `latent` and `rope_key` are summed over all heads
    before they travel back. Gradients of `up_k` and `up_v` are those of this rank's queries, as for
    any replicated parameter: sum them over the group.

    A graph of `torch.compile` breaks here.

    Args:
        q: `[B, H, L, N + R]`, the rotated part last.
        latent: `[B, L, C]`, the input of the up-projection, already normalised.
        rope_key: `[B, L, R]`, rotated.
        up_k: `[H, N, C]`.
        up_v: `[H, Dv, C]`.
        group: see `ring_attention`.
        is_causal: if True, a query sees no key after it.
        scale: factor on q k^T; None for 1 / sqrt(N + R).
        layout: see `make_layout`.
        window: (left, right), -1 for no limit.
        cu_seqlens: offsets of packed documents, see `ring_attention`.
        prefix_len: number of positions at the start of each document that all its queries see.
        key_mask: `[B, L]` bool, see `ring_attention`.
        scheme: "ring", "double_ring", "all_gather", or "auto" for the cheapest of these. Schemes
            that exchange heads are refused, because a latent has no heads.
        precision: "exact" or "fast", see `ring_attention`.
        kv_grad_dtype: dtype in which the gradients of `latent` and `rope_key` travel.
        wire: format in which `latent` and `rope_key` travel, after they are rounded.

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

    Every rank has to call it, because the ranks agree on lengths and exchange which ranks share a
    host, as in `ring_attention`. `choose_scheme` gives the same answer from sizes, in one process.

    Returns:
        The choice, equal on every rank. `print` it for a table of all candidates.
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
