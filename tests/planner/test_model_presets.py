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


def test_latent_attention_is_that_of_its_paper():
    """DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19: a matrix each, of unlike sizes."""
    dim, heads, queries, keys, plain, rotary, values = 36, 3, 12, 10, 5, 4, 7
    spec = ModelSpec(1, dim, heads, 64, 50, latent=(queries, keys, plain, rotary, values))
    matrices = {
        "W_DQ": dim * queries,
        "W_UQ": queries * heads * plain,
        "W_QR": queries * heads * rotary,
        "W_DKV": dim * keys,
        "W_UK": keys * heads * plain,
        "W_UV": keys * heads * values,
        "W_KR": dim * rotary,
        "W_O": heads * values * dim,
    }
    assert spec.attention_parameters() == sum(matrices.values())
    # DeepSeek-V3 (arXiv 2412.19437), section 4.2, and Kimi K2, which has half as many heads.
    for name, heads in (("deepseek-v3", 128), ("kimi-k2", 64)):
        down = 7168 * (1536 + 512 + 64)
        up = 1536 * heads * (128 + 64) + 512 * heads * (128 + 128)
        assert preset(name).attention_parameters() == down + up + heads * 128 * 7168


def test_experts_of_a_token_are_those_of_the_papers():
    """How many experts there are and a token goes to; and sizes that follow from both."""
    published = {
        "glam": (64, 2),
        "m6-10t": (80 * 128, 80),  # prototypes of 128 experts each, the best one of each
        "mixtral-8x7b": (8, 2),
        "qwen3-30b": (128, 8),
        "qwen3-235b": (128, 8),
        "deepseek-v3": (256, 8),
        "kimi-k2": (384, 8),
        "gpt-oss-120b": (128, 4),
    }
    found = {n: (s.num_experts, s.top_k) for n, s in PRESETS.items() if s.num_experts}
    assert found == published
    m6 = preset("m6-10t")
    # A share of 1 / 128 of the experts' weights is active, and all of the rest.
    experts = m6.parameters() - m6.dense_parameters()
    assert m6.active_parameters() - m6.dense_parameters() == experts // 128


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
