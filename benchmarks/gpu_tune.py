"""Alternatives beside each other on one GPU: products, kernels of attention, streams of a pipeline.

    python benchmarks/gpu_tune.py cuda [products attention pipelines]

Prints JSON line by line, a row for each choice; tools/gpu_check.py --tune writes which won.
"""

import os
from collections.abc import Callable
from functools import partial
from unittest import mock

import gpu_attention
import gpu_layer_parts
import torch
from gpu_harness import Absent, Card, Section, measure_families, run_script
from shapes import ZIPF, Case
from torch.nn import functional

from moe_ext.attention.libraries import KernelLibrary
from moe_ext.ops import grouped_providers
from moe_ext.pipeline import Pipeline, make_table


class Bench:
    """The layer's and the attention's."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        sizes = gpu_layer_parts.SMALL if small else gpu_layer_parts.LARGE
        self.layer = gpu_layer_parts.Bench(device, sizes)
        self.attention = gpu_attention.Bench(device, small=small)


def products(bench: Bench) -> None:
    """A layer's step with each value of MOE_EXT_GROUPED_MM."""
    section, layer = Section("MOE_EXT_GROUPED_MM, layer forward and backward"), bench.layer
    (most, fewer), least = layer.sizes.tokens[:2], layer.sizes.tokens[-1]
    bf16, fp16, fp32 = gpu_layer_parts.BF16, gpu_layer_parts.FP16, gpu_layer_parts.FP32
    cases = [layer.case(count, bf16) for count in dict.fromkeys((most, fewer, least))]
    cases += [layer.case(most, bf16, ZIPF), layer.case(fewer, fp16), layer.case(fewer, fp32)]
    for case in cases:
        for choice in grouped_providers.CHOICES:
            labels = {**gpu_layer_parts.labels_of(case), "choice": choice}
            section.add(labels, partial(step_with, layer, case, choice))


def step_with(bench: gpu_layer_parts.Bench, case: Case, choice: str) -> dict[str, object]:
    """A row. The operator reads the variable at each call, Python when it is imported."""
    if choice == "quack" and isinstance(grouped_providers.quack(), str):
        raise Absent(f"quack-kernels: {grouped_providers.quack()}")
    with (
        mock.patch.dict(os.environ, MOE_EXT_GROUPED_MM=choice),
        mock.patch.object(grouped_providers, "CHOSEN", choice),
    ):
        return {"us": bench.time(bench.step(case))}


def attention(bench: Bench) -> None:
    """A causal block by each kernel that serves it, forward and backward."""
    title, length = "Attention, forward and backward", bench.attention.lengths[0]
    bench.attention.add_kernels(title, length, block_by)


def block_by(
    bench: gpu_attention.Bench, kernel: KernelLibrary, dtype: torch.dtype, head_dim: int
) -> dict[str, object]:
    """A row."""
    found = gpu_attention.rate_of(bench, kernel, dtype, head_dim)
    passes = [found[f"{name} us"] for name in ("forward", "backward")]
    return {"choice": kernel.name, "us": sum(map(float, passes)), **found}


def pipelines(bench: Bench) -> None:
    """A step of two stages on one rank, without a message to wait for, by the stream of W."""
    section = Section("W of a pipeline on one rank, ZB-V")
    case = bench.layer.case(bench.layer.sizes.tokens[1], gpu_layer_parts.BF16)
    for choice in ("main stream", "stream of its own"):
        labels = {"T": case.num_tokens, "choice": choice}
        section.add(labels, partial(step_on, bench.layer, case, choice))


def step_on(bench: gpu_layer_parts.Bench, case: Case, choice: str) -> dict[str, object]:
    """A row."""
    table = make_table("zbv", 1, 4)
    stages = {i: bench.layer(case)[0] for i in range(table.num_stages)}
    batches = [bench.layer(case)[1].detach()] * table.num_micro_batches
    pipeline = Pipeline(
        table, stages, functional.mse_loss, weight_stream=choice == "stream of its own"
    )
    return {"us": bench.time(partial(pipeline.step, batches, batches))}


FAMILIES: dict[str, Callable[[Bench], None]] = {
    "products": products,
    "attention": attention,
    "pipelines": pipelines,
}


def measure(device: torch.device, names: list[str], *, small: bool) -> int:
    """Shows figures of these families, and returns how many failed."""
    bench = Bench(device, small=small)
    card = Card(device, bench.layer.time, bench.layer.sizes.copied)
    return measure_families(FAMILIES, names, bench, card)


if __name__ == "__main__":
    run_script(measure, FAMILIES)
