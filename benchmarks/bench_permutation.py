"""Permutation against a copy of the same bytes and against indexing in eager torch."""

from collections.abc import Callable

import torch
from _harness import (
    Table,
    clone_of,
    copy_of,
    interleaved,
    interleaved_fresh,
    milliseconds,
    ratio,
)
from shapes import PERMUTATIONS, PermutationShape

from moe_ext import ops


def permute_row(shape: PermutationShape, dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Rows of a shape and dtype: the four passes, each beside eager torch and beside a copy."""
    num_slots = shape.num_tokens * shape.top_k
    x = torch.randn(shape.num_tokens, shape.model_dim).to(dtype)
    idx = torch.rand(shape.num_tokens, shape.num_experts).topk(shape.top_k).indices
    weights = torch.rand(shape.num_tokens, shape.top_k)
    rows, permutation = ops.permute_tokens(x, idx, shape.num_experts)
    grad = torch.randn_like(x)
    tables = (permutation.slot_of_row, permutation.row_of_slot)
    order = idx.flatten().argsort(stable=True)
    token = order // shape.top_k
    slot_weights = weights.flatten()[order].to(dtype)[:, None]
    op = torch.ops.moe_ext

    def eager_permute() -> torch.Tensor:
        return x[idx.flatten().argsort(stable=True) // shape.top_k]

    def eager_unpermute() -> torch.Tensor:
        return torch.zeros_like(x).index_add_(0, token, rows * slot_weights)

    def eager_unpermute_backward() -> tuple[torch.Tensor, torch.Tensor]:
        gathered = grad[token]
        return gathered * slot_weights, (gathered * rows).sum(dim=1)

    passes = {
        "permute": (
            lambda: ops.permute_tokens(x, idx, shape.num_experts),
            eager_permute,
            shape.num_tokens + num_slots,
        ),
        "unpermute": (
            lambda: ops.unpermute_tokens(rows, permutation, weights),
            eager_unpermute,
            shape.num_tokens + num_slots,
        ),
        "permute backward": (
            lambda: op.unpermute_tokens(rows, *tables, shape.top_k),
            lambda: torch.zeros_like(x).index_add_(0, token, rows),
            shape.num_tokens + num_slots,
        ),
        "unpermute backward": (
            lambda: op._unpermute_tokens_backward(grad, rows, *tables, weights),
            eager_unpermute_backward,
            shape.num_tokens + 2 * num_slots,
        ),
    }
    label = f"T={shape.num_tokens} D={shape.model_dim} E={shape.num_experts} K={shape.top_k}"
    names = (label, str(dtype).removeprefix("torch."))
    row_bytes = shape.model_dim * x.element_size()
    return [
        (name, *names, *_timed(ours, eager, rows_moved * row_bytes))
        for name, (ours, eager, rows_moved) in passes.items()
    ]


def _timed(
    ours: Callable[[], object], eager: Callable[[], object], num_bytes: int
) -> tuple[str, ...]:
    """Times in reused and in fresh memory, beside eager torch and a copy of as many bytes."""
    times = interleaved({"ours": ours, "eager": eager, "copy": copy_of(num_bytes)})
    fresh = interleaved_fresh({"ours": ours, "copy": clone_of(num_bytes)}, seconds=0.7)
    share = times["copy"].median / times["ours"].median
    return (
        milliseconds(times["ours"]),
        milliseconds(times["eager"]),
        ratio(times["eager"], times["ours"]),
        milliseconds(times["copy"]),
        f"{100 * share:.0f} %",
        milliseconds(fresh["ours"]),
        milliseconds(fresh["copy"]),
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = ("pass", "shape", "dtype", "ms", "eager ms", "eager / ours", "copy ms")
    header += ("share of copy bandwidth", "fresh ms", "fresh copy ms")
    note = (
        "Bytes are counted as rows read plus rows written, each once; the copy moves as many in "
        "the same run. "
        "Above 100 %: a copy reads each line that it writes, where results of 32 MiB and more are "
        "written past the caches; and a row read again soon is still in one. "
        "The copy alone, on a quiet AMD EPYC, moves 83 to 92 GB/s of 75 MB, 74 to 82 of 101 MB and "
        "64 to 69 of 201 MB, on pages of 4 KiB as on those of 2 MiB. "
        "By one thread, T=4096 and K=8, the place of the rows is not what unpermute takes: with "
        "rows in the order of the tokens (`row_of_slot` is `arange`) it takes 2.20 ms for 2.21 "
        "in bfloat16 and 6.28 for 6.73 in float32, where reading them alone (`max`) takes 1.85 "
        "and 3.89 and the copy 1.96 and 3.92; its backward takes 4.10 for 5.29 and 6.56 for "
        "9.22. A copy by two threads ends with the slower one: beside other work on one of the "
        "two processors 75 MB moved at 12 GB/s in the median and at 78 at best, by one thread "
        "at 43 and 48. "
        "A fresh copy is a `clone`. Eager is indexing and `index_add_`, with the sort where the "
        "pass needs it."
    )
    rows = []
    for shape in PERMUTATIONS:
        for dtype in (torch.float32, torch.bfloat16):
            rows += permute_row(shape, dtype)
    return [Table("Permutation", note, header, rows)]
