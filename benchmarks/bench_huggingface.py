"""Whole models of transformers: a replaced one beside every implementation of its own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _harness import Runs, Table, interleaved, milliseconds, ratio
from layer_peers import expert_products
from shapes import MIXTRAL_SMALL, QWEN3_SMALL, LayerShape
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ext

VOCABULARY = 1024
LAYERS = 2
BUILT_IN = ("eager", "grouped_mm", "batched_mm")
# batched_mm gathers a weight for every choice of every token, and keeps it: 6 MB each for A.
BATCHED_TOKENS = 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A measurement: a family, the tokens of a step and their dtype."""

    family: str
    shape: LayerShape
    num_tokens: int
    dtype: torch.dtype

    @property
    def labels(self) -> tuple[str, ...]:
        """The first columns of a table."""
        return self.family, str(self.num_tokens), str(self.dtype).removeprefix("torch.")


def build(case: Case) -> nn.Module:
    """The family's model with the layer's proportions, two layers deep."""
    shape = case.shape
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.model_dim,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts_per_tok": shape.top_k,
    }
    torch.manual_seed(0)
    if case.family == "Mixtral":
        config = MixtralConfig(
            **common, intermediate_size=shape.ffn_dim, num_local_experts=shape.num_experts
        )
        model: nn.Module = MixtralForCausalLM(config)
    else:
        config = Qwen3MoeConfig(
            **common,
            head_dim=64,
            moe_intermediate_size=shape.ffn_dim,
            num_experts=shape.num_experts,
            norm_topk_prob=True,
        )
        model = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.gate.weight, std=0.02)
    return model.to(case.dtype)


def batch_of(case: Case) -> dict[str, Tensor]:
    """Random tokens in sequences of 512 at most."""
    length = min(case.num_tokens, 512)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (case.num_tokens // length, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def contenders(case: Case) -> dict[str, nn.Module]:
    """A copy of the model for each implementation, with the same weights."""
    model = build(case)
    models = {}
    for name in ("ours", *BUILT_IN):
        if name == "batched_mm" and case.num_tokens > BATCHED_TOKENS:
            continue
        models[name] = copy.deepcopy(model)
        if name == "ours":
            moe_ext.replace(models[name])
        else:
            models[name].set_experts_implementation(name)
    return models


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Forward and backward; the optimizer would be the same for all."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def check_losses(case: Case, models: dict[str, nn.Module], batch: dict[str, Tensor]) -> None:
    """RuntimeError where a contender computes something else."""
    losses = {name: float(step(model, batch)) for name, model in models.items()}
    for name, loss in losses.items():
        if abs(loss - losses["grouped_mm"]) > TOLERANCE[case.dtype] * losses["grouped_mm"]:
            raise RuntimeError(
                f"bench_huggingface: expected the loss of {name} to be that of grouped_mm for "
                f"{case}, got {losses}"
            )


def experts_part(
    case: Case, model: nn.Module, batch: dict[str, Tensor]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The experts of all layers, forward and backward on what the model gives them; their products.

    Products are the six of each expert on the same rows, and nothing else.
    """
    calls: list[tuple[nn.Module, tuple[Tensor, ...]]] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda m, args: calls.append((m, args)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    inputs = []
    products = []
    for experts, (x, index, weights) in calls:
        inputs.append((experts, x.detach(), index, weights.detach(), torch.randn_like(x)))
        counts = index.flatten().bincount(minlength=case.shape.num_experts).tolist()
        products.append(expert_products(case.shape, case.dtype, counts))

    def run() -> None:
        for experts, x, index, weights, grad in inputs:
            experts.zero_grad(set_to_none=True)
            y = experts(x.requires_grad_(), index, weights.requires_grad_())
            inputs_and_weights = [x, weights, *experts.parameters()]
            torch.autograd.grad(y, inputs_and_weights, grad)

    return run, lambda: [product() for product in products]


def row_of(case: Case) -> tuple[str, ...]:
    """Compare the losses of a case, then time it."""
    models, batch = contenders(case), batch_of(case)
    check_losses(case, models, batch)
    runs: Runs = {
        name: (lambda model=model: step(model, batch))  # type: ignore[misc]
        for name, model in models.items()
    }
    times = interleaved(runs, seconds=1.5 * len(runs), warmup=1, least=5)
    part, products = experts_part(case, models["ours"], batch)
    inner = interleaved({"part": part, "products": products}, seconds=2.0, least=7)
    cells = [milliseconds(times["ours"])]
    for name in BUILT_IN:
        known = name in times
        cells.append(milliseconds(times[name]) if known else "-")
        cells.append(ratio(times[name], times["ours"]) if known else "-")
    cells += [milliseconds(inner["part"]), milliseconds(inner["products"])]
    return *case.labels, *cells, ratio(inner["part"], inner["products"])


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    families = (("Mixtral", MIXTRAL_SMALL), ("Qwen3-MoE", QWEN3_SMALL))
    cases = [
        Case(family, shape, num_tokens, dtype)
        for family, shape in families
        for num_tokens in (64, 1024, 4096)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    header = ["model", "T", "dtype", "ours ms"]
    for name in BUILT_IN:
        header += [f"{name} ms", f"{name} / ours"]
    header += ["experts ms", "products ms", "experts / products"]
    note = (
        "Forward and backward of a whole model of transformers, without the optimizer: two layers "
        "of width 512 with attention, embeddings and head, the experts as A (Mixtral) and B "
        "(Qwen3-MoE) above. *ours* is the model after `moe_ext.replace`, the others are "
        "transformers' own implementations of the experts on the same weights and tokens; their "
        "losses are compared before. `batched_mm` keeps a copy of the weights for every choice of "
        "every token, tens of gigabytes above T = 64. *experts* is the experts' part of our step "
        "by itself, from hidden states and routing to gradients of both and of the weights; "
        "*products* are its matrix products alone, on the same rows into memory that is there "
        "already."
    )
    return [Table("Models of transformers", note, tuple(header), [row_of(c) for c in cases])]
