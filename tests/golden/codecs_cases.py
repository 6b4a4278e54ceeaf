"""Selection, quantisation and packing: the same bits on every processor."""

import torch
from golden.cases import case, gradient, integers

from moe_ext import ops

STEPS = 3
N = 1000


def select_steps(function, shape, *, velocity=False):
    """What three steps send, with what they leave behind."""
    residual, found = torch.zeros(shape), {}
    kept = torch.zeros(shape) if velocity else None
    for step in range(STEPS):
        options = {"velocity": kept} if velocity else {}
        found[f"sent_{step}"] = function(gradient(("select", step), *shape), residual, **options)
        found[f"owed_{step}"] = residual.clone(), None if kept is None else kept.clone()
    return found


@case(("plain",), ("velocity",), ("row",), exact=True)
def topk(name):
    k, scope = (3, "row") if name == "row" else (37, "tensor")
    return select_steps(
        lambda g, e, **more: ops.topk_compress_(g, e, k, scope=scope, **more),
        (4, 10, 25),
        velocity=name == "velocity",
    )


@case((70_001,), exact=True)
def topk_sizes(numel):
    return select_steps(lambda g, e: ops.topk_compress_(g, e, numel // 50), (numel,))


@case(("plain",), ("row",), exact=True)
def threshold(name):
    capacity, scope = (7, "row") if name == "row" else (400, "tensor")
    return select_steps(
        lambda g, e: ops.threshold_compress_(g, e, 0.5, capacity, scope=scope), (40, 25)
    )


@case(("tensor", 1), exact=True)
def threshold_that_follows(scope, count):
    bounds = torch.full((), 0.25)

    def select(grad, residual):
        found = ops.threshold_compress_(grad, residual, bounds, 500, target=100, scope=scope)
        return (*found, bounds.clone())

    return select_steps(select, (40, 25))


def _quantized(format, block, numel, *, seed=None):
    residual, found = torch.zeros(numel), {}
    for step in range(STEPS):
        rng_state = None if seed is None else torch.tensor([seed, 1, step, 0])
        blocks = ops.quantize_blockwise(
            gradient(("quantize", step), numel),
            format=format,
            block=block,
            residual=residual,
            rng_state=rng_state,
        )
        back = ops.dequantize_blockwise(*blocks, numel, format=format, block=block)
        total = gradient("total", numel)
        ops.dequantize_add_(total, *blocks, format=format, block=block)
        found[f"step_{step}"] = blocks, back, total
        found[f"owed_{step}"] = residual.clone()
    return found


FORMATS = ("int8", "int4", "fp8", "sign")


@case(*[(f, 64) for f in FORMATS], exact=True)
def quantize(format, block):
    return _quantized(format, block, N + 1)


@case(("int8",), ("int4",), ("fp8",), exact=True)
def quantize_at_random(format):
    return _quantized(format, 64, N, seed=5)


@case((70_001, 5), exact=True)
def pairs(numel, count):
    indices = integers("pairs", numel, count).unique()
    values = gradient("values", len(indices))
    packed = ops.pack_indices(indices, numel)
    out, part = gradient("out", numel), torch.zeros(numel - numel // 3)
    ops.add_pairs_(out, values, packed, numel, divisor=3.0)
    ops.add_pairs_(part, values, packed, numel, start=numel // 3)
    return packed, ops.unpack_indices(packed, len(indices), numel), out, part


def half_empty(seed, numel, block, dtype=torch.float32):
    """A tensor of which every other block or so is zero."""
    x = gradient(seed, numel)
    marks = integers((seed, "marks"), 2, -(-numel // block)).repeat_interleave(block)[:numel]
    return (x * marks).to(dtype)


@case((256, "float32"), exact=True)
def sparse_blocks(block, dtype):
    x = half_empty("blocks", N, block, getattr(torch, dtype))
    bitmap = ops.nonzero_blocks(x, block=block)
    indices = ops.block_indices(bitmap)
    packed = ops.gather_blocks(x, indices, block=block)
    out = gradient("under", N).to(x.dtype)
    ops.scatter_blocks_(out, packed, indices, block=block)
    return bitmap, indices, packed, out


@case(("float32",), exact=True)
def sum_rows(dtype):
    rows = gradient("rows", 60, 17).to(getattr(torch, dtype))
    return ops.sum_rows(rows, integers("row_idx", 30, 60) - 1, 29)


@case(("float32", "bfloat16"), exact=True)
def scale_into(source, target):
    x = gradient("scale", N).to(getattr(torch, source))
    out = torch.empty(N, dtype=getattr(torch, target))
    flags = [ops.scale_into_(out, x, scale=1 / 3)]
    kept = out.clone()
    x[500] = torch.inf
    flags.append(ops.scale_into_(out, x, scale=0.5))
    return kept, out, flags
