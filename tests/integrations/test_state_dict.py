import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import moe_ext
from moe_ext.integrations import deepspeed, fastmoe, megablocks, paddle, tutel
from moe_ext.integrations.state_dict import LAYOUTS, ExpertNames, convert
from moe_ext.testing import spawn_ranks

D, H, E = 6, 10, 4
GATED = ExpertNames(gate="a.gate", up="a.up", down="b")
PLAIN = ExpertNames(up="fc1", down="fc2")
USER_NAMED = ("deepspeed", "fairscale")
# What a layout has no place for.
ONLY_GATED = ("huggingface", "gpt_oss", "mixtral", "qwen_moe", "torchtitan")
ONLY_PLAIN = ("fastmoe", "paddle", "paddle_torch")
NO_ROUTER_BIAS = ("megablocks", "tutel", "torchtitan")
NO_EXPERT_BIAS = ("megablocks", "torchtitan")


def layer_state(*, gated, router_bias=False, expert_bias=False):
    """Parameters of a `MoELayer`."""
    generator = torch.Generator().manual_seed(0)
    up = "gate_up_proj" if gated else "up_proj"
    rows = 2 * H if gated else H
    shapes = {
        "router.weight": (E, D),
        f"experts.{up}": (E, rows, D),
        "experts.down_proj": (E, D, H),
    }
    if router_bias:
        shapes["router.bias"] = (E,)
    if expert_bias:
        shapes |= {f"experts.{up}_bias": (E, rows), "experts.down_proj_bias": (E, D)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def named(layout, gated):
    return (GATED if gated else PLAIN) if layout in USER_NAMED else None


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
        assert found[name].is_contiguous(), name


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_the_identity(layout, biases, gated):
    router_bias, expert_bias = biases
    state = layer_state(gated=gated, router_bias=router_bias, expert_bias=expert_bias)
    names = named(layout, gated)
    fits = (
        layout not in (ONLY_PLAIN if gated else ONLY_GATED)
        and not (router_bias and layout in NO_ROUTER_BIAS)
        and not (expert_bias and (layout in NO_EXPERT_BIAS or (layout == "tutel" and gated)))
    )
    if not fits:
        with pytest.raises(ValueError, match="convert: expected a layer with"):
            convert(state, "moe_ext", layout, target_names=names)
        return
    before = {name: tensor.clone() for name, tensor in state.items()}
    there = convert(state, "moe_ext", layout, target_names=names)
    assert_same(convert(there, layout, "moe_ext", source_names=names), before)
    assert_same(state, before)


@pytest.mark.parametrize("source", ["megablocks", "gpt_oss", "deepspeed", "mixtral", "tutel"])
@pytest.mark.parametrize("target", ["torchtitan", "fairscale", "qwen_moe", "huggingface"])
def test_any_layout_to_any_other(source, target):
    state = layer_state(gated=True)
    first = convert(state, "moe_ext", source, target_names=named(source, True))
    names = {"source_names": named(source, True), "target_names": named(target, True)}
    second = convert(first, source, target, **names)
    assert_same(convert(second, target, "moe_ext", source_names=named(target, True)), state)


def test_layouts_are_what_they_say():
    state = layer_state(gated=True)
    gate, up = state["experts.gate_up_proj"].chunk(2, 1)
    down = state["experts.down_proj"]
    found = convert(state, "moe_ext", "gpt_oss")
    assert torch.equal(found["experts.gate_up_proj"][..., ::2], gate.transpose(1, 2))
    assert torch.equal(found["experts.gate_up_proj"][..., 1::2], up.transpose(1, 2))
    assert torch.equal(found["experts.down_proj"], down.transpose(1, 2))
    found = convert(state, "moe_ext", "megablocks")
    assert torch.equal(found["experts.mlp.w1"], gate.reshape(E * H, D))
    assert torch.equal(found["experts.mlp.v1"], up.reshape(E * H, D))
    assert torch.equal(found["experts.mlp.w2"], down.transpose(1, 2).reshape(E * H, D))
    found = convert(state, "moe_ext", "mixtral")
    assert torch.equal(found["experts.2.w1.weight"], gate[2])
    assert torch.equal(found["experts.2.w3.weight"], up[2])
    assert torch.equal(found["experts.2.w2.weight"], down[2])
    plain = layer_state(gated=False)
    found = convert(plain, "moe_ext", "paddle")
    assert found["gate.gate.weight"].shape == (D, E)
    assert torch.equal(found["experts.1.htoh4.weight"], plain["experts.up_proj"][1].T)
    found = convert(plain, "moe_ext", "fastmoe")
    assert torch.equal(found["experts.1.htoh4.weight"], plain["experts.up_proj"][1:2])


def native(activation, source, layout, **names):
    """A `MoELayer` with the weights of another library's layer."""
    bias = layout not in ("megablocks",) and activation == "gelu"
    layer = moe_ext.MoELayer(D, H, E, 2, activation=activation, bias=bias)
    layer.load_state_dict(convert(source.state_dict(), layout, "moe_ext", **names))
    return layer


def test_converted_layers_compute_the_same():
    torch.manual_seed(0)
    x = torch.randn(9, D)
    tutel_experts = {"num_experts_per_device": E, "hidden_size_per_expert": H}
    args = megablocks.Arguments(
        hidden_size=D,
        ffn_hidden_size=H,
        moe_num_experts=E,
        moe_top_k=2,
        moe_normalize_expert_weights=1,
        mlp_type="glu",
        activation_fn=F.silu,
        bias=False,
        fp16=False,
    )
    dmoe = megablocks.dMoE(args)
    torch.testing.assert_close(native("swiglu", dmoe, "megablocks")(x), dmoe(x))
    llama = tutel.moe_layer(
        {"type": "top", "k": 2, "capacity_factor": 0}, D, {"type": "llama_ffn", **tutel_experts}
    )
    torch.testing.assert_close(native("swiglu", llama, "tutel")(x), llama(x))
    ffn = tutel.moe_layer(
        {"type": "top", "k": 2, "capacity_factor": 0},
        D,
        {"type": "ffn", "activation_fn": F.gelu, **tutel_experts},
    )
    torch.testing.assert_close(native("gelu", ffn, "tutel")(x), ffn(x))
    expert = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    zero = deepspeed.MoE(D, expert, E, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    names = {"source_names": ExpertNames(up="0", down="2")}
    torch.testing.assert_close(native("gelu", zero, "deepspeed", **names)(x), zero(x)[0])
    fmoe = fastmoe.FMoETransformerMLP(E, D, H, gate_bias=False)
    torch.testing.assert_close(native("gelu", fmoe, "fastmoe")(x), fmoe(x))


class PaddleExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.htoh4, self.h4toh = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x):
        return self.h4toh(self.htoh4(x))


def test_checkpoint_of_paddle_in_numpy():
    torch.manual_seed(0)
    layer = paddle.MoELayer(D, [PaddleExpert() for _ in range(E)])
    state = {f"moe.{name}": tensor for name, tensor in layer.state_dict().items()}
    state["head.weight"] = torch.ones(2)
    saved = convert(state, "paddle_torch", "paddle", prefix="moe.")
    assert saved["head.weight"] is state["head.weight"]
    arrays = {name: np.asarray(tensor) for name, tensor in saved.items()}
    loaded = convert(arrays, "paddle", "paddle_torch", prefix="moe.")
    del loaded["head.weight"]
    assert set(loaded) == {f"moe.{name}" for name in layer.state_dict()}
    layer.load_state_dict({name[4:]: tensor for name, tensor in loaded.items()})


def test_what_does_not_fit_is_refused_by_name():
    state = layer_state(gated=True)
    mixtral = {f"ffn.{n}": t for n, t in convert(state, "moe_ext", "mixtral").items()}

    def refused(text, changed, source="mixtral", prefix="ffn.", **names):
        with pytest.raises(ValueError, match=text):
            convert(changed, source, "moe_ext", prefix=prefix, **names)

    def without(name):
        return {n: t for n, t in mixtral.items() if n != name}

    refused(
        r"'ffn.experts.1.w2.weight' to be of shape \[D \(D=6\), F \(F=10\)\], got \(6, 9\)",
        {**mixtral, "ffn.experts.1.w2.weight": torch.zeros(6, 9)},
    )
    refused(
        r"'ffn.experts.0.w1.weight' to be of shape \[F.*, D \(D=6\)\], got \(10, 6, 1\)",
        {**mixtral, "ffn.experts.0.w1.weight": torch.zeros(10, 6, 1)},
    )
    refused("key 'ffn.experts.3.w3.weight' in a layer", without("ffn.experts.3.w3.weight"))
    refused("key 'ffn.gate.weight'", without("ffn.gate.weight"))
    refused("got 'ffn.extra', which has no counterpart", {**mixtral, "ffn.extra": torch.ones(1)})
    refused(
        r"'experts.' to be 0..3, as the router has 4, got \[0, 1, 2, 3, 7\]",
        {**mixtral, "ffn.experts.7.w1.weight": torch.zeros(10, 6)},
    )
    refused("source and target to be among deepspeed, .*, got 'mesh'", mixtral, "mesh")
    refused("ExpertNames for layout 'deepspeed'", mixtral, "deepspeed")
    refused("no ExpertNames for layout 'tutel'", mixtral, "tutel", source_names=PLAIN)
    folded = convert(state, "moe_ext", "megablocks")
    folded["experts.mlp.w1"] = folded["experts.mlp.w1"][:-1]
    refused(r"'experts.mlp.w1' to be of shape \[EF \(E=4\), D \(D=6\)\]", folded, "megablocks", "")
    shared = {**convert(state, "moe_ext", "megablocks"), "experts.bias": torch.zeros(D)}
    refused("'experts.bias', which has no counterpart", shared, "megablocks", "")
    counted = {**convert(state, "moe_ext", "tutel"), "_num_global_experts": torch.tensor(3)}
    refused("'_num_global_experts' to be 4, the rows of the router, got 3", counted, "tutel", "")
    odd = {**state, "experts.gate_up_proj": torch.zeros(E, 2 * H + 1, D)}
    refused(r"'experts.gate_up_proj' to be of shape \[E \(E=4\), 2F", odd, "moe_ext", "")
    biased = convert(layer_state(gated=False, expert_bias=True), "moe_ext", "fastmoe")
    del biased["experts.2.htoh4.bias"]
    refused("key 'experts.2.htoh4.bias'", biased, "fastmoe", "")


def converted_on_rank(rank):
    """Parts over ranks go to stacks as they are, and to modules when they are gathered."""
    layer = moe_ext.MoELayer(D, H, E, 2, ep_group=moe_ext.distributed.MoEMesh(ep=2).ep_group)
    parts, whole = layer.state_dict(), moe_ext.distributed.full_state_dict(layer)
    for layout in LAYOUTS:
        if layout in ONLY_PLAIN:
            continue
        names = GATED if layout in USER_NAMED else None
        wanted = convert(whole, "moe_ext", layout, target_names=names)
        if layout in (*USER_NAMED, "mixtral", "qwen_moe"):
            with pytest.raises(ValueError, match="whole tensors .* got parts over ranks of "):
                convert(parts, "moe_ext", layout, target_names=names)
            continue
        found = convert(parts, "moe_ext", layout, target_names=names)
        for name, tensor in found.items():
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(tensor, wanted[name]), (layout, name)
    return True


def test_experts_over_ranks():
    assert spawn_ranks(converted_on_rank, 2) == [True] * 2
