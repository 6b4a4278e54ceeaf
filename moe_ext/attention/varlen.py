"""`ring_attention` of packed tokens, by the arguments of the kernels for documents of any length.

Shapes: T tokens of this rank, S tokens of all ranks, H heads, Hkv heads of keys and values, D and
    Dv head dims.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.attention.call import AttentionOptions
from moe_ext.attention.checks import message_device, requires
from moe_ext.attention.functional import ring_attention
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import PrefixLen
from moe_ext.comm.agreement import Agreement

OPERATION = "ring_attention_varlen"
_require = requires(OPERATION)


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
    ranks = AttentionOptions.of(group, OPERATION).group
    # Without an error `ring_attention` compares.
    with Agreement(OPERATION, ranks, message_device(q, k, v)):
        for name, x in (("q", q), ("k", k), ("v", v)):
            fits = isinstance(x, Tensor) and x.dim() == 3
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            _require(fits, name, "packed tokens [T, heads, dim] of this rank", found)
        one_row = isinstance(cu_seqlens_q, Tensor) and cu_seqlens_q.dim() == 1
        _require(one_row, "cu_seqlens_q", "a tensor of integers [documents + 1]", cu_seqlens_q)
        if attn_mask is not None:
            fits = isinstance(attn_mask, Tensor) and attn_mask.dim() == 3
            found = list(attn_mask.shape) if isinstance(attn_mask, Tensor) else attn_mask
            _require(fits, "attn_mask", "a tensor [H or 1, T, S]", found)
        same = cu_seqlens_k is cu_seqlens_q or torch.equal(cu_seqlens_k, cu_seqlens_q)
        _require(same, "cu_seqlens_k", "equal to cu_seqlens_q", cu_seqlens_k)
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
