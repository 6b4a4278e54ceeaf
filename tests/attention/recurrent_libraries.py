"""Stand-ins for flash-linear-attention, mamba-ssm and causal-conv1d, of the formulas.

Their signatures, without the arguments that are not passed, and what they refuse are those of
flash-linear-attention 0.5, mamba-ssm 2.3 and causal-conv1d 1.6.
"""

import contextlib
import functools
import sys
import types
from unittest import mock

import torch

from moe_ext import reference
from moe_ext.attention.recurrent import providers

calls = []


def documents_of(cu_seqlens, length):
    return torch.bucketize(torch.arange(length), cu_seqlens, right=True)[None] - 1


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    calls.append(("gated_delta_rule", q))
    assert q.shape == k.shape and q.shape[:2] == v.shape[:2]
    assert v.shape[2] % q.shape[2] == 0 and q.shape[3] <= 256 and g.shape == beta.shape
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert initial_state is None or initial_state.dtype == torch.float32
    if cu_seqlens is not None:
        assert cu_seqlens.dtype == torch.int64 and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert len(q) == 1 and cu_seqlens[-1] == q.shape[1] and (cu_seqlens.diff() > 0).all()
        assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    offsets = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, states = [], []
    for n, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
        rows = [x[:, a:b].transpose(1, 2).double() for x in (q * scale, k, v, g, beta)]
        begin = rows[2].new_zeros(len(q), v.shape[2], k.shape[3], v.shape[3])
        if initial_state is not None:
            begin = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        out, state = reference.gated_delta_rule(*rows, begin.double(), None)
        outs.append(out.transpose(1, 2))
        states.append(state)
    last = torch.cat(states).float() if output_final_state else None
    return torch.cat(outs, 1).to(q.dtype), last


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    return_final_states=False,
):
    calls.append(("selective_scan", x))
    assert A.shape == dt.shape[2:] and B.shape == C.shape and x.dtype == B.dtype == C.dtype
    assert chunk_size & (chunk_size - 1) == 0 and A.dtype == dt.dtype == torch.float32
    begin = torch.zeros(len(x), *x.shape[2:], B.shape[3], dtype=torch.float64)
    if initial_states is not None:
        assert initial_states.shape == begin.shape
        begin = initial_states.double()
    if seq_idx is not None:
        assert seq_idx.shape == x.shape[:2] and seq_idx.dtype == torch.int32
        # A state to begin with is that of the number 0.
        begin = begin * (seq_idx[:, :1, None, None] == 0)
        seq_idx = seq_idx.long()
    steps = dt.transpose(1, 2).double()
    values = x.transpose(1, 2).double() * steps.unsqueeze(-1)
    rows = [each.transpose(1, 2).double() for each in (C, B)]
    rows += [values, steps * A.double()[:, None], None, begin.mT]
    out, last = reference.gated_delta_rule(*rows, seq_idx)
    out = out.transpose(1, 2).to(x.dtype)
    return (out, last.mT.float()) if return_final_states else out


class _Scan(torch.autograd.Function):
    """As the original, it gives no gradient to its last state."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C):
        with torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_() for x in (u, delta, A, B, C)]
            rows = [x.double() for x in ctx.leaves]
            begin = rows[0].new_zeros(*u.shape[:2], A.shape[1])
            ctx.out, last = reference.selective_scan(*rows[:3], rows[3].mT, rows[4].mT, begin, None)
        return ctx.out.detach().to(u.dtype), last.detach().float()

    @staticmethod
    def backward(ctx, grad, _):
        return torch.autograd.grad(ctx.out, ctx.leaves, grad.double())


def selective_scan_fn(u, delta, A, B, C, return_last_state=False):
    calls.append(("selective_scan by element", u))
    assert u.dtype == delta.dtype == B.dtype == C.dtype and A.dtype == torch.float32
    assert u.shape == delta.shape and A.shape[0] == u.shape[1] and A.shape[1] <= 256
    assert B.shape == C.shape == (len(u), B.shape[1], A.shape[1], u.shape[2])
    out, last = _Scan.apply(u, delta, A, B, C)
    return (out, last) if return_last_state else out


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    calls.append(("causal_conv1d", x))
    assert 2 <= weight.shape[1] <= 4 and activation in (None, "silu", "swish")
    assert x.stride(2) == 1 or x.stride(1) == 1
    if x.stride(1) == 1 and x.stride(2) > 1:
        assert x.shape[1] % 8 == x.stride(2) % 8 == x.stride(0) % 8 == 0
    assert bias is None or bias.dtype == weight.dtype
    halo = torch.zeros(*x.shape[:2], weight.shape[1] - 1, dtype=torch.float64)
    if seq_idx is not None:
        assert x.stride(1) == 1 and seq_idx.is_contiguous()
        assert seq_idx.shape == (len(x), x.shape[2]) and seq_idx.dtype == torch.int32
        assert seq_idx.min() >= 0
        before = seq_idx.new_full((len(x), weight.shape[1] - 1), -1)
        seq_idx = torch.cat([before, seq_idx], 1).long()
    given = [None if t is None else t.double() for t in (x, weight, bias)]
    out = reference.causal_conv1d(*given, halo, seq_idx)
    out = out if activation is None else torch.nn.functional.silu(out)
    return out.to(x.dtype)


FUNCTIONS = {
    "gated_delta_rule": chunk_gated_delta_rule,
    "selective_scan": mamba_chunk_scan_combined,
    "selective_scan by element": selective_scan_fn,
    "causal_conv1d": causal_conv1d_fn,
}


@contextlib.contextmanager
def installed(**others):
    """The libraries as if they were there, and CPU tensors as if they were on CUDA.

    Args:
        others: functions in the place of some of `FUNCTIONS`, with _ for spaces.
    """
    others = {name.replace("_by_element", " by element"): f for name, f in others.items()}
    modules = {}
    for operator, function in {**FUNCTIONS, **others}.items():
        provider = providers.PROVIDERS[operator]
        top = provider.module.partition(".")[0]
        modules.setdefault(top, types.ModuleType(top))
        module = modules.setdefault(provider.module, types.ModuleType(provider.module))
        if function is not None:
            setattr(module, provider.function, function)
    calls.clear()
    load = functools.cache(providers.load.__wrapped__)
    fresh = {"load": load, "faults": {}, "CHOSEN": "auto", "on_cuda": lambda x: True}
    with mock.patch.dict(sys.modules, modules), mock.patch.multiple(providers, **fresh):
        yield calls
