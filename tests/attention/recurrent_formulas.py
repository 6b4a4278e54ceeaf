"""Recurrences one position at a time, as their papers write them."""

import torch


def delta_rule(q, k, v, g, beta, state, documents=None):
    """(out, state): q and k of as many heads as v, q scaled."""
    outs = []
    for t in range(q.shape[2]):
        if documents is not None and t > 0:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        decay = g[:, :, t].exp()
        state = state * (decay[..., None] if g.dim() == 4 else decay[..., None, None])
        new = v[:, :, t]
        if beta is not None:
            new = beta[:, :, t, None] * (new - (k[:, :, t, None] @ state)[:, :, 0])
        state = state + k[:, :, t, :, None] * new[:, :, None]
        outs.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(outs, 2), state


def selective_scan(x, dt, A, B, C, D, state, documents=None):
    """(out, state): B and C of as many heads as x, A `[H, K]`."""
    outs = []
    for t in range(x.shape[2]):
        if documents is not None and t > 0:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        step = dt[:, :, t, None]
        new = step.unsqueeze(-1) * B[:, :, t, :, None] * x[:, :, t, None]
        state = (step * A).exp().unsqueeze(-1) * state + new
        outs.append((C[:, :, t, None] @ state)[:, :, 0] + D[:, None] * x[:, :, t])
    return torch.stack(outs, 2), state


def causal_conv(x, weight, bias, documents=None):
    """The convolution of `[B, D, S]`."""
    width, out = weight.shape[1], bias[:, None].expand(x.shape).clone()
    for t in range(x.shape[2]):
        for tap in range(width):
            place = t - width + 1 + tap
            if place < 0:
                continue
            same = 1 if documents is None else (documents[:, place] == documents[:, t])[:, None]
            out[:, :, t] += weight[:, tap] * x[:, :, place] * same
    return out
