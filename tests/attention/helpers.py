"""Attention of one process by the formula, and cases that ranks and one process both compute."""

import torch
import torch.distributed as dist

from moe_ext.attention import ring_attention, shard_sequence, unshard_sequence
from moe_ext.attention.layouts import ranks_of

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def group():
    """All ranks; None in one process."""
    return dist.group.WORLD if dist.is_initialized() else None


def leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def with_grads(function, *inputs, **options):
    """The result of a function and the gradients of its inputs; the last one is that of it."""
    *tensors, grad = inputs
    tensors = leaves(tensors)
    out = function(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def visible(seq_len, is_causal=False, window=None, cu_seqlens=None, prefix_len=None):
    """[S, S] bool, row = query; [B, 1, S, S] for prefixes of each row."""
    distance = torch.arange(seq_len)[None, :] - torch.arange(seq_len)[:, None]
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if is_causal:
        seen &= distance <= 0
    if prefix_len is not None:
        offsets = torch.tensor([0, seq_len] if cu_seqlens is None else cu_seqlens)
        starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
        lens = torch.as_tensor(prefix_len)
        if lens.dim() < 2:
            lens = lens.view(-1, 1) if cu_seqlens is None else lens.expand(1, len(offsets) - 1)
        lens = torch.repeat_interleave(lens, offsets.diff(), 1)
        seen = seen | (torch.arange(seq_len) - starts < lens)[:, None, None, :]
    left, right = window or (-1, -1)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    if cu_seqlens is not None:
        lengths = torch.tensor(cu_seqlens).diff()
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        seen = seen & (document[:, None] == document[None, :])
    return seen


def seen_by(mask, seq_len):
    """The same of a `Mask` that is that of every row."""
    lens = mask.prefix_lens and mask.prefix_lens[0]
    seen = visible(seq_len, mask.is_causal, (mask.left, mask.right), mask.cu_seqlens, lens)
    return seen.view(seq_len, seq_len)


def reference(
    q,
    k,
    v,
    *,
    scale=None,
    key_mask=None,
    alibi_slopes=None,
    softcap=None,
    sinks=None,
    attn_mask=None,
    **masks,
):
    """(out, lse); written from the formula, keys expanded, differentiable."""
    heads, seq_len, dim = q.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        positions = torch.arange(seq_len)
        distance = (positions[:, None] - positions[None, :]).abs()
        scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * distance
    seen = visible(seq_len, **masks)
    if attn_mask is not None and attn_mask.is_floating_point():
        scores = scores + attn_mask
        attn_mask = attn_mask > -torch.inf
    seen = seen[None, None] if seen.dim() == 2 else seen
    seen = seen if attn_mask is None else seen & attn_mask
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
        scores = torch.cat([scores, sink], 3)
    lse = torch.logsumexp(scores, 3)
    some = (lse > -torch.inf)[..., None]
    # The gradient of a softmax over nothing would be NaN.
    weights = torch.where(some, torch.where(some, scores, 0.0).softmax(3), 0.0)
    return weights @ v, lse


def make_inputs(
    batch=2, heads=4, kv_heads=2, seq_len=37, dim=8, v_dim=6, dtype=torch.float64, seed=0
):
    """q, k, v and a gradient of the output, of the whole sequence, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)]
    return [
        torch.randn(batch, h, seq_len, d, generator=generator, dtype=torch.float64).to(dtype)
        for h, d in shapes
    ]


def others(**tensors):
    """Those that are given, and of them those that learn, as leaves."""
    given = {name: x.detach().clone() for name, x in tensors.items() if x is not None}
    return given, [x.requires_grad_() for x in given.values() if x.is_floating_point()]


_WHOLES = {}


def _key(value):
    """Equal for equal values, tensors among them."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.dtype, value.shape, value.flatten().view(torch.uint8).numpy().tobytes()
    return str(value)


def whole(*inputs, **kwargs):
    """out, lse and the gradients of one process; that of lse is 0.1 where it is finite.

    Kept, since schemes and layouts are compared with the same one.
    """
    named = {**dict(enumerate(inputs)), **kwargs}
    key = tuple((name, _key(value)) for name, value in named.items())
    if key not in _WHOLES:
        if len(_WHOLES) > 200:
            _WHOLES.clear()
        _WHOLES[key] = _whole(*inputs, **kwargs)
    return list(_WHOLES[key])


def _whole(q, k, v, grad, sinks=None, attn_mask=None, **kwargs):
    qkv = leaves((q, k, v))
    given, learn = others(sinks=sinks, attn_mask=attn_mask)
    out, lse = reference(*qkv, **given, **kwargs)
    finite = lse > -torch.inf
    loss = (out * grad).sum() + 0.1 * torch.where(finite, lse, 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, qkv + learn)]


def sharded(
    q, k, v, grad, *, group, layout="zigzag", sinks=None, attn_mask=None, key_mask=None, **kwargs
):
    """The same as `whole` with this rank's shards, by `ring_attention`."""
    where = {"group": group, "layout": layout, "cu_seqlens": kwargs.get("cu_seqlens")}
    parts = [shard_sequence(x, dim=2, **where) for x in (q, k, v, grad)]
    qkv = leaves(parts[:3])
    if attn_mask is not None:
        attn_mask = shard_sequence(attn_mask, dim=2, **where)
    given, learn = others(sinks=sinks, attn_mask=attn_mask)
    mask = None if key_mask is None else shard_sequence(key_mask, dim=1, **where)
    options = {"group": group, "layout": layout, "key_mask": mask, **given, **kwargs}
    out, lse = ring_attention(*qkv, return_lse=True, **options)
    loss = (out * parts[3]).sum() + 0.1 * torch.where(lse > -torch.inf, lse, 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, qkv + learn)]


def expect_equal(found, expected, *, last="dsinks", group, tolerances=TIGHT, **where):
    """Compare this rank's shards with the parts of the whole that belong to it."""
    names = ["out", "lse", "dq", "dk", "dv", last]
    for name, part, full in zip(names, found, expected, strict=False):
        if name == "dsinks":
            part = part.clone()
            if group is not None:
                dist.all_reduce(part, group=ranks_of(group, "helpers"))
        else:
            full = shard_sequence(full, group=group, dim=2, **where)
        how = {**tolerances, "msg": lambda m, n=name: f"{n}: {m}"}
        torch.testing.assert_close(part, full.to(part.dtype), **how)


def assert_rounded_once(found, expected, group, *about):
    """No more error than rounding the right result gives, but for that of float32."""
    for i, (part, full) in enumerate(zip(found, expected, strict=True)):
        part = unshard_sequence(part, group=group, dim=2)
        floor = (full.to(part.dtype).double() - full).norm()
        error = (part.double() - full).norm()
        assert error <= 1.03 * floor + 2e-6 * full.norm(), (*about, i, error / full.norm())
