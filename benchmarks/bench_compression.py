"""Gradient selection and quantisers on one thread, beside a copy and eager torch."""

import itertools
from collections.abc import Callable

import torch
from _harness import Runs, Table, Timing, interleaved, milliseconds

from moe_ext import ops

NUMEL = 2**24
DENSITIES = (0.1, 0.01, 0.001)
# Without it the residual of three gradients that come again and again grows for hundreds of steps.
DECAY = 0.9
INPUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": torch.randn,
    "all equal": lambda n: torch.full((n,), 0.5),
    "all zero": torch.zeros,
    "denormal": lambda n: torch.randn(n) * 1e-39,
}


def eager_topk(grad: torch.Tensor, residual: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """What a hook without a fused operator runs."""
    residual.add_(grad)
    _, indices = residual.abs().topk(k, sorted=False)
    values = residual[indices]
    residual[indices] = 0
    return values, indices


def eager_threshold(
    grad: torch.Tensor, residual: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same with a known threshold."""
    residual.add_(grad)
    indices = residual.abs().ge(threshold).nonzero().squeeze(1)
    values = residual[indices]
    residual[indices] = 0
    return values, indices


def settled(grads: list[torch.Tensor], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual and a threshold as they are some steps into a training."""
    residual, threshold = torch.zeros_like(grads[0]), torch.tensor(1.0)
    for grad in itertools.islice(itertools.cycle(grads), 60):
        ops.threshold_compress_(
            grad, residual, threshold, len(grad), target=k, residual_scale=DECAY
        )
    return residual, threshold


def one_thread(runs: Runs, seconds: float = 8.0) -> dict[str, Timing]:
    """The times of the contenders on a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return interleaved(runs, seconds=seconds, warmup=1, least=3)
    finally:
        torch.set_num_threads(before)


def row(labels: tuple[str, ...], times: dict[str, Timing]) -> tuple[str, ...]:
    """The milliseconds of every contender, and the first ones over the copy."""
    copy = times["copy"].median
    cells = [milliseconds(t) for t in times.values()]
    shares = [f"{t.median / copy:.2f}" for name, t in times.items() if name.startswith("ours")]
    return (*labels, *cells, *shares)


def selection_times(numel: int, density: float, kind: str) -> dict[str, Timing]:
    """Exact and thresholded selection of one input."""
    k = max(1, int(numel * density))
    grads = [INPUTS[kind](numel) for _ in range(3)]
    turn = itertools.cycle(grads)
    residual, threshold = settled(grads, k)
    states = [residual.clone() for _ in range(5)]
    bounds = [threshold.clone() for _ in range(2)]
    target = torch.empty_like(residual)
    capacity = min(numel, 2 * k)

    def carried(i: int, check: bool) -> object:
        return ops.threshold_compress_(
            next(turn),
            states[i],
            bounds[i - 1],
            capacity,
            target=k,
            residual_scale=DECAY,
            check_finite=check,
        )

    def exact(i: int, check: bool) -> object:
        return ops.topk_compress_(
            next(turn), states[i], k, residual_scale=DECAY, check_finite=check
        )

    return one_thread(
        {
            "ours top-k": lambda: exact(0, True),
            "ours top-k unchecked": lambda: exact(4, False),
            "ours carried": lambda: carried(1, True),
            "ours carried unchecked": lambda: carried(2, False),
            "copy": lambda: target.copy_(grads[0]),
            "torch.topk": lambda: grads[0].topk(k, sorted=False),
            "eager top-k": lambda: eager_topk(next(turn), states[3], k),
            "eager threshold": lambda: eager_threshold(next(turn), states[3], threshold),
        }
    )


def selection_table(numel: int = NUMEL) -> Table:
    """Selection with error feedback."""
    header = (
        "input",
        "selected",
        "top-k ms",
        "top-k, unchecked ms",
        "carried ms",
        "carried, unchecked ms",
        "copy ms",
        "torch.topk ms",
        "eager top-k ms",
        "eager threshold ms",
        "top-k / copy",
        "unchecked / copy",
        "carried / copy",
        "carried, unchecked / copy",
    )
    note = (
        f"{numel} float32 elements, one thread. Every contender adds the gradient to the residual "
        "and takes the selected elements out, torch.topk and the copy alone do not. Unchecked: "
        "without the pass that looks for NaN. The eager threshold is a constant."
    )
    cases = [("normal", density) for density in DENSITIES]
    cases += [(kind, 0.01) for kind in INPUTS if kind != "normal"]
    rows = [
        row((kind, f"{100 * density:g} %"), selection_times(numel, density, kind))
        for kind, density in cases
    ]
    return Table("Gradient selection", note, header, rows)


def eager_int8(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block quantisation in plain torch."""
    blocks = x.view(-1, block)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (blocks / scales).round().to(torch.int8), scales


def quantizer_times(format: str, numel: int, block: int = 256) -> dict[str, Timing]:
    """One format: with and without a residual, and back."""
    x, total = torch.randn(numel), torch.zeros(numel)
    residuals = [torch.zeros(numel) for _ in range(2)]
    target = torch.empty_like(x)
    shape = {"format": format, "block": block}
    coded = ops.quantize_blockwise(x, **shape)

    def with_residual(i: int, check: bool) -> object:
        return ops.quantize_blockwise(x, residual=residuals[i], check_finite=check, **shape)

    runs: Runs = {
        "ours": lambda: ops.quantize_blockwise(x, **shape),
        "ours with residual": lambda: with_residual(0, True),
        "ours with residual, unchecked": lambda: with_residual(1, False),
        "ours add": lambda: ops.dequantize_add_(total, *coded, **shape),
        "copy": lambda: target.copy_(x),
    }
    if format == "int8":
        runs["eager"] = lambda: eager_int8(x, block)
    return one_thread(runs, seconds=4.0)


def quantizer_table(numel: int = NUMEL) -> Table:
    """Block quantisers."""
    header = (
        "format",
        "quantise ms",
        "with residual ms",
        "with residual, unchecked ms",
        "dequantise and add ms",
        "copy ms",
        "eager ms",
        "quantise / copy",
        "with residual / copy",
        "unchecked / copy",
        "add / copy",
    )
    note = f"{numel} float32 elements in blocks of 256, rounded to the nearest, one thread."
    rows = []
    for format in ("int8", "int4", "fp8", "sign"):
        times = quantizer_times(format, numel)
        cells = row((format,), times)
        rows.append(cells if "eager" in times else (*cells[:6], "-", *cells[6:]))
    return Table("Block quantisers", note, header, rows)


def tables() -> list[Table]:
    """The tables of docs/benchmarks.md."""
    return [selection_table(), quantizer_table()]
