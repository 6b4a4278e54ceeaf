import copy

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
    update_selection_bias,
)

E, K = 5, 2


def make_model(layers=2, **options):
    torch.manual_seed(1)
    made = []
    for _ in range(layers):
        router = TopKRouter(8, E, K, score_fn="sigmoid", selection_bias=True)
        made.append(moe_ext.MoELayer(8, 6, E, K, router=router, **options))
    return nn.Sequential(*made)


def tokens(num_tokens=9, seed=2):
    torch.manual_seed(seed)
    return torch.randn(num_tokens, 8)


def biases(model):
    return [layer.router.selection_bias.clone() for layer in model]


@pytest.mark.parametrize("center", [False, True])
def test_formula(center):
    model = make_model()
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
    model = make_model(1)
    model[0].choices = torch.tensor([3, 1, 2, 2, 2])
    update_selection_bias(model, rate=0.5)
    assert model[0].router.selection_bias.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0]


def test_the_bias_evens_the_load_out():
    model = make_model(1)
    model[0].router.weight.data[0] += 0.2
    x = tokens(256).abs()

    def imbalance():
        return float(model[0].metrics["num_tokens_per_expert"].max()) / (256 * K / E)

    model(x)
    first = imbalance()
    for _ in range(300):
        model(x)
        update_selection_bias(model, rate=2e-3)
    assert first > 1.5
    assert imbalance() < 1.1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_token_counts_once(use_reentrant):
    model = make_model()
    x = tokens().requires_grad_()
    y = checkpoint(model, x, use_reentrant=use_reentrant)
    once = [layer.choices.clone() for layer in model]
    y.sum().backward()
    for layer, count in zip(model, once, strict=True):
        assert int(count.sum()) == 9 * K
        assert torch.equal(layer.choices, count)


def test_what_counts_and_what_does_not():
    model = make_model(balance=Balance("global_batch"))
    model.eval()(tokens())
    assert not model[0].choices.any()
    model.train()
    with count_tokens(model):
        model(tokens())
    assert not model[0].choices.any()
    model(tokens()).sum().backward()
    assert int(model[0].choices.sum()) == 9 * K
    masked = make_model()
    masked[0](tokens(), token_mask=torch.arange(9) < 4)
    assert int(masked[0].choices.sum()) == 4 * K
    assert not moe_ext.MoELayer(8, 6, E)(tokens()).isnan().any()


def test_a_compiled_layer_counts_its_tokens_once():
    model = make_model(1)
    compiled = torch.compile(model[0], fullgraph=True, backend="aot_eager", dynamic=True)
    for use_checkpoint in (False, True):
        x = tokens().requires_grad_()
        y = checkpoint(compiled, x, use_reentrant=False) if use_checkpoint else compiled(x)
        y.sum().backward()
        assert int(model[0].choices.sum()) == 9 * K
        model[0].choices.zero_()


def test_state_dict_holds_the_bias_alone():
    model = make_model()
    model(tokens()).sum().backward()
    update_selection_bias(model)
    fresh = copy.deepcopy(make_model())
    fresh.load_state_dict(model.state_dict())
    for a, b in zip(biases(model), biases(fresh), strict=True):
        assert a.any()
        assert torch.equal(a, b)
    assert {name.rpartition(".")[2] for name in model.state_dict()} == {
        "weight", "selection_bias", "gate_up_proj", "down_proj",
    }  # fmt: skip


def test_hook_of_an_optimizer():
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = register_bias_update(optimizer, model, rate=0.25)
    for _ in range(3):
        model(tokens())
        optimizer.step()
        other(tokens())
        update_selection_bias(other, rate=0.25)
    assert biases(model)[0].any()
    assert torch.equal(biases(model)[0], biases(other)[0])
    handle.remove()
    model(tokens())
    optimizer.step()
    assert torch.equal(biases(model)[0], biases(other)[0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_a_scaler_updates_nothing(fused):
    model = make_model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=fused)
    register_bias_update(optimizer, model, rate=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(overflow):
        optimizer.zero_grad()
        loss = model(tokens()).sum()
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step(overflow=True)
    assert not biases(model)[0].any()
    once = model[0].choices.clone()
    assert int(once.sum()) == 9 * K, "its tokens count in the next update"
    step(overflow=False)
    assert not model[0].choices.any()
    want = 0.25 * torch.sign(once.float().mean() - once)
    assert torch.equal(biases(model)[0], want)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_wrong_rate(rate):
    with pytest.raises(ValueError, match=r"update_selection_bias: expected rate to be at least 0"):
        update_selection_bias(make_model(), rate=rate)


def test_a_model_without_a_bias():
    model = nn.Sequential(moe_ext.MoELayer(8, 6, E))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"update_selection_bias: expected model to have .*none"):
        update_selection_bias(model)
    with pytest.raises(ValueError, match=r"register_bias_update: expected model to have .*none"):
        register_bias_update(optimizer, model)
