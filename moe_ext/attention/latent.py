"""Attention over latents (MLA): the latent travels, and each rank makes keys and values of it.

Shapes: B batch, H heads, L positions of this rank, C of the latent, N of a key without rotation,
    R of the rotated key that all heads share, Dv of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext._compile import outside_graphs
from moe_ext.attention.call import OPERATION, AttentionOptions, Inputs
from moe_ext.attention.functional import as_autocast, run
from moe_ext.attention.layouts import Layout
from moe_ext.attention.masks import Offsets, PrefixLen


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
