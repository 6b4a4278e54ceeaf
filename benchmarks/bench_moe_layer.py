"""The whole layer against the blocks of Hugging Face: same weights, same routing."""

import copy

import torch
from _harness import Table, interleaved, milliseconds, ratio
from shapes import LAYERS, LayerShape
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import moe_ext


def peers(shape: LayerShape, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """The Mixtral block under its two built-in implementations."""
    config = MixtralConfig(
        hidden_size=shape.model_dim,
        intermediate_size=shape.ffn_dim,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.02)
    blocks = {"grouped_mm": block.to(dtype)}
    for name in ("eager",):
        blocks[name] = copy.deepcopy(block)
        for module in blocks[name].modules():
            if hasattr(module, "config"):
                module.config = copy.deepcopy(module.config)
                module.config._experts_implementation = name
    return blocks


def ours_like(block: torch.nn.Module, shape: LayerShape, dtype: torch.dtype) -> moe_ext.MoELayer:
    """Our layer with the weights of a block."""
    layer = moe_ext.MoELayer(
        shape.model_dim,
        shape.ffn_dim,
        shape.num_experts,
        shape.top_k,
        balance_loss_coef=0.0,
        dtype=dtype,
    )
    with torch.no_grad():
        layer.router.weight.copy_(block.gate.weight)
        layer.experts.gate_up_proj.copy_(block.experts.gate_up_proj)
        layer.experts.down_proj.copy_(block.experts.down_proj)
    return layer


def layer_row(shape: LayerShape, num_tokens: int, dtype: torch.dtype) -> tuple[str, ...]:
    """One shape: outputs compared first, then timed."""
    blocks = peers(shape, dtype)
    blocks["ours"] = ours_like(blocks["grouped_mm"], shape, dtype)
    x = torch.randn(1, num_tokens, shape.model_dim).to(dtype)
    grad = torch.randn_like(x)
    with torch.no_grad():
        outputs = {name: block(x).float() for name, block in blocks.items()}
        theirs = blocks["grouped_mm"].gate(x.flatten(0, 1))[2]
        ours = blocks["ours"].router(x.flatten(0, 1)).gate.topk_idx
    alike = (theirs.sort(dim=1).values == ours.sort(dim=1).values).all(dim=1)
    difference = (outputs["ours"] - outputs["grouped_mm"])[0, alike].abs().max()
    worst = difference / outputs["grouped_mm"].abs().max()

    def train(block: torch.nn.Module) -> None:
        block.zero_grad(set_to_none=True)
        block(x.detach().requires_grad_()).backward(grad)

    times = interleaved(
        {name: (lambda block=block: train(block)) for name, block in blocks.items()}, seconds=4.0
    )
    return (
        shape.name,
        str(num_tokens),
        str(dtype).removeprefix("torch."),
        milliseconds(times["ours"]),
        milliseconds(times["grouped_mm"]),
        milliseconds(times["eager"]),
        ratio(times["grouped_mm"], times["ours"]),
        ratio(times["eager"], times["ours"]),
        f"{worst:.1e}",
        f"{100 * alike.float().mean():.1f} %",
    )


def tables() -> list[Table]:
    """The table of docs/benchmarks.md."""
    header = (
        "shape",
        "T",
        "dtype",
        "ms",
        "HF grouped_mm ms",
        "HF eager ms",
        "grouped_mm / ours",
        "eager / ours",
        "largest difference",
        "tokens routed alike",
    )
    note = (
        "Forward and backward of the layer beside `MixtralSparseMoeBlock` of transformers with the "
        "same weights. The difference is that of the outputs, relative to their largest value, "
        "over the tokens that both route alike: in bfloat16 the peer rounds its logits, we do not."
    )
    rows = [
        layer_row(shape, num_tokens, dtype)
        for shape in LAYERS
        for num_tokens in (64, 1024)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return [Table("Mixture-of-experts layer", note, header, rows)]
