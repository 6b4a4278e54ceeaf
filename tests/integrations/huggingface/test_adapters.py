"""Low-rank adapters on the stacked weights of experts."""

import pytest
import torch
from hf_models import NUM_BLOCKS, assert_near, build, make_batch, run
from torch import nn
from torch.nn.utils import parametrize

import moe_ext


class LowRank(nn.Module):
    """Adds a product of two small stacked matrices, as adapters on parameters do."""

    def __init__(self, weight):
        super().__init__()
        experts, outer, inner = weight.shape
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(0.1 * torch.randn(experts, 2, inner, generator=generator))
        self.b = nn.Parameter(0.1 * torch.randn(experts, outer, 2, generator=generator))

    def forward(self, weight):
        return weight + self.b @ self.a


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_parametrized_weights(family):
    model = build(family)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            experts = layer.mlp.experts
            parametrize.register_parametrization(experts, name, LowRank(getattr(experts, name)))
    model.set_experts_implementation("eager")
    want, want_grads = run(model, make_batch())
    assert moe_ext.replace(model) == NUM_BLOCKS
    got, grads = run(model, make_batch())
    assert_near(got.logits, want.logits)
    assert len(grads) == 4 * NUM_BLOCKS
    for name, gradient in grads.items():
        assert gradient.any(), name
        assert_near(gradient, want_grads[name])


@pytest.mark.parametrize("replace_first", [False, True])
def test_peft_targets(replace_first):
    peft = pytest.importorskip("peft")
    found = []
    for replaced in (False, True):
        model = build("mixtral", router_jitter_noise=0.1)
        model.set_experts_implementation("eager")
        if replaced and replace_first:
            moe_ext.replace(model)
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=4,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config)
        if replaced and not replace_first:
            assert moe_ext.replace(model) == NUM_BLOCKS
        found.append(run(model, make_batch()))
    (want, want_grads), (got, grads) = found
    assert_near(got.logits, want.logits)
    assert grads.keys() == want_grads.keys()
    for name, gradient in grads.items():
        assert_near(gradient, want_grads[name])
