"""The layer on a GPU by tokens, operators, products and bytes, and the limits of the card.

    python benchmarks/gpu_layer_parts.py cuda [layer products ceilings memory peers]

Prints JSON line by line, a row of a table each. Shape suffixes: T tokens, D model, F ffn, E
experts, N rows.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from gpu_harness import (
    Absent,
    Card,
    Memory,
    Section,
    Timer,
    dtype_name,
    measure_families,
    profiled,
    run_script,
)
from shapes import EVEN, ZIPF, Case, LayerShape, Routing, tokens
from torch import Tensor, nn

import moe_ext
from moe_ext import ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Sizes:
    """Shape and numbers of tokens of a measurement, and its repeats."""

    shape: LayerShape
    tokens: tuple[int, ...]
    repeats: int
    copied: int


LARGE = Sizes(LayerShape("", 4096, 1024, 128, 8), (32768, 4096, 1024, 64), 10, 2**31)
SMALL = Sizes(LayerShape("", 64, 32, 8, 2), (64, 33), 2, 2**16)
# Operators that a table names, those that take longest.
MOST_OPERATORS = 16


class Bench:
    """A device, a timer and sizes."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.time = Timer(device, sizes.repeats)

    def case(self, num_tokens: int, dtype: torch.dtype, routing: Routing = EVEN) -> Case:
        """The shape with so many tokens."""
        return Case(self.sizes.shape, num_tokens, dtype, routing)

    def layer(self, case: Case) -> tuple[nn.Module, Tensor, Tensor]:
        """A layer, tokens that choose as the case says, and a gradient."""
        shape = case.shape
        sizes = (shape.model_dim, shape.ffn_dim, shape.num_experts, shape.top_k)
        layer = moe_ext.MoELayer(*sizes, device=self.device, dtype=case.dtype)
        with torch.no_grad():
            eye_ED = torch.eye(shape.num_experts, shape.model_dim, device=self.device)
            layer.router.weight.copy_(eye_ED)
        x = tokens(case).to(self.device).requires_grad_()
        return layer, x, torch.randn_like(x)

    def step(self, case: Case) -> Callable[[], None]:
        """A forward and backward pass."""
        layer, x, grad = self.layer(case)

        def run() -> None:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            layer(x).backward(grad)

        return run

    def rows(self, case: Case) -> tuple[Tensor, Tensor]:
        """Rows sorted by expert, and their offsets."""
        layer, x, _ = self.layer(case)
        with torch.no_grad():
            idx_TK = layer.router(x[0]).gate.topk_idx
            rows_ND, permutation = ops.permute_tokens(x[0], idx_TK, case.shape.num_experts)
        return rows_ND, permutation.expert_offsets


def labels_of(case: Case) -> dict[str, object]:
    """The first columns."""
    return {"T": case.num_tokens, "dtype": dtype_name(case.dtype), "routing": case.routing.name}


def layer(bench: Bench) -> None:
    """Time, kernels and launches of a step by tokens, dtype and routing; then by operator."""
    section = Section("Layer, forward and backward")
    most, *fewer = bench.sizes.tokens
    cases = [
        bench.case(most, BF16),
        *(bench.case(count, BF16) for count in fewer),
        bench.case(most, BF16, ZIPF),
        *(bench.case(fewer[0], dtype) for dtype in (FP16, FP32)),
        *(bench.case(most, dtype) for dtype in (FP16, FP32)),
    ]
    for case in cases:
        section.add(labels_of(case), lambda case=case: whole_step(bench, case))
    for count in (most, fewer[-1]):
        by_operator(bench, bench.case(count, BF16))


def whole_step(bench: Bench, case: Case) -> dict[str, object]:
    """A row: time of the device, of kernels alone and of the host, launches and waits."""
    run = bench.step(case)
    found = profiled(run, bench.device)
    return {
        "us": bench.time(run),
        "kernels us": found.microseconds(),
        "host us": bench.time.host(run),
        "launches": found.launches,
        "waits": found.waits,
    }


def by_operator(bench: Bench, case: Case) -> None:
    """The operators of a step that take longest, on the host or on the device."""
    section = Section(f"Operators of a step, T={case.num_tokens}")
    try:
        found = profiled(bench.step(case), bench.device).operators[:MOST_OPERATORS]
    except RuntimeError as error:
        why = error
        section.add({"operator": "all"}, lambda: raised(why))
        return
    for name, calls, host, kernels in found:
        row = {"calls": calls, "host us": host, "kernels us": kernels}
        section.add({"operator": name}, lambda row=row: row)


def raised(error: Exception) -> dict[str, object]:
    """Fails with an error of before."""
    raise error


def products(bench: Bench) -> None:
    """The grouped products apart: forward, and the gradients of rows and of weights."""
    section = Section("Grouped products")
    most = bench.sizes.tokens[0]
    cases = [bench.case(most, BF16), bench.case(most, BF16, ZIPF)]
    cases += [bench.case(most // 4, dtype) for dtype in (BF16, FP16, FP32)]
    for case in cases:
        for name, matrix in (("gate and up", True), ("down", False)):
            labels = {"product": name, **labels_of(case)}
            section.add(
                labels, lambda case=case, matrix=matrix: three_products(bench, case, matrix)
            )


def three_products(bench: Bench, case: Case, is_first: bool) -> dict[str, object]:
    """Microseconds of y = x W^T, dX and dW, and TFLOP/s beside one dense product of as many."""
    shape = case.shape
    rows_ND, offsets = bench.rows(case)
    num_rows = rows_ND.shape[0]
    k, m = shape.model_dim, 2 * shape.ffn_dim
    if not is_first:
        k, m = shape.ffn_dim, shape.model_dim
    options = {"device": bench.device, "dtype": case.dtype}
    x_NK = torch.randn(num_rows, k, **options)
    grad_NM = torch.randn(num_rows, m, **options)
    weight_EMK = torch.randn(shape.num_experts, m, k, **options)
    op = torch.ops.moe_ext
    times = {
        "forward": bench.time(lambda: ops.grouped_mm(x_NK, weight_EMK, offsets)),
        "dX": bench.time(lambda: ops.grouped_mm(grad_NM, weight_EMK.transpose(1, 2), offsets)),
        "dW": bench.time(lambda: op._grouped_mm_backward_weight(grad_NM, x_NK, offsets)),
    }
    # Our product beside torch's, where "auto" takes that one. The operator reads the variable.
    with mock.patch.dict(os.environ, MOE_EXT_GROUPED_MM="own"):
        times["ours forward"] = bench.time(lambda: ops.grouped_mm(x_NK, weight_EMK, offsets))
    dense = bench.time(lambda: x_NK @ weight_EMK[0].t())
    flop = 2 * num_rows * k * m
    found: dict[str, object] = {f"{name} us": us for name, us in times.items()}
    found |= {f"{name} TF": flop / us / 1e6 for name, us in times.items()}
    return {**found, "dense mm us": dense, "dense mm TF": flop / dense / 1e6}


def ceilings(bench: Bench) -> None:
    """Limits of the card: a copy, a gather of rows and products, with clocks and power."""
    section = Section("Ceilings")
    device, shape, most = bench.device, bench.sizes.shape, bench.sizes.tokens[0]
    options = {"device": device}

    def copy() -> dict[str, object]:
        source = torch.zeros(bench.sizes.copied // 2, dtype=torch.uint8, **options)
        target = torch.empty_like(source)
        us = bench.time(lambda: target.copy_(source))
        return {"us": us, "GB/s": bench.sizes.copied / us / 1e3}

    def gather(dtype: torch.dtype) -> dict[str, object]:
        x_TD = torch.randn(most, shape.model_dim, **options).to(dtype)
        idx_N = torch.randint(most, (most * shape.top_k,), **options)
        us = bench.time(lambda: x_TD.index_select(0, idx_N))
        num_bytes = x_TD.nbytes * (1 + shape.top_k)
        return {"us": us, "GB/s": num_bytes / us / 1e3}

    def product(dtype: torch.dtype) -> dict[str, object]:
        n = 8192 if device.type == "cuda" else 64
        a, b = (torch.randn(n, n, **options).to(dtype) for _ in range(2))
        us = bench.time(lambda: a @ b)
        return {"us": us, "TF": 2 * n**3 / us / 1e6}

    section.add({"what": "copy", "dtype": "bytes"}, copy)
    for dtype in (BF16, FP32):
        name = dtype_name(dtype)
        section.add(
            {"what": f"index_select of rows, {shape.top_k} a token", "dtype": name},
            lambda dtype=dtype: gather(dtype),
        )
    for dtype in (BF16, FP16, FP32):
        section.add(
            {"what": "square mm", "dtype": dtype_name(dtype)}, lambda dtype=dtype: product(dtype)
        )


def memory(bench: Bench) -> None:
    """Bytes kept between the passes and at the peak, beside the sums in docs/design.md."""
    section = Section("Memory of a step")
    most = bench.sizes.tokens[0]
    for case in (bench.case(most, BF16), bench.case(most, BF16, ZIPF), bench.case(most // 4, FP32)):
        section.add(labels_of(case), lambda case=case: bytes_of_a_step(bench, case))


def bytes_of_a_step(bench: Bench, case: Case) -> dict[str, object]:
    """A row: measured, and expected."""
    shape, size, num_tokens = case.shape, case.dtype.itemsize, case.num_tokens
    num_rows, model_dim, up_dim = num_tokens * shape.top_k, shape.model_dim, 2 * shape.ffn_dim
    kept = num_rows * (model_dim + up_dim + shape.ffn_dim) * size
    kept += num_tokens * shape.num_experts * 4 + num_rows * (8 + 8 + 4 + 8)
    # Gradients of weights, rows and up projection, beside the rows, the output and its gradient.
    peak = 3 * shape.num_experts * model_dim * shape.ffn_dim * size
    peak += num_rows * (2 * model_dim + up_dim) * size + 2 * num_tokens * model_dim * size
    found: dict[str, object] = {"kept MB, expected": kept / 1e6, "peak MB, expected": peak / 1e6}
    layer, x, grad = bench.layer(case)
    layer(x).backward(grad)
    x.grad = None
    layer.zero_grad(set_to_none=True)
    memory = Memory(bench.device)
    y = layer(x)
    between = memory.now - y.nbytes
    y.backward(grad)
    return {"kept MB": between / 1e6, "peak MB": memory.peak / 1e6, **found}


PEERS = ("grouped_mm", "sonicmoe")


def peers(bench: Bench) -> None:
    """The block of transformers by its products, and ours with its weights."""
    section = Section("Layers of other libraries, forward and backward")
    for count in bench.sizes.tokens[:2]:
        case = bench.case(count, BF16)
        for name in ("MoELayer", *PEERS):
            section.add(
                {"layer": name, **labels_of(case)},
                lambda case=case, name=name: peer_step(bench, case, name),
            )


def peer_step(bench: Bench, case: Case, name: str) -> dict[str, object]:
    """A row of a contender."""
    if importlib.util.find_spec("transformers") is None:
        raise Absent("transformers is not installed")
    from layer_peers import hf_block, our_layer, train
    from transformers.integrations import moe

    known = getattr(moe, "ALL_EXPERTS_FUNCTIONS", {})
    if name != "MoELayer" and name not in known:
        raise Absent(f"this transformers has no {name}")
    if name == "sonicmoe" and importlib.util.find_spec("kernels") is None:
        raise Absent("the package kernels is not installed")
    block = hf_block(case, "grouped_mm" if name == "MoELayer" else name, device=bench.device)
    layer = our_layer(case, block) if name == "MoELayer" else block
    x = tokens(case).to(bench.device)
    grad = torch.randn_like(x)

    def run() -> None:
        train(layer, x, grad)

    found = profiled(run, bench.device)
    return {
        "us": bench.time(run),
        "kernels us": found.microseconds(),
        "launches": found.launches,
        "waits": found.waits,
    }


FAMILIES: dict[str, Callable[[Bench], None]] = {
    "layer": layer,
    "products": products,
    "ceilings": ceilings,
    "memory": memory,
    "peers": peers,
}


def measure(device: torch.device, names: list[str], *, small: bool) -> int:
    """Shows figures of these families, and returns how many failed."""
    bench = Bench(device, SMALL if small else LARGE)
    card = Card(device, bench.time, bench.sizes.copied)
    return measure_families(FAMILIES, names, bench, card)


if __name__ == "__main__":
    run_script(measure, FAMILIES)
