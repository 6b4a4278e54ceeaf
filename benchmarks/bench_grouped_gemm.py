"""grouped_mm against torch's own and against the plain products of each expert."""

import torch
import torch.nn.functional as F
from _harness import Runs, Table, interleaved, milliseconds, ratio
from shapes import LAYERS, LayerShape

from moe_ext import ops


def plain_products(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, bounds: list[int]
) -> Runs:
    """The floor: mm(out=) into slices, three products an expert."""
    out = torch.empty_like(grad)
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            rows, g = x[start:end], grad[start:end]
            torch.mm(rows, weight[expert].t(), out=out[start:end])
            torch.mm(g, weight[expert], out=grad_x[start:end])
            torch.mm(g.t(), rows, out=grad_weight[expert])

    return {"plain": run}


def product_row(shape: LayerShape, num_tokens: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The up projection of one layer, forward and backward."""
    num_rows = num_tokens * shape.top_k
    experts = torch.randint(0, shape.num_experts, (num_rows,))
    counts = experts.bincount(minlength=shape.num_experts)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    x = torch.randn(num_rows, shape.model_dim).to(dtype).requires_grad_()
    weight = torch.randn(shape.num_experts, 2 * shape.ffn_dim, shape.model_dim).to(dtype)
    weight.requires_grad_()
    grad = torch.randn(num_rows, 2 * shape.ffn_dim).to(dtype)

    def train(product: object) -> None:
        torch.autograd.grad(product(), (x, weight), grad)  # type: ignore[operator]

    inclusive = offsets[1:].int()
    runs: Runs = {
        "ours": lambda: train(lambda: ops.grouped_mm(x, weight, offsets)),
        "torch": lambda: train(lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=inclusive)),
    }
    with torch.no_grad():
        runs |= plain_products(x.detach(), weight.detach(), grad, offsets.tolist())
    times = interleaved(runs)
    return (
        shape.name,
        str(num_tokens),
        str(dtype).removeprefix("torch."),
        milliseconds(times["ours"]),
        milliseconds(times["torch"]),
        ratio(times["torch"], times["ours"]),
        ratio(times["ours"], times["plain"]),
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("shape", "T", "dtype", "ms", "torch ms", "torch / ours", "ours / plain products")
    note = (
        "Forward and backward of the up projection. torch is `torch.nn.functional.grouped_mm`; the "
        "plain products are three `mm(out=)` an expert."
    )
    rows = [
        product_row(shape, num_tokens, dtype)
        for shape in LAYERS
        for num_tokens in (64, 1024)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return [Table("Grouped matrix product", note, header, rows)]
