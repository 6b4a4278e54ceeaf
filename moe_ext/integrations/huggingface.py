"""Hugging Face transformers 5: moe_ext as the experts implementation of a model.

Shapes: T tokens, D model, F ffn, E experts, K top-k, N = T*K rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_ext import ops
from moe_ext.ops.grouped_gemm import row_alignment

IMPLEMENTATION = "moe_ext"

# Family to the module and class of its experts.
_FAMILIES = {
    "mixtral": ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts"),
    "qwen3_moe": ("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"),
}
_GATED_KINDS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}


def _experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts of a block, with the signature of transformers' `ExpertsInterface`."""
    rows_ND, permutation = ops.permute_tokens(
        hidden_states,
        top_k_index,
        self.num_experts,
        align=row_alignment(hidden_states, top_k_index.numel(), self.num_experts),
    )
    offsets = permutation.expert_offsets
    up = ops.grouped_mm(rows_ND, self.gate_up_proj, offsets)
    kind = _GATED_KINDS.get(getattr(self.config, "hidden_act", ""))
    hidden = self._apply_gate(up) if kind is None else ops.gated_activation(up, kind=kind)
    out_ND = ops.grouped_mm(hidden, self.down_proj, offsets)
    return ops.unpermute_tokens(out_ND, permutation, top_k_weights).to(hidden_states.dtype)


def _import_transformers() -> Any:
    try:
        moe = importlib.import_module("transformers.integrations.moe")
        moe.ExpertsInterface.register  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "replace: expected transformers 5 or later to be installed, "
            f"try `pip install 'transformers>=5'` ({error})"
        ) from error
    return importlib.import_module("transformers"), moe


def _find_experts(model: nn.Module, operation: str) -> list[nn.Module]:
    """The experts modules of a model of a known family; ValueError where anything differs."""
    transformers, _ = _import_transformers()
    known = " or ".join(sorted(_FAMILIES))
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(
            f"{operation}: expected model to be a transformers model of family {known}, got "
            f"{type(model).__name__}"
        )
    family = getattr(model.config, "model_type", None)
    if family not in _FAMILIES:
        raise ValueError(f"{operation}: expected model to be of family {known}, got {family!r}")
    module_name, class_name = _FAMILIES[family]
    experts_class = getattr(importlib.import_module(module_name), class_name)
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        if type(module) is not experts_class:
            raise ValueError(
                f"{operation}: expected {name} to be a plain {class_name}, got "
                f"{type(module).__name__}"
            )
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(
                f"{operation}: expected all experts of {name} on this rank, got a model that "
                "transformers has made expert parallel"
            )
        found.append(module)
    return found


def replace(model: nn.Module, *, ep_group: ProcessGroup | None = None) -> int:
    """Run the experts of a Hugging Face Mixtral or Qwen3-MoE model by moe_ext.

    The model keeps its modules, parameters and their names; what changes is the function that its
    experts call. So router logits, the auxiliary loss, gradient checkpointing, `save_pretrained`
    and optimizers that already hold the parameters work as before.
    `model.set_experts_implementation("eager")` goes back. Importing this package's integration
    registers nothing; the first call registers the implementation "moe_ext" with transformers, and
    a model can then also be loaded with `experts_implementation="moe_ext"`.

    Args:
        model: a transformers 5 model of family "mixtral" or "qwen3_moe".
        ep_group: None in this version.

    Returns:
        Number of expert blocks that now run on moe_ext.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: another family, experts of another class (quantised, say), or an ep_group. The
            model is unchanged.
    """
    if ep_group is not None:
        raise ValueError(
            "replace: expected ep_group to be None in this version (moe_ext.MoELayer takes one), "
            f"got {ep_group}"
        )
    experts = _find_experts(model, "replace")
    _, moe = _import_transformers()
    moe.ExpertsInterface.register(IMPLEMENTATION, _experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return len(experts)


@dataclass(frozen=True)
class VerifyReport:
    """Largest differences between moe_ext and the original implementation, absolute and relative.

    Attributes:
        logits: largest absolute difference of the logits.
        logits_scale: largest magnitude of the original logits.
        gradients: parameter name to (largest absolute difference, largest original magnitude).
    """

    logits: float
    logits_scale: float
    gradients: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        lines = [f"logits: max difference {self.logits:.3g} of {self.logits_scale:.3g}"]
        worst = sorted(self.gradients.items(), key=lambda item: -item[1][0] / (item[1][1] or 1.0))
        for name, (difference, scale) in worst[:5]:
            lines.append(f"gradient of {name}: max difference {difference:.3g} of {scale:.3g}")
        lines.append(f"({len(self.gradients)} gradients compared, the largest ratios shown)")
        return "\n".join(lines)


def _run(
    model: Any, batch: Mapping[str, Tensor], implementation: str, seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients under one implementation; leaves `.grad` alone."""
    model.set_experts_implementation(implementation)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(seed)
        output = model(**batch)
        loss = output.loss if getattr(output, "loss", None) is not None else None
        if loss is None:
            loss = output.logits.float().square().mean()
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    pairs = zip(named, gradients, strict=True)
    return output.logits.detach(), {name: g for (name, _), g in pairs if g is not None}


def verify(model: nn.Module, batch: Mapping[str, Tensor], *, seed: int = 0) -> VerifyReport:
    """Compare moe_ext with the original experts on the caller's own batch, and print the result.

    Args:
        model: a model that `replace` takes, replaced or not. Its implementation, its gradients and
            the random state are afterwards as before.
        batch: keyword arguments of the model, such as `input_ids` and `labels`. Without a loss in
            the output the gradients are those of the mean square of the logits.
        seed: seed of both runs, for dropout.

    Returns:
        The largest differences of logits and of every gradient.

    Raises:
        ImportError: transformers 5 is not installed.
        ValueError: a model that `replace` refuses.
    """
    _find_experts(model, "verify")
    before = model.get_experts_implementation()  # type: ignore[operator]
    try:
        original_logits, original = _run(model, batch, "eager", seed)
        replace(model)
        logits, gradients = _run(model, batch, IMPLEMENTATION, seed)
    finally:
        model.set_experts_implementation(before)  # type: ignore[operator]
    differences = {
        name: (
            (gradients[name] - original[name]).abs().max().item(),
            original[name].abs().max().item(),
        )
        for name in original
    }
    report = VerifyReport(
        (logits - original_logits).abs().max().item(),
        original_logits.abs().max().item(),
        differences,
    )
    print(report)
    return report
