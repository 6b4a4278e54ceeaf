"""Selection, quantisation and packing: the same bits on every processor."""

import torch
from golden.cases import case, gradient, integers

from moe_ext import ops

STEPS = 3
N = 1000


def select_steps(
    function, shape, *, velocity=False, dtype=torch.float32, apart=False, grads=gradient
):
    """What three steps send, with what they leave behind."""
    residual, found = torch.zeros(shape), {}
    kept = torch.zeros(shape) if velocity else None
    for step in range(STEPS):
        grad = grads(("select", step), *shape).to(dtype)
        options = {"velocity": kept} if velocity else {}
        if apart:
            read, residual = residual, torch.full(shape, 7.0)
            options["residual_in"] = read
            if velocity:
                options["velocity_in"], kept = kept, torch.full(shape, 7.0)
                options["velocity"] = kept
        found[f"sent_{step}"] = function(grad, residual, **options)
        found[f"owed_{step}"] = residual.clone(), None if kept is None else kept.clone()
    return found


def tied(seed, *shape):
    """Few different magnitudes, so that the lower index decides."""
    return (integers(seed, 9, *shape) - 4).float()


TOPK = {
    "plain": {},
    "ties": {"grads": tied},
    "velocity": {"velocity": True},
    "velocity_apart": {"velocity": True, "apart": True},
    "apart": {"apart": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "row": {"scope": "row"},
    "expert": {"scope": "expert"},
    "every_64": {"scope": 64},
    "ties_by_row": {"scope": "row", "grads": tied},
    "rate_halved": {"residual_scale": 0.5},
    "unchecked": {"check_finite": False},
}


def _split(options):
    options = dict(options)
    steps = {k: options.pop(k) for k in ("grads", "velocity", "dtype", "apart") if k in options}
    return steps, options


@case(*[(name,) for name in TOPK], exact=True)
def topk(name):
    steps, options = _split(TOPK[name])
    k = 3 if "scope" in options else 37
    return select_steps(
        lambda g, e, **more: ops.topk_compress_(g, e, k, **options, **more), (4, 10, 25), **steps
    )


@case((0,), (1,), (N,), exact=True)
def topk_counts(k):
    return select_steps(lambda g, e, **more: ops.topk_compress_(g, e, k, **more), (N,))


@case((255,), (256,), (257,), (70_001,), exact=True)
def topk_sizes(numel):
    k = numel // 50
    return select_steps(lambda g, e, **more: ops.topk_compress_(g, e, k, **more), (numel,))


THRESHOLD = {
    "plain": {},
    "overflow": {"capacity": 11},
    "ties": {"grads": tied, "capacity": 50},
    "zero": {"threshold": 0.0, "capacity": N},
    "velocity": {"velocity": True},
    "apart": {"apart": True},
    "row": {"scope": "row", "capacity": 7},
}


@case(*[(name,) for name in THRESHOLD], exact=True)
def threshold(name):
    steps, options = _split(THRESHOLD[name])
    bound, capacity = options.pop("threshold", 0.5), options.pop("capacity", 400)
    return select_steps(
        lambda g, e, **more: ops.threshold_compress_(g, e, bound, capacity, **options, **more),
        (40, 25),
        **steps,
    )


@case(("tensor", 1), ("row", 40), exact=True)
def threshold_that_follows(scope, count):
    bounds = torch.full(() if scope == "tensor" else (count,), 0.25)
    capacity, target = 1000 // count // 2, 1000 // count // 10

    def select(grad, residual, **more):
        found = ops.threshold_compress_(
            grad, residual, bounds, capacity, target=target, scope=scope, **more
        )
        return (*found, bounds.clone())

    return select_steps(select, (40, 25))


def _quantized(format, block, numel, *, dtype=torch.float32, feedback=True, seed=None, apart=False):
    residual, found = torch.zeros(numel) if feedback else None, {}
    for step in range(STEPS):
        rng_state = None if seed is None else torch.tensor([seed, 1, step, 0])
        more, read = {}, residual
        if apart:
            residual = torch.full((numel,), 7.0)
            more = {"residual_in": read}
        blocks = ops.quantize_blockwise(
            gradient(("quantize", step), numel).to(dtype),
            format=format,
            block=block,
            residual=residual,
            rng_state=rng_state,
            **more,
        )
        back = ops.dequantize_blockwise(*blocks, numel, format=format, block=block, dtype=dtype)
        total = gradient("total", numel)
        ops.dequantize_add_(total, *blocks, format=format, block=block)
        found[f"step_{step}"] = blocks, back, total
        found[f"owed_{step}"] = None if residual is None else residual.clone()
    return found


FORMATS = ("int8", "int4", "fp8", "sign")


@case(*[(f, b) for f in FORMATS for b in (64, 256)], exact=True)
def quantize(format, block):
    return _quantized(format, block, N + 1)


@case(*[(f, d) for f in FORMATS for d in ("bfloat16", "float16")], exact=True)
def quantize_halves(format, dtype):
    return _quantized(format, 128, N, dtype=getattr(torch, dtype))


@case(*[(f,) for f in FORMATS], exact=True)
def quantize_without_residual(format):
    return _quantized(format, 128, 257, feedback=False)


@case(*[(f,) for f in FORMATS], exact=True)
def quantize_apart(format):
    return _quantized(format, 1024, 5000, apart=True)


@case(("int8",), ("int4",), ("fp8",), exact=True)
def quantize_at_random(format):
    return _quantized(format, 64, N, seed=5)


@case(("int8",), ("int4",), ("fp8",), exact=True)
def quantize_a_piece_at_random(format):
    whole = gradient("pieces", N)
    state = torch.tensor([9, 0, 4, 2])
    return [
        ops.quantize_blockwise(
            whole[start : start + 512], format=format, rng_state=state, element_offset=start
        )
        for start in (0, 512)
    ]


@case((N, 20), (70_001, 5), (200_000, 9000), exact=True)
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


@case((256, "float32"), (7, "float32"), (64, "bfloat16"), (64, "float64"), exact=True)
def sparse_blocks(block, dtype):
    x = half_empty("blocks", N, block, getattr(torch, dtype))
    bitmap = ops.nonzero_blocks(x, block=block)
    indices = ops.block_indices(bitmap)
    packed = ops.gather_blocks(x, indices, block=block)
    out = gradient("under", N).to(x.dtype)
    ops.scatter_blocks_(out, packed, indices, block=block)
    return bitmap, indices, packed, out


@case(("float32",), ("bfloat16",), exact=True)
def sum_rows(dtype):
    rows = gradient("rows", 60, 17).to(getattr(torch, dtype))
    return ops.sum_rows(rows, integers("row_idx", 30, 60) - 1, 29)


@case(
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
    ("float64", "float32"),
    ("float64", "bfloat16"),
    exact=True,
)
def scale_into(source, target):
    x = gradient("scale", N).to(getattr(torch, source))
    out = torch.empty(N, dtype=getattr(torch, target))
    flags = [ops.scale_into_(out, x, scale=1 / 3)]
    kept = out.clone()
    x[500] = torch.inf
    flags.append(ops.scale_into_(out, x, scale=0.5))
    return kept, out, flags
