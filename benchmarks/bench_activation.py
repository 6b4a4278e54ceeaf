"""Gated activations against eager torch and against a copy of the same bytes."""

import torch
import torch.nn.functional as F
from _harness import (
    Table,
    clone_of,
    copy_of,
    interleaved,
    interleaved_fresh,
    milliseconds,
    ratio,
)

from moe_ext import ops

EAGER = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}
SHAPE = (4096, 2 * 1792)


def eager_gated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The eager code of a layer without the fused operator."""
    gate, up = x.chunk(2, dim=-1)
    return EAGER[kind](gate) * up


def activation_row(kind: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Rows of a kind and dtype: forward, and forward plus backward."""
    x = torch.randn(SHAPE).to(dtype)
    leaf = x.clone().requires_grad_()
    grad = torch.randn(SHAPE[0], SHAPE[1] // 2).to(dtype)
    num_bytes = x.nbytes * 3 // 2
    ours = {"ours": lambda: ops.gated_activation(x, kind=kind)}
    fresh = interleaved_fresh({**ours, "copy": clone_of(num_bytes)}, seconds=0.7)
    times = interleaved(
        {
            **ours,
            "eager": lambda: eager_gated(x, kind),
            "ours train": lambda: torch.autograd.grad(
                ops.gated_activation(leaf, kind=kind), leaf, grad
            ),
            "eager train": lambda: torch.autograd.grad(eager_gated(leaf, kind), leaf, grad),
            "copy": copy_of(num_bytes),
        }
    )
    share = times["copy"].median / times["ours"].median
    return (
        kind,
        str(dtype).removeprefix("torch."),
        milliseconds(times["ours"]),
        milliseconds(times["eager"]),
        ratio(times["eager"], times["ours"]),
        milliseconds(times["copy"]),
        f"{100 * share:.0f} %",
        milliseconds(fresh["ours"]),
        milliseconds(fresh["copy"]),
        milliseconds(times["ours train"]),
        ratio(times["eager train"], times["ours train"]),
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = (
        "kind",
        "dtype",
        "ms",
        "eager ms",
        "eager / ours",
        "copy ms",
        "share of copy bandwidth",
        "fresh ms",
        "fresh copy ms",
        "with backward ms",
        "eager / ours with backward",
    )
    note = (
        f"Input [{SHAPE[0]}, {SHAPE[1]}]. Bytes are counted as input read plus output written, "
        "each once; the copy moves as many in the same run, a `clone` where memory is fresh. In "
        "bfloat16 the functions decide: 6.9 instructions an output with AVX2 for geglu, 4.6 for "
        "swiglu and 2.2 for reglu (instructions.json)."
    )
    kinds = [(kind, dtype) for kind in EAGER for dtype in (torch.float32, torch.bfloat16)]
    return [Table("Gated activation", note, header, [activation_row(*kind) for kind in kinds])]
