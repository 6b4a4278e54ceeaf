"""Attention on a GPU: rate and error of each kernel, and one step of a ring in its parts.

    python benchmarks/gpu_attention.py cuda [chosen errors rates ring]

Prints JSON line by line, a row of a table each. Shape suffixes: B batch, H heads, G key heads, Q
queries, K keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_harness import (
    Absent,
    Card,
    Section,
    Timer,
    dtype_name,
    measure_families,
    profiled,
    run_script,
)
from torch import Tensor

from moe_ext import ops
from moe_ext.attention import block as blocks
from moe_ext.attention import libraries
from moe_ext.attention.libraries import LIBRARIES, KernelLibrary, Qkv
from moe_ext.attention.masks import Mask

HALVES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)


class Exact:
    """Our kernel, in the place of a library."""

    name = "exact"

    def serves(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """True: our kernel takes all tensors."""
        return True

    def _arguments(self, qkv: Qkv) -> tuple[Tensor, ...]:
        at = (torch.arange(x.shape[2], device=x.device) for x in qkv[:2])
        return (*qkv, *at)

    def forward(self, qkv: Qkv, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse), both float32."""
        return ops.attention_block(*self._arguments(qkv), causal=is_causal, scale=scale)

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, qkv: Qkv, is_causal: bool, scale: float
    ) -> Qkv:
        """(dq, dk, dv) in float32."""
        delta = ops.attention_delta(grad_out.float(), out.float())
        found = ops.attention_block_backward(
            grad_out.float(), lse, delta, *self._arguments(qkv), causal=is_causal, scale=scale
        )
        return found[0], found[1], found[2]


KERNELS: tuple[KernelLibrary, ...] = (Exact(), *LIBRARIES)


class Bench:
    """A device, a timer, and lengths for rates, errors and the ring."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        self.device, self.small = device, small
        self.time = Timer(device, 2 if small else 10)
        self.lengths = (64, 64, 64) if small else (8192, 1024, 8192)

    def qkv(self, length: int, head_dim: int, dtype: torch.dtype, heads: int, groups: int) -> Qkv:
        """Normal numbers."""
        torch.manual_seed(0)
        shapes = [(1, count, length, head_dim) for count in (heads, groups, groups)]
        q, k, v = (torch.randn(shape, device=self.device).to(dtype) for shape in shapes)
        return q, k, v

    def add_kernels(self, title: str, length: int, row_of: RowOf) -> None:
        """Adds a row for each kernel of this kind of device, width and dtype; ours has float32."""
        section, kind = Section(title), "CUDA" if self.device.type == "cuda" else "CPU"
        for head_dim in HEAD_DIMS:
            for kernel in KERNELS:
                if kernel.name == "exact" or kind in kernel.name:
                    for dtype in (*HALVES, torch.float32)[: None if kernel.name == "exact" else 2]:
                        name = dtype_name(dtype)
                        labels = {"kernel": kernel.name, "dtype": name, "D": head_dim, "S": length}
                        section.add(labels, partial(row_of, self, kernel, dtype, head_dim))


# A row of a kernel, a dtype and a width.
RowOf = Callable[[Bench, KernelLibrary, torch.dtype, int], dict[str, object]]


def served(kernel: KernelLibrary, qkv: Qkv) -> None:
    """Says where a kernel does not take these."""
    if not kernel.serves(*qkv):
        raise Absent("does not serve these tensors on this card")


def errors(bench: Bench) -> None:
    """Relative error of the output and of each gradient against float64, causal."""
    bench.add_kernels("Attention, error against float64", bench.lengths[1], errors_of)


def errors_of(
    bench: Bench, kernel: KernelLibrary, dtype: torch.dtype, head_dim: int
) -> dict[str, object]:
    """A row; keys have as many heads as queries, which every kernel takes."""
    qkv = bench.qkv(bench.lengths[1], head_dim, dtype, 2, 2)
    served(kernel, qkv)
    scale = head_dim**-0.5
    grad_out = torch.randn_like(qkv[0])
    leaves = [x.double().requires_grad_() for x in qkv]
    scores = leaves[0] @ leaves[1].mT * scale
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ leaves[2]
    gradients = torch.autograd.grad(expected, leaves, grad_out.double())
    wanted = [expected.detach(), scores.logsumexp(-1).detach(), *gradients]
    out, lse = kernel.forward(qkv, True, scale)
    found = [out, lse, *kernel.backward(grad_out, out, lse, qkv, True, scale)]
    names = ("out", "lse", "dQ", "dK", "dV")
    relative = [
        float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)
    ]
    return dict(zip(names, relative, strict=True))


def chosen(bench: Bench) -> None:
    """The library that `precision="fast"` takes, and those that it passes over."""
    section = Section("Attention, library of precision=fast")
    for head_dim in HEAD_DIMS:
        for groups in (8, 2):
            qkv = bench.qkv(256, head_dim, torch.bfloat16, 8, groups)
            labels = {"D": head_dim, "query heads of a key head": 8 // groups}
            section.add(labels, lambda qkv=qkv: {"library": str(name_of(qkv))})
    section.add({"library": "all"}, lambda: {"state": libraries.state()})


def name_of(qkv: Qkv) -> str | None:
    """Name of the library for these tensors."""
    library = libraries.library_for(*qkv)
    return None if library is None else library.name


def rates(bench: Bench) -> None:
    """TFLOP/s of a causal block of the whole sequence, forward and backward."""
    bench.add_kernels("Attention, rate", bench.lengths[0], rate_of)


def rate_of(
    bench: Bench, kernel: KernelLibrary, dtype: torch.dtype, head_dim: int
) -> dict[str, object]:
    """A row: half of all pairs, two products forward and five backward."""
    length, heads = bench.lengths[0], 16
    qkv = bench.qkv(length, head_dim, dtype, heads, heads)
    served(kernel, qkv)
    scale, grad_out = head_dim**-0.5, torch.randn_like(qkv[0])
    out, lse = kernel.forward(qkv, True, scale)
    forward = bench.time(lambda: kernel.forward(qkv, True, scale))
    backward = bench.time(lambda: kernel.backward(grad_out, out, lse, qkv, True, scale))
    flop = 2 * 2 * heads * head_dim * length**2 / 2
    return {
        "forward us": forward,
        "backward us": backward,
        "forward TF": flop / forward / 1e6,
        "backward TF": 2.5 * flop / backward / 1e6,
    }


def ring(bench: Bench) -> None:
    """A step of a ring over 8 ranks: the keys of another rank, all of them seen."""
    section = Section("Ring attention, one step (H=32, 8 of keys, D=128)")
    for precision in ("fast", "exact"):
        for name in ("forward", "backward"):
            section.add(
                {"precision": precision, "pass": name, "L": bench.lengths[2]},
                lambda precision=precision, name=name: parts_of_step(bench, precision, name),
            )


def parts_of_step(bench: Bench, precision: str, name: str) -> dict[str, object]:
    """A row: the step, its kernels by kind, and a copy of what a hop moves."""
    heads, groups, head_dim = (4, 2, 16) if bench.small else (32, 8, 128)
    length = bench.lengths[2]
    q, k, v = bench.qkv(length, head_dim, torch.bfloat16, heads, groups)
    at = torch.arange(length, device=bench.device)
    runs = {"q_runs": (range(length, 2 * length),), "k_runs": (range(length),)}
    part = blocks.Block(q, k, v, at + length, at, **runs)
    options = blocks.BlockOptions(head_dim**-0.5, Mask(right=0), precision=precision)
    out = torch.zeros(q.shape, device=bench.device)
    lse = torch.full(q.shape[:3], -torch.inf, device=bench.device)
    blocks.attend_(out, lse, part, options)
    delta = ops.attention_delta(out, out)
    library = part.served(options)[0]

    def step() -> None:
        if name == "forward":
            blocks.attend_(out, lse, part, options)
        else:
            blocks.block_backward(out, lse, delta, part, options)

    found = profiled(step, bench.device)
    merge = found.microseconds("merge")
    copies = found.microseconds("memcpy", "memset", "copy", "elementwise", "fill", "cat")
    kept = (k.clone(), v.clone())
    return {
        "kernel": "ours" if library is None else library.name,
        "us": bench.time(step),
        "attention us": found.microseconds() - merge - copies,
        "merge us": merge,
        "copies us": copies,
        "launches": found.launches,
        "waits": found.waits,
        "copy of a hop us": bench.time(lambda: (kept[0].copy_(k), kept[1].copy_(v))),
    }


FAMILIES: dict[str, Callable[[Bench], None]] = {
    "chosen": chosen,
    "errors": errors,
    "rates": rates,
    "ring": ring,
}


def measure(device: torch.device, names: list[str], *, small: bool) -> int:
    """Shows figures of these families, and returns how many failed."""
    bench = Bench(device, small=small)
    card = Card(device, bench.time, 2**16 if small else 2**31)
    return measure_families(FAMILIES, names, bench, card)


if __name__ == "__main__":
    run_script(measure, FAMILIES)
