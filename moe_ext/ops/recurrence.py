"""Recurrences of states along a sequence, on one device.

`moe_ext.attention` has the functions over the ranks of a group, which call these.

Shape suffixes: B batch, G groups, H heads, L positions, K dim of queries and keys, V dim of values.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ext.ops.autograd import register_derivatives
from moe_ext.ops.fakes import register_fake_like


def gated_delta_rule(
    q_BGLK: Tensor,
    k_BGLK: Tensor,
    v_BHLV: Tensor,
    g_BHL: Tensor,
    beta_BHL: Tensor | None,
    state_BHKV: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Runs a state for each head, which decays, forgets by the delta rule, and takes a value.

    .. math::
        S_t = e^{g_t} (I - \beta_t k_t k_t^T) S_{t-1} + \beta_t k_t v_t^T,\quad y_t = S_t^T q_t

    Without beta it is gated linear attention, :math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T`, as in
    Mamba-2 and lightning attention. The sequence is computed in chunks of at most 64 positions:
    within a chunk by products of matrices, and with the delta rule by a triangular system. The
    state leads from one chunk to the next.

    Args:
        q_BGLK (Tensor[B, G, L, K]): float32 or float64, as all others; already scaled. Rows are not
            copied if their elements are adjacent.
        k_BGLK (Tensor[B, G, L, K]): G divides H; head h reads group h // (H / G).
        v_BHLV (Tensor[B, H, L, V]): values.
        g_BHL (Tensor[B, H, L]): logarithms of decays, finite and not above 0.
        beta_BHL (Tensor[B, H, L]): None for gated linear attention.
        state_BHKV (Tensor[B, H, K, V]): the state before the first position.
        documents (Tensor[B or 1, L]): int64. A position with another number than the one before it
            starts from a state of zeros, and no number of one document reaches another.

    Returns:
        (out, last) (Tensor[B, H, L, V], Tensor[B, H, K, V]): y, and the state after the last
        position. Differentiable once, in all but documents. The inputs are saved, and with beta a
        tensor of the size of v.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads. On CUDA K is at most 256, and 128
    in float64. Does not synchronise the device.

    Reference: Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024 (arXiv 2412.06464), section 3.3,
    equations 10 to 12; Dao, Gu: Transformers are SSMs, 2024 (arXiv 2405.21060), section 6.
    """
    out_BHLV, last_BHKV, _ = torch.ops.moe_ext.gated_delta_rule(
        q_BGLK, k_BGLK, v_BHLV, g_BHL, beta_BHL, state_BHKV, documents
    )
    return out_BHLV, last_BHKV


@torch.library.register_fake("moe_ext::gated_delta_rule")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    news = v.new_empty(0 if beta is None else v.shape)
    return v.new_empty(v.shape), state.new_empty(state.shape), news


register_fake_like("moe_ext::_gated_delta_rule_backward", 2, 3, 4, 5, 6, 7)
_ARGUMENTS = "q, k, v, g, beta, state, documents"
_BACKWARD = f"_gated_delta_rule_backward(grad_out, grad_last, {_ARGUMENTS}, news)"
register_derivatives("gated_delta_rule", {"q, k, v, g, beta, state": _BACKWARD})


def selective_scan(
    x_BHL: Tensor,
    dt_BHL: Tensor,
    A_HK: Tensor,
    B_BGLK: Tensor,
    C_BGLK: Tensor,
    state_BHK: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Mamba's selective state space: a state for each head, whose elements decay each by itself.

    .. math::
        S_{t,k} = e^{dt_t A_k} S_{t-1,k} + dt_t x_t B_{t,k},\quad y_t = \sum_k C_{t,k} S_{t,k}

    Args:
        x_BHL (Tensor[B, H, L]): float32 or float64, as all others; a head is a channel.
        dt_BHL (Tensor[B, H, L]): steps, after softplus.
        A_HK (Tensor[H, K]): rates, not above 0.
        B_BGLK (Tensor[B, G, L, K]): G divides H; head h reads group h // (H / G).
        C_BGLK (Tensor[B, G, L, K]): as B.
        state_BHK (Tensor[B, H, K]): the state before the first position.
        documents (Tensor[B or 1, L]): as `gated_delta_rule`.

    Returns:
        (out, last) (Tensor[B, H, L], Tensor[B, H, K]): y, and the state after the last position.
        Differentiable once, in all but documents. The inputs are saved, and a state for every 64
        positions.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads. On CUDA A has at most 128 columns.
    Does not synchronise the device.

    Reference: Gu, Dao: Mamba, 2023 (arXiv 2312.00752), equation 2.
    """
    out_BHL, last_BHK, _ = torch.ops.moe_ext.selective_scan(
        x_BHL, dt_BHL, A_HK, B_BGLK, C_BGLK, state_BHK, documents
    )
    return out_BHL, last_BHK


@torch.library.register_fake("moe_ext::selective_scan")
def _(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length = x.shape
    states = x.new_empty(batch, heads, (length + 63) // 64, A.shape[1])
    return torch.empty_like(x), state.new_empty(state.shape), states


register_fake_like("moe_ext::_selective_scan_backward", 2, 3, 4, 5, 6, 1, laid_out=2)
register_derivatives(
    "selective_scan",
    {
        "x, dt, A, B, C, state": "_selective_scan_backward("
        "grad_out, grad_last, x, dt, A, B, C, documents, states)"
    },
)


def causal_conv1d(
    x_BDL: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    halo: Tensor,
    documents: Tensor | None = None,
    *,
    silu: bool = False,
) -> Tensor:
    """Depthwise convolution of each position with the W - 1 positions before it.

    `y[d, t] = bias[d] + sum_w weight[d, w] x[d, t - W + 1 + w]` over positions of the document of
    t. With silu the result is `y * sigmoid(y)`.

    Args:
        x_BDL (Tensor[B, D, L]): float32 or float64, as all others, any strides.
        weight_DW (Tensor[D, W]): taps.
        bias_D (Tensor[D]): the bias; None for none.
        halo (Tensor[B, D, W - 1]): the positions before the first one.
        documents (Tensor[B or 1, W - 1 + L]): int64, numbers for the halo and for x. A position
            takes nothing from a position with another number, or with another number in between.
        silu (bool): apply this activation.

    Returns:
        Tensor[B, D, L]. Differentiable once, in all but documents. The inputs are saved.

    Raises:
        RuntimeError: an argument has the wrong device, dtype or shape.

    Deterministic, with the same bits for any number of threads; does not synchronise the device.
    """
    return torch.ops.moe_ext.causal_conv1d(x_BDL, weight_DW, bias_D, halo, documents, silu)


register_fake_like("moe_ext::causal_conv1d", 0, laid_out=1)
register_fake_like("moe_ext::_causal_conv1d_backward", 1, 2, 3, 4, laid_out=1)
register_derivatives(
    "causal_conv1d",
    {
        "x, weight, bias, halo": "_causal_conv1d_backward("
        "grad_result, x, weight, bias, halo, documents, silu)"
    },
)
