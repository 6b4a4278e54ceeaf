import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.nn import Balance, TopKRouter, count_tokens, register_bias_update, reset_token_counts
from moe_ext.nn.balance.quantile import NUM_BINS

E, K, D = 6, 2, 8


def make_model(layers=1, **options):
    torch.manual_seed(1)
    made = []
    for _ in range(layers):
        router = TopKRouter(
            D, E, K, score_fn="sigmoid", selection_bias=True, bias_update="quantile"
        )
        # Far from even: without a bias some experts get nearly all tokens.
        router.weight.data[:2] += 0.5
        made.append(moe_ext.MoELayer(D, 6, E, K, router=router, **options))
    return nn.Sequential(*made)


def tokens(num_tokens, seed=2):
    torch.manual_seed(seed)
    return torch.randn(num_tokens, D).abs()


def bias_of(model):
    return model[0].router.selection_bias


def exact(model, x):
    """The formula in float64, with the quantile of a list in place of a histogram's."""
    router = model[0].router
    scores = (x.double() @ router.weight.double().T).sigmoid()
    cutoff = (scores + bias_of(model).double()).topk(K + 1).values[:, -1:]
    quantile = (cutoff - scores).quantile(K / E, dim=0)
    return quantile - quantile.mean()


def test_formula():
    model = make_model()
    bias_of(model).copy_(torch.linspace(-0.2, 0.3, E))
    x = tokens(4096)
    want = exact(model, x)
    width = (0.5 + 2) / NUM_BINS
    for part in x.split(1000):  # micro-batches of one step
        model(part)
    moe_ext.nn.update_selection_bias(model)
    # An element and its bin are apart by one width at most, and so are the means; a list of 4096
    # leaves a gap of a width at most between the two elements around the quantile.
    torch.testing.assert_close(bias_of(model).double(), want, rtol=0, atol=3 * width)
    assert abs(float(bias_of(model).mean())) < 1e-6
    assert not model[0].required_bias.any()
    before = bias_of(model).clone()
    moe_ext.nn.update_selection_bias(model)
    assert torch.equal(bias_of(model), before), "no token, no change"


def test_a_few_updates_even_the_load_out():
    model, x = make_model(), tokens(4096)
    loads = []
    for _ in range(8):
        model(x)
        moe_ext.nn.update_selection_bias(model)
        loads.append(float(model[0].metrics["num_tokens_per_expert"].max()) / (4096 * K / E))
    assert loads[0] > 2
    assert loads[-1] < 1.05


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_token_counts_once(use_reentrant):
    model, x = make_model(), tokens(50)
    model(x)
    once = model[0].required_bias.clone()
    assert once.sum(1).tolist() == [50] * E
    model[0].required_bias.zero_()
    checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(model[0].required_bias, once)


def test_what_counts_and_what_does_not():
    model, x = make_model(balance=Balance("global_batch")), tokens(50)
    histogram = model[0].required_bias
    model.eval()(x)
    model.train()
    with count_tokens(model):
        model(x)
    assert not histogram.any()
    reset_token_counts(model)
    mask = torch.arange(50) % 3 != 0
    model(x[mask])
    want = histogram.clone()
    histogram.zero_()
    model[0](x.masked_fill(~mask[:, None], float("nan")), token_mask=mask)
    assert torch.equal(histogram, want)


def test_a_compiled_layer_counts_the_same():
    model, x = make_model(), tokens(50)
    model(x)
    want = model[0].required_bias.clone()
    model[0].required_bias.zero_()
    compiled = torch.compile(model[0], fullgraph=True, backend="aot_eager")
    checkpoint(compiled, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert torch.equal(model[0].required_bias, want)


def test_state_dict_and_hook_of_an_optimizer():
    model = make_model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    register_bias_update(optimizer, model)
    model(tokens(50))
    optimizer.step()
    assert bias_of(model).any()
    fresh = copy.deepcopy(make_model(2))
    fresh.load_state_dict(model.state_dict())
    for other in (model, fresh):
        other(tokens(50, 3))
        moe_ext.nn.update_selection_bias(other)
    assert torch.equal(bias_of(model), bias_of(fresh))


def test_a_step_skipped_by_a_scaler_updates_nothing():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)
    register_bias_update(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(tokens(50)).sum() * factor).backward()
        counted = model[0].required_bias.sum(1).tolist()
        scaler.step(optimizer)
        scaler.update()
        assert bool(bias_of(model).any()) == (factor == 1.0)
    assert counted == [100] * E, "the tokens of the skipped step count in the next update"


def test_what_is_refused():
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
