import copy
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_ext
from moe_ext.distributed.dtensor import local_part
from moe_ext.nn import FeedForward, MoELayer, UpcycledFFN, upcycle
from moe_ext.testing import spawn_ranks

transformers = pytest.importorskip("transformers", minversion="5.0")

D, FFN = 8, 12
# Sums of F products, taken in another order, and a weighted sum of K equal outputs.
EXACT = {"rtol": 0, "atol": 1e-13}


def mlp_of(family, name, config, *sizes, **options):
    """A feed-forward network of transformers; the sizes stand before its configuration."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if not sizes:
        options |= {"hidden_size": D, "intermediate_size": FFN, "num_attention_heads": 2}
    return getattr(module, name)(*sizes, getattr(transformers, config)(**options))


def llama_mlp(**options):
    return mlp_of("llama", "LlamaMLP", "LlamaConfig", **options)


def gpt2_mlp(**options):
    return mlp_of("gpt2", "GPT2MLP", "GPT2Config", FFN, n_embd=D, **options)


NETWORKS = {
    "llama": llama_mlp,
    "llama bias": lambda: llama_mlp(mlp_bias=True),
    "llama relu": lambda: llama_mlp(hidden_act="relu"),
    "llama mish": lambda: llama_mlp(hidden_act="mish"),
    "gpt2": lambda: gpt2_mlp(resid_pdrop=0.0),
    "gpt2 dropout": lambda: gpt2_mlp(resid_pdrop=0.5).eval(),
    "phi3": lambda: mlp_of("phi3", "Phi3MLP", "Phi3Config", pad_token_id=0),
    "gpt_neox": lambda: mlp_of("gpt_neox", "GPTNeoXMLP", "GPTNeoXConfig"),
    "clip": lambda: mlp_of("clip", "CLIPMLP", "CLIPTextConfig"),
    "sequential": lambda: nn.Sequential(nn.Linear(D, FFN), nn.GELU(), nn.Linear(FFN, D)),
    "sequential without bias": lambda: nn.Sequential(
        nn.Linear(D, FFN, bias=False), nn.Tanh(), nn.Linear(FFN, D), nn.Dropout(0.5)
    ).eval(),
    "sequential tanh gelu": lambda: nn.Sequential(
        nn.Linear(D, FFN), nn.GELU(approximate="tanh"), nn.Dropout(0.0), nn.Linear(FFN, D)
    ),
    "ours gated": lambda: FeedForward(D, FFN, activation="geglu", bias=True),
    "ours plain": lambda: FeedForward(D, FFN, activation="relu_squared"),
}
METHODS = [
    {"num_experts": 4, "top_k": 2},
    {"num_experts": 5, "top_k": 1, "router": "sigmoid"},
    {"num_experts": 8, "top_k": 2, "method": "granular", "granularity": 2},
    {"num_experts": 6, "top_k": 6, "method": "granular", "granularity": 3},
    {"num_experts": 12, "top_k": 8, "method": "granular", "granularity": 4},
]


def make(name):
    torch.manual_seed(0)
    ffn = NETWORKS[name]().double()
    for parameter in ffn.parameters():  # the projections of GPT-2 start small, biases at zero
        nn.init.normal_(parameter, std=0.5)
    return ffn


def tokens():
    return torch.randn(3, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_computes_what_the_dense_network_does(name, options):
    ffn = make(name)
    before = copy.deepcopy(ffn.state_dict())
    with torch.device("meta"):  # another default device
        layer = upcycle(ffn, **options)
    assert layer.training == ffn.training
    x = tokens()
    scale = float(ffn(x).detach().abs().max())
    torch.testing.assert_close(layer(x), ffn(x), rtol=0, atol=1e-13 * scale)
    for key, tensor in ffn.state_dict().items():
        assert torch.equal(tensor, before[key])
    # The weights are copies.
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert ffn(x).any()


def test_the_gradient_of_the_input_is_the_dense_one():
    ffn = make("llama bias")
    grads = []
    for module in (ffn, upcycle(ffn, 8, 4, method="granular", granularity=2)):
        x = tokens().requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    # The balance loss pulls at the router too.
    layer = upcycle(ffn, 8, 4, method="granular", granularity=2, balance_loss_coef=0.0)
    x = tokens().requires_grad_()
    layer(x).square().sum().backward()
    torch.testing.assert_close(x.grad, grads[0], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(grads[1], grads[0], rtol=1e-9, atol=1e-12)


def test_experts_come_apart_in_training():
    layer = upcycle(make("llama"), 8, 4, method="granular", granularity=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    (layer(tokens()) - tokens()).square().mean().backward()
    optimizer.step()
    weight = layer.router.weight
    assert not torch.allclose(weight[0], weight[1])
    assert not torch.allclose(layer.experts.down_proj[0], layer.experts.down_proj[2])


def test_granular_pieces_are_those_of_the_dense_network():
    ffn = make("llama")
    layer = upcycle(ffn, 6, 3, method="granular", granularity=3)
    size = FFN // 3
    for e in range(6):
        piece = slice(e % 3 * size, (e % 3 + 1) * size)
        gate, up = layer.experts.gate_up_proj[e].chunk(2)
        assert torch.equal(gate, ffn.gate_proj.weight[piece])
        assert torch.equal(up, ffn.up_proj.weight[piece])
        assert torch.equal(layer.experts.down_proj[e], 3 * ffn.down_proj.weight[:, piece])


def llama(layers=4):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=D, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


IDS = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize(("every", "replaced"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_every_other_network_of_a_model(every, replaced):
    model = llama()
    want = model(IDS).logits
    count = moe_ext.replace_ffn(model, every=every, num_experts=4, top_k=2)
    assert count == len(replaced)
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer.mlp, MoELayer) == (index in replaced)
    torch.testing.assert_close(model(IDS).logits, want, rtol=1e-6, atol=1e-9)
    model.train()
    model.gradient_checkpointing_enable()
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gpt2_keeps_its_dropout():
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=D, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.25
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    want = model(IDS).logits
    assert moe_ext.replace_ffn(model, num_experts=4) == 1
    mlp = model.transformer.h[1].mlp
    assert isinstance(mlp, UpcycledFFN)
    assert mlp.dropout.p == 0.25
    torch.testing.assert_close(model(IDS).logits, want, rtol=1e-6, atol=1e-9)
    again = transformers.GPT2LMHeadModel(config).double().eval()
    moe_ext.replace_ffn(again, num_experts=4)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS).logits, model(IDS).logits)


class Shared(nn.Module):
    """One network used twice, one next to an existing mixture, and a head that is no network."""

    def __init__(self):
        super().__init__()
        ffn = NETWORKS["sequential"]()
        self.first = ffn
        self.again = ffn
        self.moe = MoELayer(D, FFN, 4, shared_expert=FFN)
        self.head = nn.Sequential(nn.Linear(D, FFN), nn.ReLU(), nn.Linear(FFN, 3))


def test_shared_networks_and_existing_mixtures():
    model = Shared()
    moe = model.moe
    assert moe_ext.replace_ffn(model, every=1, num_experts=4) == 1
    assert isinstance(model.first, MoELayer)
    assert model.first is model.again
    assert model.moe is moe
    assert isinstance(moe.shared_expert, FeedForward)
    assert isinstance(model.head, nn.Sequential)


def test_select():
    model = llama()
    count = moe_ext.replace_ffn(model, every=1, select=lambda name, module: ".2." in name)
    assert count == 1
    assert isinstance(model.model.layers[2].mlp, MoELayer)


class Scaled(nn.Module):
    """Named as Llama's, but its forward does more."""

    def __init__(self):
        super().__init__()
        ffn = llama_mlp()
        self.gate_proj, self.up_proj, self.down_proj = ffn.gate_proj, ffn.up_proj, ffn.down_proj
        self.act_fn = ffn.act_fn

    def forward(self, x):
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherLinear(nn.Linear):
    """As quantised layers derive from Linear."""


def quantised():
    ffn = llama_mlp()
    ffn.up_proj = OtherLinear(D, FFN)
    return ffn


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: nn.Linear(D, D), {}, r"upcycle: expected ffn to be a feed-forward .* got Linear"),
        (Scaled, {}, r"forward pass of ffn to be its projections .* another result from Scaled"),
        (quantised, {}, r"projections of ffn to be plain Linear layers, got OtherLinear"),
        (
            lambda: nn.Sequential(nn.Linear(D, FFN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(FFN, D)),
            {},
            r"expected ffn to have no dropout between its projections",
        ),
        (llama_mlp, {"method": "clone"}, r"expected method to be one of .* got 'clone'"),
        (llama_mlp, {"granularity": 2}, r"granularity to be left out for method='copy', got 2"),
        (llama_mlp, {"method": "granular"}, r"granularity to be at least 1 .* got None"),
        (
            llama_mlp,
            {"method": "granular", "granularity": 3},
            r"expected num_experts to be a multiple of granularity=3, got 8",
        ),
        (
            llama_mlp,
            {"method": "granular", "granularity": 4, "top_k": 2},
            r"expected top_k to be a multiple of granularity=4, got 2",
        ),
        (
            llama_mlp,
            {"method": "granular", "granularity": 8, "top_k": 8},
            r"expected granularity to divide F=12, got 8",
        ),
        (llama_mlp, {"router": "hash"}, r"expected score_fn to be one of"),
    ],
)
def test_errors(make, options, text):
    with pytest.raises(ValueError, match=text):
        upcycle(make(), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, r"expected every to be at least 1, got 0"),
        ({"every": 9}, r"at least every=9 feed-forward networks .* got 4 in LlamaForCausalLM"),
        ({"top_k": 9}, r"expected top_k to be"),
        ({"balance_loss_coef": -1.0}, r"Balance: expected coef to be at least 0"),
    ],
)
def test_a_refusal_leaves_the_model_alone(options, text):
    model = llama()
    before = list(model.modules())
    with pytest.raises(ValueError, match=text):
        moe_ext.replace_ffn(model, **options)
    assert list(map(id, model.modules())) == list(map(id, before))


def test_an_error_midway_leaves_the_model_alone():
    model = llama()
    model.model.layers[3].mlp.up_proj = OtherLinear(D, FFN)
    before = list(map(id, model.modules()))
    with pytest.raises(ValueError, match=r"projections of model.layers.3.mlp to be plain Linear"):
        moe_ext.replace_ffn(model, every=1)
    assert list(map(id, model.modules())) == before


def upcycled_rank(rank):
    ffn = make("llama bias")
    torch.manual_seed(2)
    layer = upcycle(
        ffn, 8, 4, method="granular", granularity=2, ep_group=dist.group.WORLD
    )  # fmt: skip
    assert local_part(layer.experts.down_proj).shape[0] == 4
    x = tokens()[rank]
    torch.testing.assert_close(layer(x), ffn(x), **EXACT)
    return True


def test_over_two_ranks():
    assert spawn_ranks(upcycled_rank, 2) == [True, True]
