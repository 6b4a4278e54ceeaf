"""Attention over a sequence in parts, forward and backward."""

import functools

import torch
import torch.distributed as dist
from golden.cases import case, fill, integers, numbers
from torch.distributed.device_mesh import init_device_mesh

from moe_ext import attention as ma
from moe_ext import ops

RANKS = (2, 3)
B, H, S, D = 2, 6, 37, 8
DOCUMENTS = (0, 10, 10, 11, 30, 37)
PLAIN = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (6, 0)},
    "band": {"window": (4, 9), "layout": "contiguous"},
    "documents": {"is_causal": True, "cu_seqlens": DOCUMENTS},
    "documents_apart": {"is_causal": True, "cu_seqlens": DOCUMENTS, "layout": "per_document"},
    "contiguous": {"is_causal": True, "layout": "contiguous"},
    "striped": {"is_causal": True, "layout": "striped"},
    "cost_balanced": {"is_causal": True, "layout": "cost_balanced", "cu_seqlens": DOCUMENTS},
    "padded": {"key_mask": True},
    "slopes": {"is_causal": True, "alibi_slopes": True},
    "softcap": {"softcap": 1.5},
    "sinks": {"is_causal": True, "sinks": True, "scale": 0.7},
    "dropout": {"dropout_p": 0.25, "seed": 12345},
    "grouped": {"is_causal": True, "kv_heads": 2},
    "bfloat16": {"is_causal": True, "dtype": torch.bfloat16},
    "fast": {"is_causal": True, "dtype": torch.bfloat16, "precision": "fast"},
    "short_gradients": {"is_causal": True, "kv_grad_dtype": torch.bfloat16},
    "float64": {"is_causal": True, "dtype": torch.float64},
    "gathered": {"is_causal": True, "scheme": "all_gather"},
    "gathered_window": {"is_causal": True, "scheme": "all_gather", "window": (5, 0)},
    "ulysses": {"is_causal": True, "scheme": "ulysses"},
    "ulysses_full": {"scheme": "ulysses", "alibi_slopes": True, "sinks": True, "key_mask": True},
    "auto": {"is_causal": True, "scheme": "auto"},
}


def attended(group, *, kv_heads=H, dtype=torch.float32, **options):
    """Result and gradients of the shards of one sequence."""
    documents = options.get("cu_seqlens")
    options["layout"] = layout = ma.make_layout(
        options.get("layout", "zigzag"),
        S,
        1 if group is None else dist.get_world_size(),
        cu_seqlens=documents,
        is_causal=options.get("is_causal", False),
    )
    shard = functools.partial(ma.shard_sequence, group=group, layout=layout)
    q, k, v = (
        shard(numbers(name, B, heads, S, D, scale=2.0), dim=2).to(dtype).requires_grad_()
        for name, heads in (("q", H), ("k", kv_heads), ("v", kv_heads))
    )
    grad_out = shard(numbers("out", B, H, S, D), dim=2).to(dtype)
    leaves = [q, k, v]
    if options.get("key_mask"):
        options["key_mask"] = shard(integers("mask", 4, B, S) > 0, dim=1)
    if options.get("alibi_slopes"):
        options["alibi_slopes"] = torch.arange(1, H + 1) / 16
    if options.get("sinks"):
        options["sinks"] = numbers("sinks", H).requires_grad_()
        leaves.append(options["sinks"])
    out, lse = ma.ring_attention(q, k, v, group=group, return_lse=True, **options)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    ((out * grad_out).sum() + (finite * finite).sum() / 8).backward()
    return {"out": out, "lse": finite, "grads": [x.grad for x in leaves]}


@case(*[(name,) for name in PLAIN], ranks=RANKS)
def ring_attention(name):
    return attended(dist.group.WORLD, **PLAIN[name])


@case(*[(name,) for name in PLAIN if "layout" not in PLAIN[name] and "scheme" not in PLAIN[name]])
def attention_alone(name):
    return attended(None, **PLAIN[name])


@case(
    ("hybrid", True), ("hybrid", False), ("double_ring", True), ("double_ring", False), ranks=RANKS
)
def on_a_mesh(scheme, row):
    size = dist.get_world_size()
    shape = (1, size) if row else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    return attended(mesh, is_causal=True, scheme=scheme)


@case(("plain",), ("causal",), ("padded",), ("dropout",), ("added",), ranks=RANKS)
def ring_self_attention(name):
    group, options = dist.group.WORLD, {"layout": "zigzag"}
    shard = functools.partial(ma.shard_sequence, group=group)
    q, k, v = (
        shard(numbers(n, B, H, S, D, scale=2.0), dim=2).requires_grad_() for n in ("q", "k", "v")
    )
    if name == "causal":
        options["is_causal"] = True
    if name == "padded":
        options["key_mask"] = shard(integers("mask", 4, B, S) > 0, dim=1)
    if name == "dropout":
        options.update(dropout_p=0.25, seed=77)
    if name == "added":
        options["attn_mask"] = shard(numbers("added", 1, H, S, S), dim=2)
    out = ma.ring_self_attention(q, k, v, group=group, **options)
    out.backward(shard(numbers("out", B, H, S, D), dim=2))
    return out, q.grad, k.grad, v.grad


@case(exact=True, ranks=RANKS)
def sequences():
    """What shards hold, there and back."""
    group, found = dist.group.WORLD, {}
    x = numbers("x", 3, S)
    for layout in ("contiguous", "zigzag", "striped", "per_document"):
        documents = DOCUMENTS if layout == "per_document" else None
        options = {"group": group, "layout": layout, "cu_seqlens": documents}
        mine = ma.shard_sequence(x, dim=1, **options).requires_grad_()
        whole = ma.unshard_sequence(mine, dim=1, **options)
        whole.backward(numbers(("grad", dist.get_rank()), 3, S))
        ids = ma.position_ids(S, **options)
        found[layout] = mine, whole, mine.grad, ids
    found["labels"] = ma.shift_labels(integers("labels", 50, 2, S), cu_seqlens=DOCUMENTS)
    return found


@case(exact=True, ranks=RANKS)
def sequence_collectives():
    group, found = dist.group.WORLD, {}
    x = numbers("x", 6 * dist.get_world_size(), 5)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    whole = ma.gather_from_sequence(mine, group=group, dim=0)
    whole.backward(numbers(("grad", dist.get_rank()), *x.shape))
    found["gathered"] = whole, mine.grad
    part = numbers(("part", dist.get_rank()), *x.shape).requires_grad_()
    summed = ma.reduce_scatter_to_sequence(part, group=group, dim=0)
    summed.backward(numbers(("back", dist.get_rank()), *summed.shape))
    found["summed"] = summed, part.grad
    again = x.clone().requires_grad_()
    cut = ma.scatter_to_sequence(again, group=group, dim=0)
    cut.backward(numbers(("cut", dist.get_rank()), *cut.shape))
    found["cut"] = cut, again.grad
    return found


@case((True,), (False,), ranks=RANKS)
def sequence_parallel_mlp(regather):
    group = dist.group.WORLD
    block = ma.SequenceParallelMLP(16, 6 * dist.get_world_size(), group=group, regather=regather)
    fill(block)
    x = ma.shard_sequence(numbers("x", 2, S, 16), group=group, dim=1, layout="contiguous")
    x.requires_grad_()
    y = block(x, seq_len=S)
    y.backward(numbers(("grad", dist.get_rank()), *y.shape))
    return y, x.grad, [p.grad for p in block.parameters()]


@case((None,), (10000.0,), ranks=RANKS)
def self_attention(rotary_base):
    group = dist.group.WORLD
    block = ma.RingSelfAttention(16, 4, group=group, is_causal=True, rotary_base=rotary_base)
    fill(block)
    x = ma.shard_sequence(numbers("x", 2, S, 16), group=group, dim=1, layout="contiguous")
    x.requires_grad_()
    y = block(x)
    y.backward(numbers(("grad", dist.get_rank()), *y.shape))
    return y, x.grad, [p.grad for p in block.parameters()]


@case(ranks=(2,))
def context():
    """torch's own function over shards."""
    group = dist.group.WORLD
    q, k, v = (
        ma.shard_sequence(numbers(n, B, H, S, D), group=group, dim=2).requires_grad_()
        for n in ("q", "k", "v")
    )
    with ma.sequence_parallel(group):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(numbers(("out", dist.get_rank()), *out.shape))
    return out, q.grad, k.grad, v.grad


BLOCKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 5, "window_right": 2},
    "softcap": {"softcap": 2.0, "scale": 0.9},
    "dropout": {"dropout_p": 0.5, "seed": 3, "batch_offset": 1, "head_offset": 2},
}


@case(*[(name,) for name in BLOCKS])
def attention_block(name):
    options = BLOCKS[name]
    q, grad = numbers("q", 2, 4, 21, 16), numbers("grad", 2, 4, 21, 16)
    k, v = numbers("k", 2, 2, 33, 16), numbers("v", 2, 2, 33, 16)
    places = torch.arange(12, 33), torch.arange(33)
    out, lse = ops.attention_block(q, k, v, *places, **options)
    delta = ops.attention_delta(grad, out)
    grads = ops.attention_block_backward(grad, lse, delta, q, k, v, *places, **options)
    return out, lse, delta, grads


@case()
def merged_attention():
    outs = numbers("a", 2, 3, 9, 8).requires_grad_(), numbers("b", 2, 3, 9, 8).requires_grad_()
    lses = numbers("c", 2, 3, 9, scale=5.0), numbers("d", 2, 3, 9, scale=5.0)
    lses = [x.requires_grad_() for x in lses]
    out, lse = ops.merge_attention(outs[0], lses[0], outs[1], lses[1])
    sunk = ops.merge_attention_sinks(out, lse, numbers("sinks", 3))
    (sunk[0].sum() + sunk[1].sum()).backward()
    return out, lse, sunk, [x.grad for x in (*outs, *lses)]
