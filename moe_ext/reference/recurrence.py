"""Recurrences one position at a time, as their papers write them.

Shape suffixes: B batch, G groups, H heads, L positions, K dim of queries and keys, V dim of values.
"""

import torch
from torch import Tensor


def gated_delta_rule(
    q_BGLK: Tensor,
    k_BGLK: Tensor,
    v_BHLV: Tensor,
    g_BHL: Tensor,
    beta_BHL: Tensor | None,
    state_BHKV: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.gated_delta_rule`; g may be `[B, H, L, K]`, one for each key element."""
    heads = v_BHLV.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q_BGLK, k_BGLK))
    state, outs = state_BHKV, []
    for t in range(v_BHLV.shape[2]):
        decay = g_BHL[:, :, t].exp()
        decay = decay[..., None] if decay.dim() == 3 else decay[..., None, None]
        state = state * _goes_on(documents, t) * decay
        new = v_BHLV[:, :, t]
        if beta_BHL is not None:
            new = beta_BHL[:, :, t, None] * (new - (k[:, :, t, None] @ state)[:, :, 0])
        state = state + k[:, :, t, :, None] * new[:, :, None]
        outs.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(outs, 2), state


def selective_scan(
    x_BHL: Tensor,
    dt_BHL: Tensor,
    A_HK: Tensor,
    B_BGLK: Tensor,
    C_BGLK: Tensor,
    state_BHK: Tensor,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same as `moe_ext.ops.selective_scan`."""
    heads = x_BHL.shape[1]
    of_B, of_C = (x.repeat_interleave(heads // x.shape[1], 1) for x in (B_BGLK, C_BGLK))
    state, outs = state_BHK, []
    for t in range(x_BHL.shape[2]):
        dt = dt_BHL[:, :, t, None]
        state = state * _goes_on(documents, t)[..., 0] * (dt * A_HK).exp()
        state = state + dt * x_BHL[:, :, t, None] * of_B[:, :, t]
        outs.append((state * of_C[:, :, t]).sum(-1))
    return torch.stack(outs, 2), state


def causal_conv1d(
    x_BDL: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    halo: Tensor,
    documents: Tensor | None = None,
    *,
    silu: bool = False,
) -> Tensor:
    """Same as `moe_ext.ops.causal_conv1d`."""
    width, whole = weight_DW.shape[1], torch.cat([halo, x_BDL], 2)
    outs = []
    for t in range(x_BDL.shape[2]):
        rows = whole[:, :, t : t + width]
        if documents is not None:
            numbers = documents[:, t : t + width]
            rows = rows * (numbers == numbers[:, -1:])[:, None]
        outs.append((rows * weight_DW).sum(-1))
    out = torch.stack(outs, 2)
    out = out if bias_D is None else out + bias_D[:, None]
    return out * out.sigmoid() if silu else out


def _goes_on(documents: Tensor | None, t: int) -> Tensor:
    """Return `[B or 1, 1, 1, 1]`: 0 if another document begins at position t, else 1."""
    if documents is None or t == 0:
        return torch.ones(1, 1, 1, 1)
    return (documents[:, t] == documents[:, t - 1]).float()[:, None, None, None]
