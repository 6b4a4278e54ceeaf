"""Gating against softmax, topk, renormalise and bincount in eager torch."""

import torch
from _harness import Table, copy_of, interleaved, milliseconds, ratio

from moe_ext import ops

SHAPES = ((16384, 64, 8), (16384, 8, 2), (1024, 64, 8))


def eager_gate(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """The eager code of a layer without the fused operator."""
    scores = logits.softmax(dim=-1)
    weights, idx = scores.topk(top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, idx, idx.flatten().bincount(minlength=logits.shape[1]), scores.sum(dim=0)


def gate_row(num_tokens: int, num_experts: int, top_k: int) -> tuple[str, ...]:
    """Rows of a shape: forward, and forward plus backward."""
    logits = torch.randn(num_tokens, num_experts)
    leaf = logits.clone().requires_grad_()
    grad = torch.randn(num_tokens, top_k)
    grad_sum = torch.randn(num_experts)

    def train(gate: object) -> None:
        weights, _, _, score_sum = gate(leaf, top_k)  # type: ignore[operator]
        torch.autograd.grad((weights, score_sum), leaf, (grad, grad_sum))

    times = interleaved(
        {
            "ours": lambda: ops.topk_gate(logits, top_k),
            "eager": lambda: eager_gate(logits, top_k),
            "ours train": lambda: train(ops.topk_gate),
            "eager train": lambda: train(eager_gate),
            "copy": copy_of(2 * logits.nbytes),
        }
    )
    return (
        f"T={num_tokens} E={num_experts} K={top_k}",
        milliseconds(times["ours"]),
        milliseconds(times["eager"]),
        ratio(times["eager"], times["ours"]),
        milliseconds(times["ours train"]),
        milliseconds(times["eager train"]),
        ratio(times["eager train"], times["ours train"]),
        milliseconds(times["copy"]),
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = (
        "shape",
        "ms",
        "eager ms",
        "eager / ours",
        "with backward ms",
        "eager with backward ms",
        "eager / ours with backward",
        "copy of the logits ms",
    )
    note = "float32 logits, softmax before top-k, renormalised; eager is softmax, topk, bincount."
    return [Table("Gating", note, header, [gate_row(*shape) for shape in SHAPES])]
