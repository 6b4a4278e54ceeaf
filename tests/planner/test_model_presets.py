"""Parameters by formula against published sizes, and against modules of such shapes."""

import dataclasses

import pytest
import torch
from torch import nn

import moe_ext
from moe_ext.planner import PRESETS, ModelSpec, model_spec, preset


@pytest.mark.parametrize("name", PRESETS)
def test_published_sizes(name):
    spec = preset(name)
    # Sizes are published with two or three digits: 11B is 11.3 by T5's own count.
    assert spec.parameters() == pytest.approx(
        spec.published, rel={"t5-11b": 0.03, "kimi-k2": 0.015}.get(name, 0.01)
    )
    if spec.published_active:
        # GLaM's has three digits, 22B and 37B have two.
        exact = 0.002 if name == "glam" else 0.02
        assert spec.active_parameters() == pytest.approx(spec.published_active, rel=exact)
    if name == "gpt-oss-120b":
        without = spec.active_parameters() - spec.vocab_size * spec.model_dim
        assert without == pytest.approx(5.13e9, rel=0.01)
    if not spec.num_experts:
        assert spec.active_parameters() == spec.parameters() == spec.dense_parameters()
    assert spec.source


@pytest.mark.parametrize("gated", [False, True])
def test_formula_is_that_of_modules(gated):
    spec = ModelSpec(2, 16, 4, 24, 50, num_experts=6, top_k=2, num_moe_layers=1, gated=gated)
    spec = dataclasses.replace(spec, gated_experts=gated)
    activation = "swiglu" if gated else "gelu"
    with torch.device("meta"):
        moe = moe_ext.MoELayer(16, 24, 6, 2, activation=activation)
        attention = [nn.MultiheadAttention(16, 4, bias=False) for _ in range(2)]
        ffn = [nn.Linear(16, 24, bias=False) for _ in range(2 + gated)]
        modules = nn.ModuleList([moe, *attention, *ffn, nn.Embedding(50, 16)])
    assert spec.parameters() == sum(p.numel() for p in modules.parameters())
    unused = 4 * sum(p[0].numel() for p in moe.experts.parameters())
    assert spec.active_parameters() == spec.parameters() - unused


def test_refuses():
    with pytest.raises(ValueError, match=r"^preset: expected name to be of published sizes, got"):
        preset("wudao-2.0")
    with pytest.raises(ValueError, match=r"^preset: expected name to be one of \['deepseek-v3'"):
        preset("gpt-5")
    spec = PRESETS["glam"]
    for change, text in (
        ({"top_k": 65}, r"top_k to be in \[1, 64\] with experts and 0 without, got 65"),
        ({"num_moe_layers": 0}, "num_experts and num_moe_layers to be both zero or neither"),
        ({"num_moe_layers": 65}, r"num_moe_layers to be at most num_layers \(64\), got 65"),
    ):
        with pytest.raises(ValueError, match=text):
            dataclasses.replace(spec, **change)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mixtral-8x7b", "MixtralConfig"),
        ("deepseek-v3", "DeepseekV3Config"),
        ("gpt-oss-120b", "GptOssConfig"),
    ],
)
def test_sizes_are_the_defaults_of_transformers(name, config):
    """Those models are what the classes of their configurations default to."""
    transformers = pytest.importorskip("transformers")
    # Presets leave biases and norms out.
    found = dataclasses.replace(model_spec(getattr(transformers, config)().to_dict()), vectors=0)
    assert found.parameters() == preset(name).parameters()
    assert found.active_parameters() == preset(name).active_parameters()
