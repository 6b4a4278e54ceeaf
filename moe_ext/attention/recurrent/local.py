"""Recurrences over the positions of one process, by our operators or by formulas over chunks.

All functions compute in float32, or in float64 if a tensor has that dtype.

Each head has a state `S [K, V]`. At each position the state decays, may forget by the delta rule,
and takes in the product of a key and a value:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   y_t = S_t^T q_t

Without beta the recurrence is gated linear attention, as in Mamba-2 and lightning attention:
`S_t = exp(g_t) S_{t-1} + k_t v_t^T`. The first position of a document sees no state. A decay by
element of a key is a diagonal matrix: `S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + ...`.

Shapes: B batch, H heads, L positions, K dim of queries and keys, V dim of values, N chunks of C
positions, W taps of a convolution, D channels.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ext import ops
from moe_ext._library import has_cuda
from moe_ext.attention.recurrent.providers import Stretch, as_columns, by_head, of_columns
from moe_ext.ops.autograd import is_transformed

CHUNK = 64


_HAS_CUDA = has_cuda()


def _has_operators(x: Tensor, dim: int = 0, most: int = 0) -> bool:
    """True if an operator supports x and states of `dim` rows, on CUDA at most `most`."""
    # Transforms of torch.func support the formulas only.
    return (x.is_cpu or (x.is_cuda and _HAS_CUDA and dim <= most)) and not is_transformed()


class Scanned(NamedTuple):
    """Result of a recurrence.

    Attributes:
        out: `[B, H, L, V]`.
        state: `[B, H, K, V]` after the last position.
    """

    out: Tensor
    state: Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor | None,
    stretch: Stretch,
) -> Scanned:
    """Run the recurrence over all positions.

    Args:
        q: `[B, G, L, K]`, scaled.
        k: `[B, G, L, K]`; each of G entries is for H / G consecutive heads.
        v: `[B, H, L, V]`.
        g: `[B, H, L]`, logarithms of decays, not above 0; `[B, H, L, K]` by element of a key.
        beta: `[B, H, L]`; None for gated linear attention.
        state: `[B, H, K, V]` before the first position; None for zeros.
        stretch: the positions. Its documents are `[B or 1, L]` int64, ascending numbers, and
            `state` is of the document of the first position.

    Reference: Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024 (arXiv 2412.06464), section 3.3,
        equations 10 to 12; Dao, Gu: Transformers are SSMs, 2024 (arXiv 2405.21060), section 6;
        Kimi Linear, 2025 (arXiv 2510.26692), section 3, for decays by element.
    """
    q, k, v, g, beta, state = _wide(q, k, v, g, beta, state)
    state = begin(state, v, q.shape[3])
    documents = stretch.documents
    most = 128 if v.dtype == torch.float64 else 256
    if g.dim() == 3 and _has_operators(v, q.shape[3], most):
        return Scanned(*ops.gated_delta_rule(q, k, v, g, beta, state, documents))
    q, k = by_head(q, v.shape[1]), by_head(k, v.shape[1])
    length = q.shape[2]
    if length == 0:
        # The results depend on all arguments, so that this rank's backward pass takes part in the
        # exchanges of the other ranks.
        weight = (q * k * (g if g.dim() == 4 else g.unsqueeze(-1))).sum(-1)
        weight = weight if beta is None else weight * beta
        return Scanned(v * weight.unsqueeze(-1) + q @ state, state + (weight.sum() + v.sum()))
    padding = -length % CHUNK
    kept: _Decays | _ElementDecays
    if g.dim() == 4:
        kept = _ElementDecays.of(g, documents, padding)
    else:
        decay = _chunked(g.unsqueeze(-1), padding).squeeze(-1).cumsum(-1)  # [B, H, N, C]
        kept = _Decays.of(decay, documents, padding)
    q, k, v = (_chunked(x, padding) for x in (q, k, v))
    rows, keys = k, v
    scores = kept.scores(q, k)
    reads = q * kept.carried
    if beta is not None:
        step = _chunked(beta.unsqueeze(-1), padding)
        # In the WY form one triangular system gives all updates of a chunk.
        system = kept.scores(step * k, k)
        both = torch.cat([step * v, step * k * kept.carried], -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        keys, rows = solved.split([v.shape[-1], k.shape[-1]], -1)
    writes = (k * kept.to_end).mT
    outs = []
    for n in range(q.shape[2]):
        new = keys[:, :, n]
        if beta is not None:
            new = new - rows[:, :, n] @ state
        outs.append(reads[:, :, n] @ state + scores[:, :, n] @ new)
        state = state * kept.through[:, :, n] + writes[:, :, n] @ new
    return Scanned(torch.cat(outs, 2)[:, :, :length], state)


def begin(state: Tensor | None, v: Tensor, dim: int) -> Tensor:
    """The state `[B, H, dim, V]` before the first position, for values `[B, H, L, V]`."""
    return v.new_zeros(*v.shape[:2], dim, v.shape[3]) if state is None else state


def _wide(*tensors: Tensor | None) -> Any:
    """Convert tensors to float32, or to float64 if any of them has that dtype."""
    dtypes = [torch.float32, *(x.dtype for x in tensors if x is not None)]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [None if x is None else x.to(dtype) for x in tensors]


class _Decays(NamedTuple):
    """Decays between positions of a chunk; 0 if a document begins in between.

    Attributes:
        pairs: `[B, H, N, C, C]`, decay from the position of a column to that of a row.
        carried: `[B, H, N, C, 1]`, decay from before the chunk to a position.
        to_end: `[B, H, N, C, 1]`, decay from a position to the end of the chunk.
        through: `[B, H, N, 1, 1]`, decay over the whole chunk.
    """

    pairs: Tensor
    carried: Tensor
    to_end: Tensor
    through: Tensor

    @classmethod
    def of(cls, decay: Tensor, documents: Tensor | None, padding: int) -> _Decays:
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
        pairs = decay.unsqueeze(-1) - decay.unsqueeze(-2)
        carried, to_end = decay.exp(), (decay[..., -1:] - decay).exp()
        through = carried[..., -1:]
        if documents is not None:
            ids = F.pad(documents, (0, padding), mode="replicate") if padding else documents
            ids = ids.unflatten(1, (-1, CHUNK)).unsqueeze(1)  # [B, 1, N, C]
            ends = ids[..., -1:]
            before = torch.cat([ids[:, :, :1, :1], ends[:, :, :-1]], 2)
            lower = lower & (ids.unsqueeze(-1) == ids.unsqueeze(-2))
            carried = carried * (ids == before)
            to_end = to_end * (ids == ends)
            through = through * (ends == before)
        pairs = pairs.masked_fill(~lower, -torch.inf).exp()
        return cls(pairs, carried.unsqueeze(-1), to_end.unsqueeze(-1), through.unsqueeze(-1))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """`[B, H, N, C, C]`, products of rows q and columns k, times the decay between them."""
        return q @ k.mT * self.pairs


class _ElementDecays(NamedTuple):
    """As `_Decays`, by element of a key.

    No exponential overflows, because every exponent is a sum of logarithms that are not above 0.

    Attributes:
        steps: `[B, H, N, C, K]`, logarithm of the decay from the position before to each position.
        carried: `[B, H, N, C, K]`, decay from before the chunk to a position.
        to_end: `[B, H, N, C, K]`, decay from a position to the end of the chunk.
        through: `[B, H, N, K, 1]`, decay over the whole chunk.
    """

    steps: Tensor
    carried: Tensor
    to_end: Tensor
    through: Tensor

    @classmethod
    def of(cls, g: Tensor, documents: Tensor | None, padding: int) -> _ElementDecays:
        steps = _chunked(_forgetting(g, documents), padding)
        carried = steps.cumsum(-2).exp()
        return cls(steps, carried, _behind(steps).exp(), carried[..., -1, :, None])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """As `_Decays.scores`, from pairs of neighbouring stretches of 1, 2, 4, ... positions.

        Decays by element are inside the product over elements. They are therefore split at the
        edge between the stretches: rows decay from the edge, and columns up to the edge.
        """
        found, size = (q * k).sum(-1)[..., None, None], 1
        while size < CHUNK:
            early, late = slice(0, size), slice(size, 2 * size)
            q_s, k_s, steps = (x.unflatten(-2, (-1, 2 * size)) for x in (q, k, self.steps))
            rows = q_s[..., late, :] * steps[..., late, :].cumsum(-2).exp()
            columns = k_s[..., early, :] * _behind(steps[..., early, :]).exp()
            first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
            above = torch.cat([first, torch.zeros_like(first)], -1)
            found = torch.cat([above, torch.cat([rows @ columns.mT, second], -1)], -2)
            size *= 2
        return found.squeeze(-3)


def _behind(steps: Tensor) -> Tensor:
    """Sum of the logarithms after each position, `[..., C, K]`."""
    return F.pad(steps[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _forgetting(decay: Tensor, documents: Tensor | None) -> Tensor:
    """Logarithms `[B, H, L, K]`, set to -inf at the beginning of a document."""
    if documents is None:
        return decay
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return decay.masked_fill(starts[:, None, :, None], -torch.inf)


def _chunked(x: Tensor, padding: int) -> Tensor:
    """Cut `[B, H, L, ...]` into chunks `[B, H, N, C, ...]`, padded with zeros."""
    return F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    stretch: Stretch,
) -> Scanned:
    """Run a recurrence whose states decay: `S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T`.

    Args:
        x: `[B, H, L, V]`.
        dt: `[B, H, L]`.
        A: `[H, 1 or K]`, not above 0, a rate for each head or for each element.
        B: `[B, G, L, K]`; each of G entries is for H / G consecutive heads.
        C: `[B, G, L, K]`; outputs are `S_t^T C_t`.
        state: `[B, H, K, V]` before the first position; None for zeros.
        stretch: as in `delta_rule`.

    Reference: Gu, Dao: Mamba, 2023 (arXiv 2312.00752), equation 2.
    """
    x, dt, A, B, C, state = _wide(x, dt, A, B, C, state)
    step = dt.unsqueeze(-1)
    if A.shape[1] == 1:
        return delta_rule(C, B, x * step, dt * A, None, state, stretch)
    state = begin(state, x, A.shape[1])
    if _has_operators(x, A.shape[1], 128):
        found = state.mT.flatten(1, 2)
        scanned = ops.selective_scan(*as_columns(x, dt, A), B, C, found, stretch.documents)
        return Scanned(*(of_columns(t, x.shape[3]) for t in scanned))
    return diagonal_scan(C, B, x * step, step * A[:, None], state, stretch.documents)


def diagonal_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None,
    documents: Tensor | None,
) -> Scanned:
    """Run a recurrence whose states decay by element: `S_t = exp(decay_t) S_{t-1} + k_t v_t^T`.

    Args:
        q: `[B, G, L, K]`; each of G entries is for H / G consecutive heads.
        k: `[B, G, L, K]`.
        v: `[B, H, L, V]`.
        decay: `[B, H, L, K]`, logarithms, not above 0.
        state: `[B, H, K, V]` before the first position; None for zeros.
        documents: as in `delta_rule`.
    """
    q, k, v, decay, state = _wide(q, k, v, decay, state)
    state = begin(state, v, q.shape[3])
    q, k, length = by_head(q, v.shape[1]), by_head(k, v.shape[1]), v.shape[2]
    if length == 0:
        weight = (q * k * decay).sum(-1, keepdim=True)
        return Scanned(v * weight + q @ state, state + (weight.sum() + v.sum()))
    decay = _forgetting(decay, documents)
    # The positions are cut into sqrt(L) stretches. The first loop runs through the positions of all
    # stretches at once, and the second loop carries the state from stretch to stretch.
    size = math.isqrt(length - 1) + 1
    q_N, k_N, v_N, decay_N = (
        F.pad(x, (0, 0, 0, -length % size)).unflatten(2, (-1, size)) for x in (q, k, v, decay)
    )
    kept = decay_N.exp()
    inner, own = torch.zeros_like(k_N[:, :, :, 0, :, None] * v_N[:, :, :, 0, None]), []
    for t in range(size):
        new = k_N[:, :, :, t, :, None] * v_N[:, :, :, t, None]
        inner = kept[:, :, :, t, :, None] * inner + new
        own.append((q_N[:, :, :, t, None] @ inner)[:, :, :, 0])
    powers = kept.cumprod(3)
    read, states = q_N * powers, []
    for n in range(kept.shape[2]):
        states.append(state)
        state = powers[:, :, n, -1, :, None] * state + inner[:, :, n]
    out = torch.stack(own, 3) + read @ torch.stack(states, 2)
    return Scanned(out.flatten(2, 3)[:, :, :length], state)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    halo: Tensor | None,
    stretch: Stretch,
    silu: bool,
) -> Tensor:
    """Depthwise causal convolution.

    `y[d, t] = sum_w weight[d, w] x[d, t - W + 1 + w]`, over positions of the document of t.

    Args:
        x: `[B, D, L]`.
        weight: `[D, W]`.
        bias: `[D]` or None.
        halo: `[B, D, W - 1]`, the positions before x; None for zeros.
        stretch: the positions of halo and x, with documents `[B or 1, W - 1 + L]`.
        silu: if True, SiLU is applied to the result.
    """
    x, weight, bias, halo = _wide(x, weight, bias, halo)
    if halo is None:
        halo = x.new_zeros(*x.shape[:2], weight.shape[1] - 1)
    if _has_operators(x):
        return ops.causal_conv1d(x, weight, bias, halo, stretch.documents, silu=silu)
    out = _convolved(x, weight, bias, halo, stretch.documents)
    return F.silu(out) if silu else out


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, halo: Tensor, documents: Tensor | None
) -> Tensor:
    width, length, whole = weight.shape[1], x.shape[2], torch.cat([halo, x], 2)
    if documents is None and length > 0:
        return F.conv1d(whole, weight.unsqueeze(1), bias, groups=len(weight))
    if documents is None:
        documents = torch.zeros(1, width - 1, dtype=torch.int64, device=x.device)
    own = documents[:, width - 1 :]
    out = whole.new_zeros(x.shape) if bias is None else bias[:, None].expand(x.shape)
    for tap in range(width):
        same = (documents[:, tap : tap + length] == own).unsqueeze(1)
        out = out + weight[:, tap, None] * (whole[..., tap : tap + length] * same)
    return out
