"""`torch.func` over a layer: gradients, and those of each sample, or a refusal by its name."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

import moe_ext
from moe_ext import attention, nn, ops
from moe_ext.testing import spawn_ranks

D, E = 8, 4
# By class, what those take that need more than sizes.
ARGUMENTS = {
    "TopKRouter": {"top_k": 2},
    "NoisyTopKRouter": {"top_k": 2},
    "SinkhornRouter": {"top_k": 2},
    "CosineRouter": {"top_k": 2},
    "HashRouter": {"top_k": 1, "vocab_size": 8},
}
ROUTERS = {
    name: cls
    for name, cls in vars(nn).items()
    if inspect.isclass(cls) and issubclass(cls, nn.Router) and cls is not nn.Router
}
OPTIONS = {
    "sigmoid": {"router": "sigmoid"},
    "capacity": {"capacity": 1.0},
    "z loss": {"balance": moe_ext.nn.Balance(z_coef=0.1)},
    "shared": {"shared_expert": 4, "bias": True},
    "gelu": {"activation": "gelu"},
    "sequence": {"balance": nn.Balance("sequence")},
}
LAYERS = {name: {"router": name} for name in ROUTERS} | OPTIONS


def make(name):
    torch.manual_seed(0)
    options = {"balance": 0.3} | LAYERS[name]
    router = options.get("router")
    if router in ROUTERS:
        sizes = {"model_dim": D, "num_experts": E, "dtype": torch.float64}
        options["router"] = ROUTERS[router](**sizes, **ARGUMENTS.get(router, {}))
    else:
        options["top_k"] = 2
    layer = moe_ext.MoELayer(D, 6, E, dtype=torch.float64, **options)
    ids = torch.arange(5) if isinstance(layer.router, nn.HashRouter) else None

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,), {"token_ids": ids}).square().sum()

    return layer, dict(layer.named_parameters()), loss


def restart(layer):
    """Draw the random numbers of the first step."""
    layer.router.reset_rng_state()


def gradients(layer, parameters, loss, x):
    restart(layer)
    found = torch.autograd.grad(loss(parameters, x), [*parameters.values()], allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Sums of fewer than 64 terms of magnitudes below 16.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=64 * 16 * 2**-52, msg=name)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_and_those_of_each_sample(name):
    layer, parameters, loss = make(name)
    xs = torch.randn(3, 5, D, dtype=torch.float64)
    wanted = [gradients(layer, parameters, loss, x) for x in xs]
    restart(layer)
    assert_equal(grad(loss)(parameters, xs[0]), wanted[0])
    restart(layer)
    by_sample = vmap(grad(loss), (None, 0))(parameters, xs)
    for i, of_one in enumerate(wanted):
        assert_equal({key: x[i] for key, x in by_sample.items()}, of_one)
    # Balance losses reach the router from inside of vmap, too.
    restart(layer)
    total = vmap(loss, (None, 0))(parameters, xs).sum()
    found = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
    for (key, p), g in zip(parameters.items(), found, strict=True):
        want = sum(of_one[key] for of_one in wanted)
        assert_equal({key: torch.zeros_like(p) if g is None else g}, {key: want})


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_models_at_once():
    layers = [make("sigmoid")[0] for _ in range(3)]
    for seed, layer in enumerate(layers):
        torch.manual_seed(seed)
        layer.reset_parameters()
    xs, states = torch.randn(3, 5, D, dtype=torch.float64), stack_module_state(layers)
    found = vmap(lambda p, b, x: functional_call(layers[0], (p, b), (x,)))(*states, xs)
    for y, layer, x in zip(found, layers, xs, strict=True):
        torch.testing.assert_close(y, layer(x), rtol=0, atol=64 * 16 * 2**-52)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_products_with_jacobians():
    # Without balance losses, which every pass backward would add.
    layer, x = make("sigmoid")[0].eval(), torch.randn(2, D, dtype=torch.float64)
    y, pull = vjp(layer, x)
    wanted = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(pull(y)[0], torch.einsum("td,tdsc->sc", y, wanted))
    torch.testing.assert_close(jacrev(layer)(x), wanted)


def test_what_is_refused():
    layer, parameters, loss = make("sigmoid")
    x = torch.randn(5, D, dtype=torch.float64)
    text = r"MoELayer: expected the layer to be differentiated once by torch.func, got \['grad', "
    with pytest.raises(RuntimeError, match=text):
        grad(lambda p: grad(loss, 1)(p, x).sum())(parameters)
    with pytest.raises(NotImplementedError, match="expected reverse-mode gradients alone"):
        jvp(layer, (x,), (x,))
    biased = nn.TopKRouter(D, E, 2, selection_bias=True)
    for options in ({"router": biased}, {"top_k": 2, "balance": nn.Balance("global_batch")}):
        counting = moe_ext.MoELayer(D, 6, E, **options)
        text = r"to be called outside of vmap with a layer that counts tokens, got \['vmap'\]"
        with pytest.raises(RuntimeError, match=text):
            vmap(counting)(torch.randn(2, 5, D))
        counting.eval()
        assert vmap(counting)(torch.randn(2, 5, D)).shape == (2, 5, D)
    q = torch.ones(2, 1, 2, 4, 4)
    with pytest.raises(RuntimeError, match="ring_attention: expected to be called outside of tor"):
        vmap(lambda x: attention.ring_attention(x, x, x, group=None))(q)


def test_formulas_are_differentiated_once():
    """Operators whose gradients are formulas in Python; torch leaves out what they do not know."""
    logits = torch.randn(5, E)

    def weights(logits):
        return ops.expert_choice_gate(logits, 2).topk_weights.sum()

    wanted = torch.autograd.functional.jacobian(weights, logits)
    assert torch.equal(grad(weights)(logits), wanted)
    text = "expert_choice_gate: expected the result to be differentiated once, got a second"
    with pytest.raises(RuntimeError, match=text):
        grad(lambda x: grad(weights)(x).sum())(logits)
    text = "expert_choice_gate: expected reverse-mode gradients alone, got a tangent"
    with pytest.raises(NotImplementedError, match=text):
        jvp(weights, (logits,), (logits,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
        weights(forward_ad.make_dual(logits, logits))


def over_ranks(rank):
    layer = moe_ext.MoELayer(D, 6, E, 2, ep_group=dist.group.WORLD)
    x = torch.randn(5, D)
    text = r"outside of torch.func with an ep_group of several ranks, got \['grad'\]"
    with pytest.raises(RuntimeError, match=text):
        grad(lambda x: layer(x).sum())(x)
    layer(x).sum().backward()


def test_experts_over_ranks_are_refused():
    spawn_ranks(over_ranks, 2)
