"""Averages over ranks that send few bits or few elements: the same bits on every processor."""

import torch
import torch.distributed as dist
from golden.cases import case, gradient, integers
from golden.codecs_cases import half_empty

from moe_ext import compression as mc
from moe_ext import ops

RANKS = (2, 3)
STEPS = 3
N = 3001


def mine(seed, *shape):
    return gradient((seed, dist.get_rank()), *shape)


def rng_state(step):
    return torch.tensor([11, 3, step, dist.get_rank()])


QUANTIZED = {
    "int8": {},
    "int4": {"format": "int4", "block": 64},
    "fp8": {"format": "fp8"},
    "sign": {"format": "sign"},
    "at_random": {"format": "int4", "rng": True},
    "sum": {"average": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "forgets": {"feedback": False},
    "apart": {"apart": True},
    "not_compared": {"validate": False, "async_op": True},
}


@case(*[(name,) for name in QUANTIZED], exact=True, ranks=RANKS)
def quantized_all_reduce(name):
    options = dict(QUANTIZED[name])
    dtype = options.pop("dtype", torch.float32)
    rng, feedback = options.pop("rng", False), options.pop("feedback", True)
    apart = options.pop("apart", False)
    shard = mc.shard_numel(N, dist.get_world_size(), options.get("block", 256))
    states = {"residual": torch.zeros(N), "server_residual": torch.zeros(shard)} if feedback else {}
    found = {}
    for step in range(STEPS):
        x = mine(step, N).to(dtype)
        more = {"rng_state": rng_state(step)} if rng else {}
        if apart:
            more.update({f"{kind}_in": kept for kind, kept in states.items()})
            states = {kind: torch.full_like(kept, 7.0) for kind, kept in states.items()}
        result = mc.quantized_all_reduce_(x, **options, **states, **more)
        if options.get("async_op"):
            result = result.wait()
        found[f"mean_{step}"] = result.clone()
        found[f"owed_{step}"] = {kind: kept.clone() for kind, kept in states.items()}
    return found


@case(("int8",), ("int4",), ("fp8",), ("sign",), exact=True, ranks=RANKS)
def quantized_reduce_scatter(format):
    size = dist.get_world_size()
    numel, found = 512 * size, {}
    residual = torch.zeros(numel)
    for step in range(STEPS):
        out = torch.empty(numel // size)
        mc.quantized_reduce_scatter(
            out, mine(step, numel), format=format, block=128, residual=residual
        )
        found[f"step_{step}"] = out, residual.clone()
    return found


@case(("int8", "float32"), ("int4", "float32"), ("fp8", "bfloat16"), exact=True, ranks=RANKS)
def quantized_all_gather(format, dtype):
    x = mine("gather", 700).to(getattr(torch, dtype))
    out = torch.empty(700 * dist.get_world_size(), dtype=x.dtype)
    return mc.quantized_all_gather(out, x, format=format, block=64)


@case(
    ("all_gather", "fp32"),
    ("all_gather", "int8"),
    ("all_gather", "bf16"),
    ("split", "fp32"),
    ("split", "int8"),
    ("split", "int4"),
    ("split", "fp8"),
    ("dense", "fp32"),
    ("dense", "int4"),
    ("auto", "fp32"),
    exact=True,
    ranks=RANKS,
)
def sparse_all_reduce(algorithm, value_codec):
    residual, found = torch.zeros(N), {}
    regions = mc.SplitRegions(N, dist.get_world_size()) if algorithm == "split" else None
    for step in range(STEPS):
        values, indices = ops.topk_compress_(mine(step, N), residual, 60)
        total = mc.sparse_all_reduce(
            values,
            indices,
            N,
            algorithm=algorithm,
            value_codec=value_codec,
            residual=residual,
            regions=regions,
            average=step != 1,
        )
        found[f"step_{step}"] = total, residual.clone()
        if regions is not None:
            found[f"regions_{step}"] = regions.state_dict()
    return found


@case((256,), (10,), exact=True, ranks=RANKS)
def block_sparse_all_reduce(block):
    seed = ("blocks", dist.get_rank())
    x = half_empty(seed, N, block)
    marked = half_empty(seed, N, block).bfloat16()
    bitmap = ops.nonzero_blocks(marked, block=block)
    return (
        mc.block_sparse_all_reduce_(x, block=block),
        mc.block_sparse_all_reduce_(marked, block=block, bitmap=bitmap, average=False),
    )


@case(exact=True, ranks=RANKS)
def masked_all_reduce():
    mask = integers("mask", 3, N) == 0
    return (
        mc.masked_all_reduce_(mine("bool", N), mask),
        mc.masked_all_reduce_(mine("index", N), mask.nonzero().view(-1), average=False),
    )


@case((60, 40), (60, 0), (0, 0), exact=True, ranks=RANKS)
def row_sparse_all_reduce(first, others):
    count = others if dist.get_rank() else first
    indices = integers(("rows", dist.get_rank()), 90, 1, count)
    grad = torch.sparse_coo_tensor(indices, mine("rows", count, 9), (90, 9))
    return mc.row_sparse_all_reduce(grad)


@case((True,), (False,), exact=True, ranks=(2,))
def hierarchical_all_reduce(together):
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    both = dist.new_group([0, 1])
    local, nodes = (both, alone) if together else (alone, both)
    residual = torch.zeros(mc.shard_numel(N, 2 if together else 1, 1))

    def reduce(shard, *, group, average):
        return mc.quantized_all_reduce_(
            shard, format="int8", residual=residual, group=group, average=average
        )

    x = mine("nodes", N)
    return mc.hierarchical_all_reduce_(
        x, local_group=local, node_group=nodes, reduce=reduce
    ), residual
