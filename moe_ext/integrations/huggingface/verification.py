"""Compares a replaced model with the original, on the caller's own batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext.integrations.huggingface.decorated import ReplacedParts, find, restore
from moe_ext.integrations.huggingface.expert_parallel import ShardedExperts
from moe_ext.integrations.huggingface.experts import IMPLEMENTATION
from moe_ext.integrations.huggingface.replacement import register


@dataclass(frozen=True)
class VerifyReport:
    """Largest differences between moe_ext and the original implementation, absolute and relative.

    Attributes:
        logits: largest absolute difference of the logits, or of the hidden states of a model
            without a head.
        logits_scale: largest magnitude of the original logits.
        gradients: parameter name to (largest absolute difference, largest original magnitude).
    """

    logits: float
    logits_scale: float
    gradients: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        lines = [f"logits: max difference {self.logits:.3g} of {self.logits_scale:.3g}"]

        def ratio(item: tuple[str, tuple[float, float]]) -> float:
            difference, scale = item[1]
            found = difference / (scale or 1.0)
            return math.inf if math.isnan(found) else found

        for name, (difference, scale) in heapq.nlargest(5, self.gradients.items(), key=ratio):
            lines.append(f"gradient of {name}: max difference {difference:.3g} of {scale:.3g}")
        lines.append(f"({len(self.gradients)} gradients compared, the largest ratios shown)")
        return "\n".join(lines)


def _logits(output: Any) -> Tensor:
    """Return the logits of an output, or the hidden states of a model without a head."""
    logits: Tensor | None = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def _run(
    found: ReplacedParts, batch: Mapping[str, Tensor], implementation: str, seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients with one implementation. `.grad` is not touched."""
    model = found.model
    found.set_implementation(implementation)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            logits = _logits(output).float()
            # A model without a head ends in a norm, which nearly fixes the plain mean square, so
            # that its gradient would be nearly zero. Columns are therefore weighted.
            columns = torch.linspace(0.5, 1.5, logits.shape[-1], device=logits.device)
            loss = (logits * columns).square().mean()
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    pairs = zip(named, gradients, strict=True)
    return _logits(output).detach(), {name: g for (name, _), g in pairs if g is not None}


def _compared(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest magnitude in `wanted`."""
    return (found - wanted).abs().max().item(), wanted.abs().max().item()


def verify(model: nn.Module, batch: Mapping[str, Tensor], *, seed: int = 0) -> VerifyReport:
    """Compare moe_ext with the original experts on the caller's own batch, and print the result.

    Args:
        model: a model that `replace` accepts, replaced or not. Its implementation, its gradients
            and the random state are unchanged afterwards.
        batch: keyword arguments of the model, such as `input_ids` and `labels`. If the output has
            no loss, the gradients are those of a weighted mean square of the logits.
        seed: seed of both runs, for dropout.

    Returns:
        The largest differences of logits and of every gradient.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: `replace` would refuse the model.
    """
    found = find(model, "verify")
    for name, module in found.experts.items():
        if isinstance(module, ShardedExperts):
            raise ValueError(
                f"verify: expected all experts of {name} on this rank, got experts spread over "
                "ranks; verify before replace(model, ep_group=...)"
            )
    before = found.implementations()
    try:
        original_logits, original = _run(found, batch, "eager", seed)
        register()
        logits, gradients = _run(found, batch, IMPLEMENTATION, seed)
    finally:
        restore(before)
    differences = {name: _compared(gradients[name], wanted) for name, wanted in original.items()}
    report = VerifyReport(*_compared(logits, original_logits), differences)
    print(report)
    return report
