"""The bias of a selection: what counts for its updates, by signs of loads and by quantiles."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.nn import (
    Balance,
    TopKRouter,
    count_tokens,
    register_bias_update,
    reset_token_counts,
    update_selection_bias,
)
from moe_ext.nn.balance.quantile import NUM_BINS

E, K, D = 6, 2, 8
both_kinds = pytest.mark.parametrize("kind", ["sign", "quantile"])


def make_model(kind="sign", layers=1, **options):
    torch.manual_seed(1)
    made = []
    for _ in range(layers):
        router = TopKRouter(D, E, K, score_fn="sigmoid", selection_bias=True, bias_update=kind)
        made.append(moe_ext.MoELayer(D, 6, E, K, router=router, **options))
    return nn.Sequential(*made)


def uneven_model():
    """Without a bias some of its experts get nearly all positive tokens."""
    model = make_model("quantile")
    model[0].router.weight.data[:2] += 0.5
    return model


def tokens(num_tokens=9, seed=2):
    torch.manual_seed(seed)
    return torch.randn(num_tokens, D)


def biases(model):
    return [layer.router.selection_bias.clone() for layer in model]


def counted(model):
    """Counts that the first layer keeps for its next update: a sum or a histogram."""
    layer = model[0]
    return layer.choices if layer.router.bias_update == "sign" else layer.required_bias


def assert_counted(model, num_tokens):
    found = counted(model)
    if found.dim() == 1:
        assert int(found.sum()) == num_tokens * K
    else:
        assert found.sum(1).tolist() == [num_tokens] * E


@pytest.mark.parametrize("center", [False, True])
def test_formula(center):
    model = make_model(layers=2)
    for _ in range(3):
        want = biases(model)
        counts = [torch.zeros(E) for _ in model]
        for seed in (2, 3):
            model(tokens(9, seed)).sum().backward()
            for layer, count in zip(model, counts, strict=True):
                count += layer.metrics["num_tokens_per_expert"]
        assert update_selection_bias(model, rate=0.01, center=center) == 2
        for layer, count, bias in zip(model, counts, want, strict=True):
            bias = bias + 0.01 * torch.sign(count.mean() - count)
            if center:
                bias = bias - bias.mean()
            torch.testing.assert_close(layer.router.selection_bias, bias)
            assert not layer.choices.any()
    before = biases(model)
    update_selection_bias(model, rate=0.01, center=center)
    for bias, now in zip(before, biases(model), strict=True):
        torch.testing.assert_close(now, bias, msg="no token, no change")


def test_an_expert_with_the_mean_load_is_left_alone():
    model = make_model()
    model[0].choices = torch.tensor([3, 1, 2, 2, 2, 2])
    update_selection_bias(model, rate=0.5)
    assert model[0].router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def exact(model, x):
    """The formula in float64, with the quantile of a list in place of a histogram's."""
    router = model[0].router
    scores = (x.double() @ router.weight.double().T).sigmoid()
    cutoff = (scores + router.selection_bias.double()).topk(K + 1).values[:, -1:]
    quantile = (cutoff - scores).quantile(K / E, dim=0)
    return quantile - quantile.mean()


def test_formula_of_quantiles():
    model = uneven_model()
    bias = model[0].router.selection_bias
    bias.copy_(torch.linspace(-0.2, 0.3, E))
    x = tokens(4096).abs()
    want = exact(model, x)
    width = (0.5 + 2) / NUM_BINS
    for part in x.split(1000):  # micro-batches of one step
        model(part)
    update_selection_bias(model)
    # An element and its bin are apart by one width at most, and so are the means; a list of 4096
    # leaves a gap of a width at most between the two elements around the quantile.
    torch.testing.assert_close(bias.double(), want, rtol=0, atol=3 * width)
    assert abs(float(bias.mean())) < 1e-6
    assert not model[0].required_bias.any()
    before = bias.clone()
    update_selection_bias(model)
    assert torch.equal(bias, before), "no token, no change"


def test_a_bias_evens_the_load_out():
    by_sign, by_quantile = make_model(), uneven_model()
    by_sign[0].router.weight.data[0] += 0.2
    for model, num_tokens, num_updates, update, uneven, even in (
        (by_sign, 256, 301, functools.partial(update_selection_bias, rate=2e-3), 1.5, 1.1),
        (by_quantile, 4096, 8, update_selection_bias, 2.0, 1.05),
    ):
        x, loads = tokens(num_tokens).abs(), []
        for _ in range(num_updates):
            model(x)
            update(model)
            most = float(model[0].metrics["num_tokens_per_expert"].max())
            loads.append(most / (num_tokens * K / E))
        assert loads[0] > uneven and loads[-1] < even


@both_kinds
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_token_counts_once(kind, use_reentrant):
    model, x = make_model(kind, layers=2), tokens()
    model(x)
    once = counted(model).clone()
    assert_counted(model, 9)
    counted(model).zero_()
    checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(counted(model), once)


@both_kinds
def test_what_counts_and_what_does_not(kind):
    model, x = make_model(kind, balance=Balance("global_batch")), tokens()
    model.eval()(x)
    model.train()
    with count_tokens(model):
        model(x)
    assert not counted(model).any()
    model(x).sum().backward()
    assert_counted(model, 9)
    reset_token_counts(model)
    counted(model).zero_()
    mask = torch.arange(9) % 3 != 0
    model(x[mask])
    want = counted(model).clone()
    assert_counted(model, 6)
    counted(model).zero_()
    model[0](x.masked_fill(~mask[:, None], float("nan")), token_mask=mask)
    assert torch.equal(counted(model), want)
    assert not moe_ext.MoELayer(D, 6, E)(x).isnan().any()


@both_kinds
def test_a_compiled_layer_counts_its_tokens_once(kind):
    model, x = make_model(kind), tokens()
    model(x)
    want = counted(model).clone()
    compiled = torch.compile(model[0], fullgraph=True, backend="aot_eager", dynamic=True)
    for run in (compiled, functools.partial(checkpoint, compiled, use_reentrant=False)):
        counted(model).zero_()
        run(x.clone().requires_grad_()).sum().backward()
        assert torch.equal(counted(model), want)


@both_kinds
def test_state_dict_and_hook_of_an_optimizer(kind):
    model, other, fresh = (make_model(kind, layers=2) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = register_bias_update(optimizer, model, **({"rate": 0.25} if kind == "sign" else {}))
    for _ in range(3):
        model(tokens())
        optimizer.step()
        other(tokens())
        update_selection_bias(other, rate=0.25)
    assert all(bias.any() for bias in biases(model))
    assert all(map(torch.equal, biases(model), biases(other)))
    handle.remove()
    model(tokens())
    optimizer.step()
    assert all(map(torch.equal, biases(model), biases(other)))
    fresh.load_state_dict(model.state_dict())
    assert all(map(torch.equal, biases(model), biases(fresh)))
    assert {name.rpartition(".")[2] for name in model.state_dict()} == {
        "weight", "selection_bias", "gate_up_proj", "down_proj",
    }  # fmt: skip


@both_kinds
def test_a_state_that_is_assigned_to_a_model_on_the_meta_device(kind):
    model = make_model(kind, balance="global_batch")
    with torch.device("meta"):
        assigned = make_model(kind, balance="global_batch")
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for each in (model, assigned):
        each(tokens()).sum().backward()
    assert torch.equal(counted(assigned), counted(model))
    assert torch.equal(assigned[0].global_counts.total, model[0].global_counts.total)
    for each in (model, assigned):
        update_selection_bias(each)
    assert torch.equal(*biases(model), *biases(assigned))
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assigned.load_state_dict(state, assign=True)
    assert assigned[0].router.weight.dtype == torch.bfloat16
    assert assigned[0].router.selection_bias.dtype == torch.float32


@both_kinds
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_a_scaler_updates_nothing(kind, fused):
    model, other = make_model(kind), make_model(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=fused)
    register_bias_update(optimizer, model, rate=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(tokens()).sum() * factor).backward()
        other(tokens())
        scaler.step(optimizer)
        scaler.update()
        assert bool(biases(model)[0].any()) == (factor == 1.0)
        if factor != 1.0:
            assert_counted(model, 9)
    # The tokens of the skipped step count in the next update.
    update_selection_bias(other, rate=0.25)
    assert torch.equal(biases(model)[0], biases(other)[0])
    assert not counted(model).any()


@both_kinds
def test_a_router_of_several_layers_is_updated_once(kind):
    one, several, x = make_model(kind), make_model(kind, layers=2), tokens()
    several[1].router = several[0].router
    one(x)
    for layer, part in zip(several, x.split(5), strict=True):
        layer(part)
    for model in (one, several):
        assert update_selection_bias(model, rate=0.25) == 1
    assert torch.equal(biases(several)[1], biases(one)[0]) and biases(one)[0].any()
    assert not any(counted(several[i:]).any() for i in range(2))


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_wrong_rate(rate):
    with pytest.raises(ValueError, match=r"update_selection_bias: expected rate to be at least 0"):
        update_selection_bias(make_model(), rate=rate)


def test_a_model_without_a_bias():
    model = nn.Sequential(moe_ext.MoELayer(D, 6, E))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"update_selection_bias: expected model to have .*none"):
        update_selection_bias(model)
    with pytest.raises(ValueError, match=r"register_bias_update: expected model to have .*none"):
        register_bias_update(optimizer, model)


def test_options_of_quantiles():
    with pytest.raises(ValueError, match=r"TopKRouter: expected bias_update to be one of .*'ema'"):
        TopKRouter(D, E, K, bias_update="ema")
    wanted = r"TopKRouter: expected selection_bias=True, score_fn='sigmoid', top_k below .*'sign'"
    options = {"score_fn": "sigmoid", "selection_bias": True, "bias_update": "quantile"}
    for wrong in (
        {"score_fn": "softmax"},
        {"selection_bias": False},
        {"top_k": E},
        {"num_groups": 3, "top_groups": 2},
    ):
        with pytest.raises(ValueError, match=wanted):
            TopKRouter(D, E, **{"top_k": K, **options, **wrong})
