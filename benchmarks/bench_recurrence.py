"""State spaces, delta rules and convolutions of one process beside transformers' own in torch.

Shape suffixes: B batch, L positions, H heads, K and V dims of a state, D channels.
"""

from collections.abc import Callable

import torch
from _harness import Table, interleaved, milliseconds, ratio
from torch import Tensor
from torch.nn import functional as F

from moe_ext.attention import causal_conv1d, gated_delta_rule, selective_scan

LENGTH = 4096
Function = Callable[[], Tensor]


def leaf(*shape: int) -> Tensor:
    """Normal numbers that want a gradient."""
    return torch.randn(*shape).requires_grad_()


def pair_of_delta(heads: int, dim: int) -> tuple[Function, Function]:
    """Ours and transformers', of Qwen3-Next."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = (F.normalize(torch.randn(1, LENGTH, heads, dim), dim=-1) for _ in range(2))
    v = torch.randn(1, LENGTH, heads, dim)
    g, beta = -0.1 * torch.rand(1, LENGTH, heads), torch.rand(1, LENGTH, heads)
    given = [x.requires_grad_() for x in (q, k, v, g, beta)]
    return (
        lambda: gated_delta_rule(*[x.transpose(1, 2) for x in given])[0].transpose(1, 2),
        lambda: torch_chunk_gated_delta_rule(*given)[0],
    )


def pair_of_mamba2(heads: int, dim: int) -> tuple[Function, Function]:
    """Ours and transformers', of Mamba-2."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, b, c = leaf(1, LENGTH, heads, 64), leaf(1, LENGTH, 1, dim), leaf(1, LENGTH, 1, dim)
    dt = (0.1 * torch.rand(1, LENGTH, heads)).requires_grad_()
    rates, skip = (-torch.rand(heads)).requires_grad_(), leaf(heads)
    turned = [t.transpose(1, 2) for t in (x, dt, b, c)]
    return (
        lambda: selective_scan(*turned[:2], rates, *turned[2:], skip)[0].transpose(1, 2),
        lambda: mamba2_chunk_scan(x, dt, rates, b, c, 256, skip),
    )


def pair_of_mamba(channels: int, dim: int, length: int) -> tuple[Function, Function]:
    """Ours and transformers', of Mamba."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    x, b, c = leaf(1, channels, length), leaf(1, dim, length), leaf(1, dim, length)
    dt = (0.1 * torch.rand(1, channels, length)).requires_grad_()
    rates, skip = (-torch.rand(channels, dim)).requires_grad_(), leaf(channels)
    turned = [t.mT.unsqueeze(1) for t in (b, c)]
    return (
        lambda: selective_scan(x.unsqueeze(-1), dt, rates, *turned, skip)[0].squeeze(-1),
        lambda: mamba_selective_scan(x, dt, rates, b, c, skip),
    )


def pair_of_convolution(channels: int, taps: int) -> tuple[Function, Function]:
    """Ours and transformers', of all of these."""
    from transformers.models.mamba.modeling_mamba import causal_conv1d_fn

    # Rows of positions, as a projection leaves them.
    x, weight, bias = leaf(1, LENGTH, channels), leaf(channels, taps), leaf(channels)
    return (
        lambda: causal_conv1d(x.mT, weight, bias, activation="silu"),
        lambda: causal_conv1d_fn(x.mT, weight, bias, activation="silu"),
    )


CASES = {
    "gated delta rule, H=8 K=V=64": lambda: pair_of_delta(8, 64),
    "gated delta rule, H=8 K=V=128": lambda: pair_of_delta(8, 128),
    "Mamba-2, H=4 K=64 V=64": lambda: pair_of_mamba2(4, 64),
    # The backward pass of transformers' loop takes time that grows with the square of L.
    "Mamba, D=256 K=16, L=512": lambda: pair_of_mamba(256, 16, 512),
    "convolution, D=2048 W=4": lambda: pair_of_convolution(2048, 4),
}


def trained(function: Function) -> Callable[[], object]:
    """Forward and backward."""
    grad = torch.randn_like(function())
    return lambda: function().backward(grad)


def row(name: str) -> tuple[str, ...]:
    """Rows of a recurrence: forward, and forward plus backward."""
    ours, theirs = CASES[name]()
    with torch.no_grad():
        torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-3)
    runs = {"ours train": trained(ours), "theirs train": trained(theirs)}

    def alone(function: Function) -> Callable[[], object]:
        return torch.no_grad()(function)

    runs |= {"ours": alone(ours), "theirs": alone(theirs)}
    times = interleaved(runs, seconds=2, warmup=1, least=2)
    return (
        name,
        milliseconds(times["ours"]),
        milliseconds(times["theirs"]),
        ratio(times["theirs"], times["ours"]),
        milliseconds(times["ours train"]),
        milliseconds(times["theirs train"]),
        ratio(times["theirs train"], times["ours train"]),
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = (
        "recurrence",
        "ms",
        "transformers ms",
        "transformers / ours",
        "with backward ms",
        "transformers with backward ms",
        "transformers / ours with backward",
    )
    note = (
        f"float32, batch 1, {LENGTH} positions where no L is given, one process; transformers' "
        "functions in torch, which its models run where no CUDA kernels are installed."
    )
    return [Table("Recurrences", note, header, [row(name) for name in CASES])]
