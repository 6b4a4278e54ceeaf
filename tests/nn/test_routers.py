"""The routers: what they choose, draw and hand to a layer."""

import copy
import itertools
import math
import warnings

import emulation
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import ops, reference
from moe_ext.nn import (
    CosineRouter,
    GShardRouter,
    NoisyTopKRouter,
    SwitchRouter,
    TopKRouter,
    number_routers,
    set_routing_step,
)

D, E = 16, 6
MAKE = {
    "topk": lambda **kw: TopKRouter(D, E, 2, **kw),
    "switch": lambda **kw: SwitchRouter(D, E, jitter_eps=0.2, **kw),
    "gshard": lambda **kw: GShardRouter(D, E, **kw),
    "gumbel": lambda **kw: GShardRouter(D, E, second_expert="gumbel", **kw),
    "biased": lambda **kw: TopKRouter(D, E, 2, bias=True, score_fn="sqrtsoftplus", **kw),
    "noisy_topk": lambda **kw: NoisyTopKRouter(D, E, 2, **kw),
    "cosine": lambda **kw: CosineRouter(D, E, 2, proj_dim=8, **kw),
}
RANDOM = ("switch", "gshard", "gumbel", "noisy_topk")
DEVICES = ["cpu", "simt", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def make(name, **kwargs):
    torch.manual_seed(1)
    router = MAKE[name](**kwargs)
    with torch.no_grad():
        for parameter in router.parameters():
            if not parameter.any():  # NoisyTopKRouter begins with zeros.
                parameter.normal_(0, 0.5)
    return router


def results(router, x, **kwargs):
    """Every tensor of a result, and the gradients of the tokens and the parameters."""
    x = x.detach().requires_grad_()
    out = router(x, **kwargs)
    loss = out.gate.topk_weights.square().sum() + out.gate.score_sum.square().sum()
    loss = loss + sum((out.losses or {}).values())
    grads = torch.autograd.grad(loss, [x, *router.parameters()])
    return [t.detach() for t in (out.logits, *out.gate, *(out.losses or {}).values())], grads


def logits_of(x, weight):
    return reference.router_logits(x, weight)


def formula(name, router, x):
    """The paper's formula, in the dtype of the logits: weights [T, K], indices [T, K]."""
    state = router.rng_state
    if name == "switch":
        jittered = reference.routing_jitter(x, state, 0.2) if router.training else x
        p = logits_of(jittered, router.weight).softmax(dim=1)
        return p.max(dim=1, keepdim=True)
    if name == "gshard":
        p = logits_of(x, router.weight).softmax(dim=1)
        g, idx = p.topk(2, dim=1)
        g = g / g.sum(dim=1, keepdim=True)
        u = reference.routing_uniform(state, x.shape[0], 1, stream=1)[:, 0]
        kept = torch.stack([torch.ones_like(u, dtype=torch.bool), u < 2 * g[:, 1]], dim=1)
        kept = kept | torch.tensor(not router.training)
        return g * kept, idx.masked_fill(~kept, -1)
    if name == "gumbel":
        logits = logits_of(x, router.weight)
        p = logits.softmax(dim=1)
        first = p.argmax(dim=1, keepdim=True)
        if router.training:
            u = reference.routing_uniform(state, x.shape[0], E, stream=6).double() + 2**-25
            logits = logits - (-u.log()).log()
        second = logits.scatter(1, first, -math.inf).argmax(dim=1, keepdim=True)
        idx = torch.cat([first, second], dim=1)
        chosen = p.gather(1, idx)
        return chosen / chosen.sum(dim=1, keepdim=True), idx
    if name == "biased":
        logits = logits_of(x, router.weight) + router.bias.to(x.dtype)
        top, idx = torch.nn.functional.softplus(logits).sqrt().topk(2, dim=1)
        return top / top.sum(dim=1, keepdim=True), idx
    if name == "noisy_topk":
        h = logits_of(x, router.weight)
        if router.training:
            normal = reference.noisy_gating.routing_normal(state, x.shape[0], E, stream=2)
            raw = logits_of(x, router.noise_weight)
            h = h + normal.to(h.dtype) * (torch.nn.functional.softplus(raw) + 0.01)
        top, idx = h.topk(2, dim=1)
        return top.softmax(dim=1), idx
    if name == "cosine":
        projected = logits_of(x, router.proj_weight) + router.proj_bias
        cosine = torch.cosine_similarity(projected[:, None], router.expert_embedding[None], dim=2)
        p = (cosine * router.log_scale.exp().clamp(max=100)).softmax(dim=1)
    else:
        p = logits_of(x, router.weight).softmax(dim=1)
    top, idx = p.topk(2, dim=1)
    return top / top.sum(dim=1, keepdim=True), idx


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MAKE)
def test_equals_the_papers_formula(device, name, training, dtype):
    router = make(name, dtype=dtype).train(training)
    x = torch.randn(257, D, dtype=dtype)
    gate = router(x).gate
    weights, idx = formula(name, router, x)
    assert torch.equal(gate.topk_idx, idx)
    torch.testing.assert_close(gate.topk_weights, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKE)
def test_logits_and_weights_are_float32_whatever_the_model(device, name, dtype):
    router = make(name, dtype=dtype)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = router(torch.randn(9, D).to(dtype))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.logits.dtype == out.gate.topk_weights.dtype == out.gate.score_sum.dtype == acc
    assert out.logits.shape == (9, E)
    out.gate.topk_weights.square().sum().backward()
    for key, parameter in router.named_parameters():
        if key != "noise_weight":
            assert parameter.grad.dtype == dtype, key


@pytest.mark.parametrize("name", RANDOM)
def test_routing_does_not_depend_on_the_number_of_ranks(device, name):
    x = torch.randn(301, D)
    router = make(name, seed=5)
    whole, _ = results(router, x)
    for bounds in ((0, 150, 301), (0, 1, 200, 301)):
        parts = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            set_routing_step(router, 0, first_token=begin)
            parts.append(router(x[begin:end]))
            set_routing_step(router, 0)
            again = router(x[begin:end], token_idx=torch.arange(begin, end))
            assert torch.equal(again.gate.topk_idx, parts[-1].gate.topk_idx)
        assert torch.equal(torch.cat([p.gate.topk_idx for p in parts]), whole[2])
        weights = torch.cat([p.gate.topk_weights for p in parts])
        # On CUDA the library may sum a row of another batch in another order.
        exact = device.type == "cpu" and not emulation.is_active()
        torch.testing.assert_close(weights, whole[1], rtol=0, atol=0 if exact else 1e-6)
        counts = sum(p.gate.num_tokens_per_expert for p in parts)
        assert torch.equal(counts, whole[3])


@pytest.mark.parametrize("name", RANDOM)
def test_draws_change_with_step_layer_and_seed_and_stop_in_evaluation(device, name):
    x = torch.randn(400, D)
    router = make(name, seed=5)
    first = router(x).gate.topk_weights
    assert torch.equal(router(x).gate.topk_weights, first)
    set_routing_step(router, 1)
    assert not torch.equal(router(x).gate.topk_weights, first)
    set_routing_step(router, 0)
    router.rng_state[1] = 1
    assert not torch.equal(router(x).gate.topk_weights, first)
    router.rng_state[1] = 0
    assert not torch.equal(make(name, seed=6)(x).gate.topk_weights, first)
    router.eval()
    calm = router(x).gate
    set_routing_step(router, 9)
    assert torch.equal(router(x).gate.topk_weights, calm.topk_weights)
    assert (calm.topk_idx >= 0).all()


@pytest.mark.parametrize("name", MAKE)
def test_recomputation_gives_the_same_bits(device, name):
    router = make(name)
    x = torch.randn(65, D, requires_grad=True)

    def loss(x):
        out = router(x)
        terms = out.gate.topk_weights.square().sum() + out.gate.score_sum.square().sum()
        return terms + sum((out.losses or {}).values())

    plain = torch.autograd.grad(loss(x), [x, *router.parameters()])
    again = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), [x, *router.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("name", MAKE)
def test_same_bits_for_any_number_of_threads(num_threads, name):
    router = make(name)
    x = torch.randn(1500, D)
    runs = []
    for threads in (1, 2, 3):
        num_threads(threads)
        tensors, grads = results(router, x)
        runs.append([*tensors, *grads])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", MAKE)
def test_masked_tokens_choose_nothing(device, name):
    router = make(name)
    x, mask = torch.randn(64, D), torch.rand(64) > 0.4
    out = router(x, token_mask=mask, token_ids=torch.zeros(64, dtype=torch.int64))
    assert (out.gate.topk_idx[~mask] == -1).all()
    poisoned = x.masked_fill(~mask[:, None], math.nan)
    other = router(poisoned, token_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(out.gate, other.gate, strict=True))


# Routers that train are compiled in layers, in test_compile.py.
@pytest.mark.parametrize(
    ("device", "name"), zip(itertools.cycle(DEVICES), MAKE), indirect=["device"]
)
def test_compiles_as_one_graph_for_any_number_of_tokens(device, name):
    router = make(name).eval()

    def loss(x):
        out = router(x)
        terms = out.gate.topk_weights.square().sum() + out.gate.score_sum.square().sum()
        return terms + sum((out.losses or {}).values())

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (64, 65, 130):
        x = torch.randn(num_tokens, D, requires_grad=True)
        pairs = [
            torch.autograd.grad(f(x), [x, *router.parameters()], allow_unused=True)
            for f in (compiled, loss)
        ]
        for a, b in zip(*pairs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_switch_jitter_leaves_the_tokens_alone(device):
    router = make("switch")
    x = torch.randn(20, D)
    before = x.clone()
    router(x)
    assert torch.equal(x, before)
    assert SwitchRouter(D, E, jitter_eps=0).rng_state is None


def test_gshard_balance_counts_first_choices(device):
    router = make("gshard")
    out = router(torch.randn(200, D))
    score_sum, firsts, top_k = out.balance
    assert top_k == 1 and score_sum is out.gate.score_sum
    assert torch.equal(firsts, torch.bincount(out.gate.topk_idx[:, 0], minlength=E))
    assert int((out.gate.topk_idx[:, 1] < 0).sum()) == 400 - int(
        out.gate.num_tokens_per_expert.sum()
    )
    # GShard: mean over experts of (share of first choices) x (mean gate), here times E^2.
    loss = ops.load_balance_loss(*out.balance)
    expected = E * (firsts / 200 * (score_sum / 200)).sum()
    torch.testing.assert_close(loss, expected)
    always = GShardRouter(D, E, second_expert="always")
    assert always.rng_state is None and (always(torch.randn(20, D)).gate.topk_idx >= 0).all()


def test_noisy_topk_losses(device):
    router = make("noisy_topk", importance_coef=0.5, load_coef=0.25)
    x = torch.randn(200, D)
    out = router(x)
    assert router.balanced and set(out.losses) == {"importance", "load"}
    chosen = reference.noisy_topk_gate(
        logits_of(x, router.weight),
        logits_of(x, router.noise_weight),
        router.rng_state,
        2,
        noise_epsilon=0.01,
    )
    for name, coef, sums in (("importance", 0.5, chosen.importance), ("load", 0.25, chosen.load)):
        expected = coef * reference.squared_variation(sums)
        torch.testing.assert_close(out.losses[name], expected, rtol=1e-4, atol=1e-6)
    assert make("noisy_topk", importance_coef=0.0, load_coef=0.0)(x).losses is None
    fresh = NoisyTopKRouter(D, E)
    assert not fresh.weight.any() and not fresh.noise_weight.any()
    # Both losses reach both weights.
    grads = torch.autograd.grad(out.losses["load"], [router.weight, router.noise_weight])
    assert all(g.abs().sum() > 0 for g in grads)


def test_cosine_temperature_is_clamped(device):
    router = make("cosine")
    x = torch.randn(30, D)
    assert (router(x).logits.abs() <= 2 + 1e-6).all()
    with torch.no_grad():
        router.log_scale.fill_(50.0)
    logits = router(x).logits
    assert (logits.abs() <= 100 * (1 + 1e-6)).all()
    logits.sum().backward()
    assert router.log_scale.grad == 0
    # One expert keeps its probability, which has a gradient.
    one = CosineRouter(D, E, 1, proj_dim=4)
    weights = one(x).gate.topk_weights
    assert (weights < 1).all() and weights.requires_grad


def test_one_expert_keeps_its_probability():
    x = torch.randn(30, D)
    for made in (TopKRouter(D, E, 1), TopKRouter(D, E, 1, score_fn="sigmoid")):
        weights = made(x).gate.topk_weights
        assert (weights < 1).all()
        (grad,) = torch.autograd.grad(weights.sum(), made.weight)
        assert grad.abs().max() > 0.01
    layer = moe_ext.MoELayer(D, 8, E, top_k=1, balance=0.0)
    layer(x).square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 0
    # Asked for, it is done.
    for make_router, what in (
        (lambda: TopKRouter(D, E, 1, renormalize=True), "TopKRouter: renormalize=True"),
        (lambda: CosineRouter(D, E, 1, renormalize=True), "CosineRouter: renormalize=True"),
        (lambda: TopKRouter(D, E, 1, score_fn="topk_softmax"), "score_fn='topk_softmax'"),
        (lambda: NoisyTopKRouter(D, E, 1), "NoisyTopKRouter: a softmax over the chosen"),
    ):
        with pytest.warns(UserWarning, match=f"{what}.* makes every weight the same"):
            router = make_router()
        assert (router(x).gate.topk_weights == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TopKRouter(D, E, 2).renormalize and not TopKRouter(D, E, 1).renormalize
        assert not TopKRouter(D, E, 2, renormalize=False).renormalize


def test_the_drawn_second_expert_follows_the_softmax_over_the_others():
    router = GShardRouter(4, 4, second_expert="gumbel")
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    out = router(logits.expand(20000, 4))
    first, second = out.gate.topk_idx.unbind(dim=1)
    assert (first == 0).all() and out.balance.num_tokens_per_expert.tolist() == [20000, 0, 0, 0]
    share = torch.bincount(second, minlength=4)[1:] / 20000
    # Five standard deviations of a share.
    torch.testing.assert_close(share, logits[1:].softmax(0), rtol=0, atol=5 * 0.5 / 20000**0.5)
    torch.testing.assert_close(
        out.gate.topk_weights, logits.expand(20000, 4).gather(1, out.gate.topk_idx).softmax(1)
    )


@pytest.mark.parametrize("name", MAKE)
def test_state_round_trip_and_meta_device(name):
    router = make(name)
    other = MAKE[name]()
    other.load_state_dict(copy.deepcopy(router.state_dict()))
    x = torch.randn(20, D)
    assert torch.equal(router(x).gate.topk_weights, other(x).gate.topk_weights)
    on_meta = MAKE[name](device="meta")
    assert on_meta(torch.empty(20, D, device="meta")).gate.topk_idx.device.type == "meta"
    real = on_meta.to_empty(device="cpu")
    real.reset_parameters()
    if name in RANDOM:
        assert real.rng_state.tolist() == [0, 0, 0, 0]
    assert repr(real).startswith(type(real).__name__)


def test_the_random_state_in_a_state_dict():
    router = make("switch")
    set_routing_step(router, 5, first_token=9)
    state = router.state_dict()
    assert state["rng_state"].tolist() == [0, 0, 5, 9]
    other = make("switch")
    assert other.load_state_dict(state).unexpected_keys == []
    assert other.rng_state.tolist() == [0, 0, 5, 9] and other.rng_state is not router.rng_state
    on_meta = SwitchRouter(D, E, device="meta")
    on_meta.load_state_dict(state, assign=True)
    assert on_meta.rng_state.tolist() == [0, 0, 5, 9]
    with pytest.raises(RuntimeError, match=r"Missing key.*rng_state"):
        other.load_state_dict({"weight": state["weight"]})
    with pytest.raises(RuntimeError, match=r"expected rng_state to be int64 of shape \(4,\), got"):
        other.load_state_dict({**state, "rng_state": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rng_state"):
        SwitchRouter(D, E, jitter_eps=0).load_state_dict(state)


@pytest.mark.parametrize("name", MAKE)
def test_a_layer_runs_and_trains_on_it(name):
    layer = moe_ext.MoELayer(D, 8, E, router=make(name))
    if name in ("switch",):
        layer = moe_ext.MoELayer(D, 8, E, 1, router=make(name))
    assert number_routers(torch.nn.ModuleList([layer, layer])) == 1
    y = layer(torch.randn(3, 11, D))
    y.square().sum().backward()
    assert layer.router.get_parameter(next(iter(layer.router.state_dict()))).grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SwitchRouter(D, E, jitter_eps=1.0), r"^SwitchRouter: .*jitter_eps.* got 1.0"),
        (lambda: SwitchRouter(D, E, jitter_eps=-0.1), r"jitter_eps to be in \[0, 1\), got -0.1"),
        (lambda: SwitchRouter(0, E), r"^SwitchRouter: expected model_dim to be at least 1, got 0"),
        (lambda: SwitchRouter(D, E, seed=-1), r"^SwitchRouter: expected seed to be in 0\.\."),
        (lambda: SwitchRouter(D, E, scale=math.inf), r"^SwitchRouter: .*scale to be finite"),
        (
            lambda: GShardRouter(D, E, second_expert="never"),
            r"^GShardRouter: expected second_expert to be one of .* got 'never'",
        ),
        (lambda: GShardRouter(D, 1), r"^GShardRouter: .*num_experts=1, got 2"),
        (
            lambda: NoisyTopKRouter(D, E, load_coef=-1.0),
            r"^NoisyTopKRouter: expected load_coef to be finite and at least 0, got -1.0",
        ),
        (lambda: NoisyTopKRouter(D, E, importance_coef=math.nan), r"importance_coef .* got nan"),
        (lambda: NoisyTopKRouter(D, E, noise_epsilon=-1.0), r"noise_epsilon .* got -1.0"),
        (lambda: NoisyTopKRouter(D, E, 7), r"^NoisyTopKRouter: .*num_experts=6, got 7"),
        (lambda: TopKRouter(D, E, group_score="mean"), r"^TopKRouter: .*group_score .* got 'mean'"),
        (
            lambda: TopKRouter(D, E, 1, num_groups=3, top_groups=2, group_score="topk"),
            r"^TopKRouter: expected top_k to be at least top_groups=2 .* got 1",
        ),
        (lambda: TopKRouter(D, 2**31), r"^TopKRouter: expected num_experts to be below 2\*\*31"),
        (lambda: CosineRouter(D, E, proj_dim=0), r"^CosineRouter: .*proj_dim .* got 0"),
        (lambda: CosineRouter(D, E, min_temperature=0.0), r"min_temperature to be positive"),
        (lambda: CosineRouter(D, E, init_temperature=0.001), r"init_temperature .* got 0.001"),
        (lambda: CosineRouter(D, E, scale=math.nan), r"^CosineRouter: .*scale to be a number"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(
        TypeError, match=r"^TopKRouter: expected num_experts to be an integer, got 6.0"
    ):
        TopKRouter(D, 6.0)


@pytest.mark.parametrize(("group_score", "group"), [("max", 0), ("top2", 1), ("topk", 2)])
def test_a_router_scores_groups_as_it_is_told(group_score, group):
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.8, 0.8, 0.1, 0.7, 0.7, 0.7]])
    options = {"score_fn": "sigmoid", "num_groups": 3, "top_groups": 1}
    router = TopKRouter(9, 9, 3, group_score=group_score, **options)
    with torch.no_grad():
        router.weight.copy_(torch.eye(9))
    assert (router(scores.logit()).gate.topk_idx // 3 == group).all()
