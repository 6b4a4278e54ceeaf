"""Attention of a block of queries over a block of keys, and the merge of such partial results.

Shape suffixes: B batch, H heads, G key heads, Q queries, K keys, D head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from moe_ext.ops.autograd import once_differentiable, register_autograd, register_derivatives
from moe_ext.ops.fakes import acc_dtype, register_fake_like


def attention_block(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    q_positions_Q: Tensor,
    k_positions_K: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Attends from queries to keys that lie anywhere in a longer sequence.

    With i and j the global positions of a query and a key,

    .. math::
        s_{ij} = c \tanh(\text{scale}\, q_i \cdot k_j / c) - \text{slope}_h |i - j| + b_{ij}, \quad
        lse_i = \log \sum_j e^{s_{ij}}, \quad out_i = \sum_j e^{s_{ij} - lse_i} v_j

    over the keys that the query sees. Every mask is a rule about global positions. Blocks may
    therefore be cut anywhere and in any order, and `merge_attention` of their results gives the
    attention over all keys.

    Args:
        q_BHQD (Tensor[B, H, Sq, Dk]): float32, float64, bfloat16 or float16, any strides.
        k_BGKD (Tensor[B, Hkv, Sk, Dk]): Hkv divides H; query head h uses key head h // (H / Hkv).
        v_BGKD (Tensor[B, Hkv, Sk, Dv]): Dv may differ from Dk.
        q_positions_Q (Tensor[Sq]): int64, global positions in [0, 2^31 - 2), in any order.
        k_positions_K (Tensor[Sk]): the same for the keys.
        scale (float): factor of the products; 1 / sqrt(Dk) by default.
        causal (bool): a query sees no key of a larger position.
        window_left (int): a query sees keys back to i - window_left; -1 for no limit.
        window_right (int): a query sees keys up to i + window_right; -1 for no limit.
        q_documents (Tensor[Sq]): int64, the number of each query's document, as `document_ids`
            gives it. A query sees only keys of its own document.
        k_documents (Tensor[Sk]): the same for the keys; given with q_documents or not at all.
        key_mask (Tensor[B, Sk]): bool, True for keys that may be seen.
        alibi_slopes (Tensor[H]): any floating dtype; not differentiable.
        bias (Tensor[B or 1, H or 1, Sq, Sk]): b, any floating dtype; -inf hides a key. Its gradient
            takes memory of [B, H, Sq, Sk] in the dtype of the results.
        softcap (float): c; 0 for none.
        dropout_p (float): probability p in [0, 1) that a number of the softmax becomes 0; other
            numbers are divided by 1 - p. The choice depends on seed, b, h, i and j alone, and not
            on how a sequence is cut. The LSE is that without dropout.
        seed (int or Tensor[1]): int64, on the device of q; needed with dropout.
        batch_offset (int): number of this block's first sequence in the batch; for dropout alone.
        head_offset (int): number of this block's first head; for dropout alone.

    Returns:
        (out, lse) (Tensor[B, H, Sq, Dv], Tensor[B, H, Sq]): float32, or float64 for float64 inputs.
        A query that sees no key has out 0, lse -inf and no gradient. Both results are
        differentiable once, with respect to q, k, v and bias. Gradients are summed in the dtype of
        the results and rounded once. The inputs and the results are saved, never the scores.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.
        ValueError: alibi_slopes wants a gradient.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.

    Reference: Dao, FlashAttention-2, 2023 (arXiv 2307.08691), algorithms 1 and 2; Press et al.,
    ALiBi, 2021 (arXiv 2108.12409).
    """
    options = _options(
        q_BHQD, scale, causal, window_left, window_right, softcap, dropout_p, batch_offset
    )
    return torch.ops.moe_ext.attention_block(
        q_BHQD,
        k_BGKD,
        v_BGKD,
        q_positions_Q,
        k_positions_K,
        q_documents,
        k_documents,
        key_mask,
        _constant(alibi_slopes),
        bias,
        _seed(seed, q_BHQD),
        *options,
        head_offset,
    )


def attention_block_(
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    q_positions_Q: Tensor,
    k_positions_K: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
) -> None:
    """Adds a block of keys to a result, in place: `merge_attention` without a second output.

    Args:
        out_BHQD (Tensor[B, H, Sq, Dv]): float32 (float64 for float64 inputs), contiguous; the
            output over the keys so far.
        lse_BHQ (Tensor[B, H, Sq]): as out; the LSE over the keys so far. It is -inf for a query
            that has seen no key, whose row of out is not read.
        q_BHQD (Tensor[B, H, Sq, Dk]): this and all other arguments as in `attention_block`.
        k_BGKD (Tensor[B, Hkv, Sk, Dk]): keys.
        v_BGKD (Tensor[B, Hkv, Sk, Dv]): values.
        q_positions_Q (Tensor[Sq]): global positions of the queries.
        k_positions_K (Tensor[Sk]): global positions of the keys.
        scale (float): factor of the products.
        causal (bool): no key of a larger position is seen.
        window_left (int): positions seen to the left, or -1.
        window_right (int): positions seen to the right, or -1.
        q_documents (Tensor[Sq]): documents of the queries.
        k_documents (Tensor[Sk]): documents of the keys.
        key_mask (Tensor[B, Sk]): True for keys that may be seen.
        alibi_slopes (Tensor[H]): slopes of the bias by distance.
        bias (Tensor[B or 1, H or 1, Sq, Sk]): added to the scores.
        softcap (float): 0 for none.
        dropout_p (float): in [0, 1).
        seed (int or Tensor[1]): needed with dropout.
        batch_offset (int): number of the first sequence.
        head_offset (int): number of the first head.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value; nothing has changed.

    Not differentiable: functions that call it make a backward pass of their own by
    `attention_block_backward`.
    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    options = _options(
        q_BHQD, scale, causal, window_left, window_right, softcap, dropout_p, batch_offset
    )
    torch.ops.moe_ext.attention_block_(
        out_BHQD,
        lse_BHQ,
        q_BHQD,
        k_BGKD,
        v_BGKD,
        q_positions_Q,
        k_positions_K,
        q_documents,
        k_documents,
        key_mask,
        _constant(alibi_slopes),
        bias,
        _seed(seed, q_BHQD),
        *options,
        head_offset,
    )
    torch.autograd.graph.increment_version([out_BHQD, lse_BHQ])


def attention_block_backward(
    grad_out_BHQD: Tensor,
    lse_BHQ: Tensor,
    delta_BHQ: Tensor,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    q_positions_Q: Tensor,
    k_positions_K: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
    needs_grad_bias: bool = True,
) -> tuple[Tensor, ...]:
    """Computes a block's share of the gradients of a result that was merged from blocks.

    Args:
        grad_out_BHQD (Tensor[B, H, Sq, Dv]): float32 (float64 for float64 inputs), gradient of the
            merged output.
        lse_BHQ (Tensor[B, H, Sq]): the merged LSE.
        delta_BHQ (Tensor[B, H, Sq]): `attention_delta` of the merged output.
        q_BHQD (Tensor[B, H, Sq, Dk]): this and all other arguments as in `attention_block`.
        k_BGKD (Tensor[B, Hkv, Sk, Dk]): keys.
        v_BGKD (Tensor[B, Hkv, Sk, Dv]): values.
        q_positions_Q (Tensor[Sq]): global positions of the queries.
        k_positions_K (Tensor[Sk]): global positions of the keys.
        scale (float): factor of the products.
        causal (bool): no key of a larger position is seen.
        window_left (int): positions seen to the left, or -1.
        window_right (int): positions seen to the right, or -1.
        q_documents (Tensor[Sq]): documents of the queries.
        k_documents (Tensor[Sk]): documents of the keys.
        key_mask (Tensor[B, Sk]): True for keys that may be seen.
        alibi_slopes (Tensor[H]): slopes of the bias by distance.
        bias (Tensor[B or 1, H or 1, Sq, Sk]): added to the scores.
        softcap (float): 0 for none.
        dropout_p (float): in [0, 1).
        seed (int or Tensor[1]): needed with dropout.
        batch_offset (int): number of the first sequence.
        head_offset (int): number of the first head.
        needs_grad_bias (bool): False to leave out the gradient of the bias.

    Returns:
        (grad_q, grad_k, grad_v): of the shapes of q, k and v; float32, or float64 for float64
        inputs, so that sums over blocks can be taken before anything is rounded. If the gradient of
        a bias is needed, it comes fourth, in the shape of the bias.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or value.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    options = _options(
        q_BHQD, scale, causal, window_left, window_right, softcap, dropout_p, batch_offset
    )
    *grads, grad_bias = torch.ops.moe_ext.attention_block_backward(
        grad_out_BHQD,
        lse_BHQ,
        delta_BHQ,
        q_BHQD,
        k_BGKD,
        v_BGKD,
        q_positions_Q,
        k_positions_K,
        q_documents,
        k_documents,
        key_mask,
        _constant(alibi_slopes),
        bias,
        _seed(seed, q_BHQD),
        *options,
        head_offset,
        needs_grad_bias,
    )
    return tuple(grads) if bias is None or not needs_grad_bias else (*grads, _like(grad_bias, bias))


def attention_delta(
    grad_out_BHQD: Tensor, out_BHQD: Tensor, grad_lse_BHQ: Tensor | None = None
) -> Tensor:
    r"""Computes :math:`\delta_i = dout_i \cdot out_i - dlse_i`, which a backward pass subtracts.

    Args:
        grad_out_BHQD (Tensor[B, H, S, D]): float32 or float64.
        out_BHQD (Tensor[B, H, S, D]): of the same dtype.
        grad_lse_BHQ (Tensor[B, H, S]): of the same dtype; None stands for zeros.

    Returns:
        Tensor[B, H, S]: of the same dtype. Not differentiable.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    return torch.ops.moe_ext.attention_delta(grad_out_BHQD, out_BHQD, grad_lse_BHQ)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Merges the attention over two sets of keys into that over both.

    .. math::
        lse = \log(e^{lse_a} + e^{lse_b}), \quad out = e^{lse_a - lse} out_a + e^{lse_b - lse} out_b

    A row that saw no key has weight 0, and its output is not read. The LSE of such a row is -inf
    here and in torch's flex attention, and +inf in FlashAttention. An LSE of either kind may be
    given, and the result has -inf.
    torch's fused kernel on CPU writes an LSE of 0 for such rows. Set it to -inf before the call,
    because rows with keys may also have an LSE of 0.

    Args:
        out_a (Tensor[..., D]): float32, float64, bfloat16 or float16.
        lse_a (Tensor[...]): float32, or float64 for float64 outputs.
        out_b (Tensor[..., D]): as out_a. Its dtype may be another, but float64 goes with float64.
        lse_b (Tensor[...]): as lse_a.

    Returns:
        (out, lse) (Tensor[..., D], Tensor[...]): in the dtype of the LSE. A row that is empty in
        both has out 0 and lse -inf. NaN in an LSE propagates. Differentiable once, in all four.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    return torch.ops.moe_ext.merge_attention(out_a, lse_a, out_b, lse_b)


def merge_attention_(
    out_BHQD: Tensor, lse_BHQ: Tensor, out_b_BHQD: Tensor, lse_b_BHQ: Tensor
) -> None:
    """Merges a result into another one, in place and in one pass; see `merge_attention`.

    Args:
        out_BHQD (Tensor[B, H, Sq, D]): float32 or float64; the output over the keys so far. Any
            view with adjacent columns.
        lse_BHQ (Tensor[B, H, Sq]): of the dtype of out, any view. It is -inf for a query that has
            seen no key, whose row of out is not read.
        out_b_BHQD (Tensor[B, H, Sq, D]): the result to merge; float64 with float64, else float32,
            bfloat16 or float16. It is not copied if its columns are adjacent.
        lse_b_BHQ (Tensor[B, H, Sq]): of the dtype of lse_BHQ, any view.

    Raises:
        RuntimeError: an argument has the wrong device, dtype, shape or strides; nothing has
            changed.

    Not differentiable. Deterministic, with the same bits for any number of threads; does not
    synchronise the device.
    """
    torch.ops.moe_ext.merge_attention_(out_BHQD, lse_BHQ, out_b_BHQD, lse_b_BHQ)
    torch.autograd.graph.increment_version([out_BHQD, lse_BHQ])


def merge_attention_sinks(
    out_BHQD: Tensor, lse_BHQ: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds attention sinks: for each head a key of value 0 that all queries see, with a logit.

    Call it once, on the result over all keys.

    Args:
        out_BHQD (Tensor[B, H, Sq, D]): as `merge_attention`.
        lse_BHQ (Tensor[B, H, Sq]): as `merge_attention`.
        sinks_H (Tensor[H]): any floating dtype; a logit of -inf is no sink.

    Returns:
        (out, lse): as `merge_attention`. A row without keys has out 0, and the sink as its lse.
        Differentiable once, in all three.

    Raises:
        ValueError: sinks_H does not hold one number for each head.
        RuntimeError: another argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    if lse_BHQ.dim() != 3 or sinks_H.shape != (lse_BHQ.shape[1],):
        raise ValueError(
            "merge_attention_sinks: expected sinks_H to hold a number for each head of lse_BHQ, "
            f"got shapes {list(sinks_H.shape)} and {list(lse_BHQ.shape)}"
        )
    sinks_BHQ = sinks_H.to(lse_BHQ.dtype)[:, None].expand(lse_BHQ.shape)
    return torch.ops.moe_ext.merge_attention(out_BHQD, lse_BHQ, None, sinks_BHQ)


def document_ids(positions_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Finds the document of each position of a packed sequence.

    Args:
        positions_S (Tensor[S]): int64, global positions.
        cu_seqlens (Tensor[N + 1]): int32 or int64, the begins of the documents, and the end of the
            last; not decreasing. A document may be empty.

    Returns:
        Tensor[S]: int64, n for positions in [cu_seqlens[n], cu_seqlens[n + 1]). Positions before
        and after all documents form one more document on each side.

    Does not synchronise the device.
    """
    starts = cu_seqlens.to(device=positions_S.device, dtype=positions_S.dtype).contiguous()
    return torch.searchsorted(starts, positions_S.contiguous(), right=True) - 1


def _options(
    q: Tensor,
    scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    batch_offset: int,
) -> tuple[float, bool, int, int, float, float, int]:
    """Return the numbers of a block in the order of the operators' arguments."""
    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[-1], 1)) if q.dim() else 1.0
    return scale, causal, window_left, window_right, softcap, dropout_p, batch_offset


def _seed(seed: int | Tensor | None, q: Tensor) -> Tensor | None:
    if seed is None or isinstance(seed, Tensor):
        return seed
    return torch.tensor([seed], dtype=torch.int64, device=q.device)


def _constant(alibi_slopes: Tensor | None) -> Tensor | None:
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "attention_block: expected alibi_slopes not to require a gradient, got a tensor that "
            "does; detach it"
        )
    return alibi_slopes


def _like(grad: Tensor, bias: Tensor) -> Tensor:
    """Sum the gradient `[B, H, Sq, Sk]` of a bias over sequences and heads that share the bias."""
    shared = [dim for dim in (0, 1) if bias.shape[dim] == 1 and grad.shape[dim] != 1]
    return grad.sum(shared, keepdim=True) if shared else grad


@torch.library.register_fake("moe_ext::attention_block")
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=acc_dtype(q.dtype))
    return lse.new_empty((*q.shape[:3], v.shape[3])), lse


register_fake_like("moe_ext::attention_block_")


@torch.library.register_fake("moe_ext::attention_block_backward")
def _(
    grad_out: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = acc_dtype(q.dtype)
    grad_q, grad_k, grad_v = (t.new_empty(t.shape, dtype=dtype) for t in (q, k, v))
    wanted = rest[_BIAS - 3] is not None and rest[-1]
    shape = (*q.shape[:3], k.shape[2]) if wanted else (0,)
    return grad_q, grad_k, grad_v, q.new_empty(shape, dtype=dtype)


@torch.library.register_fake("moe_ext::attention_delta")
def _(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    return grad_out.new_empty(grad_out.shape[:-1])


# Place of the bias among the arguments of `attention_block`; the seed follows it.
_BIAS = 9


def _block_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, seed = inputs[: _BIAS + 2]
    ctx.options = inputs[_BIAS + 2 :]
    # The seed is copied, because the caller may write that of the next step before this backward
    # pass.
    ctx.save_for_backward(*tensors, None if seed is None else seed.clone(), *output)


_block_gradient = once_differentiable("moe_ext::attention_block_backward")


def _block_backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    with torch.no_grad():
        delta = torch.ops.moe_ext.attention_delta(grad_out, out, grad_lse)
    needs, bias = ctx.needs_input_grad, inputs[_BIAS]
    *grads, grad_bias = _block_gradient(
        grad_out, lse, delta, *inputs, *ctx.options, bool(needs[_BIAS])
    )
    rounded = [
        grad.to(x.dtype) if need else None
        for grad, x, need in zip(grads, inputs[:3], needs[:3], strict=True)
    ]
    of_bias = _like(grad_bias, bias).to(bias.dtype) if needs[_BIAS] else None
    return (*rounded, *([None] * (_BIAS - 3)), of_bias, *([None] * (1 + len(ctx.options))))


register_autograd("moe_ext::attention_block", _block_backward, setup_context=_block_setup_context)


@torch.library.register_fake("moe_ext::merge_attention")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor | None, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape, dtype=lse_a.dtype), lse_a.new_empty(lse_a.shape)


register_fake_like("moe_ext::merge_attention_")


register_fake_like("moe_ext::_merge_attention_backward", 2, 3, 4, 5)
register_derivatives(
    "merge_attention",
    {
        "out_a, lse_a, out_b, lse_b": "_merge_attention_backward(grad_out, grad_lse, out_a, lse_a, "
        "out_b, lse_b)"
    },
)
