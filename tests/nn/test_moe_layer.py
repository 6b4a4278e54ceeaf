import copy
import functools
import inspect
import io
import math

import numpy as np
import pytest
import torch
from layer_oracle import assert_all_close, layer_output, outcome
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import _runtime_library
from moe_ext.dispatch import DISPATCHERS
from moe_ext.nn import (
    Capacity,
    GroupedExperts,
    HashRouter,
    RouterOutput,
    RowBudget,
    TopKRouter,
    inject_loss,
    set_loss_scale,
)

# Sums of at most a few dozen products of numbers near one: a hundred roundings at most.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


def make_layer(dtype=torch.float64, **kwargs):
    torch.manual_seed(1)
    kwargs = {"top_k": 2, **kwargs}
    return moe_ext.MoELayer(8, 6, 5, dtype=dtype, **kwargs)


def gradients(layer):
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"activation": "geglu", "bias": True},
        {"activation": "geglu_tanh"},
        {"activation": "reglu"},
        {"activation": "relu_squared", "bias": True},
        {"activation": "gelu"},
        {"shared_expert": 4, "bias": True},
        {"balance": moe_ext.nn.Balance(z_coef=0.3, coef=0.5)},
        {"balance": 0.0},
        {"capacity": 0.5},
    ],
    ids=str,
)
def test_equals_loops_with_gradients(options, dtype):
    layer = make_layer(dtype, **options)
    x = torch.randn(3, 7, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 7, 8, dtype=dtype)
    y = layer(x)
    (y * weight).sum().backward()
    got, got_x = gradients(layer), x.grad
    layer.zero_grad()
    x.grad = None

    factor = options.get("capacity")
    capacity = None if factor is None else math.ceil(21 * layer.top_k * factor / 5)
    want, balance, z, dropped = layer_output(layer, x.reshape(-1, 8), capacity=capacity)
    objective = (want * weight.reshape(-1, 8)).sum()
    objective = objective + layer.balance_loss_coef * balance + layer.z_loss_coef * z
    objective.backward()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(y.reshape(-1, 8), want, **tolerance)
    torch.testing.assert_close(got_x, x.grad, **tolerance)
    for name, want_grad in gradients(layer).items():
        torch.testing.assert_close(
            got[name], want_grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )
    torch.testing.assert_close(layer.metrics["balance_loss"], balance.detach(), **tolerance)
    torch.testing.assert_close(layer.metrics["z_loss"], z.detach(), **tolerance)
    assert int(layer.metrics["num_dropped"]) == dropped
    assert (dropped > 0) == (factor is not None)
    assert int(layer.metrics["num_tokens_per_expert"].sum()) == 21 * layer.top_k


def test_token_mask_takes_tokens_out_of_everything():
    layer = make_layer(balance=moe_ext.nn.Balance(z_coef=0.1))
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 6, [True, True, False, False, False, True]])
    y = layer(x, token_mask=mask)
    y.sum().backward()
    got, got_x = gradients(layer), x.grad.clone()
    metrics = layer.metrics
    layer.zero_grad()
    alone = layer(x[mask])
    alone.sum().backward()
    assert torch.equal(y[mask], alone)
    assert not y[~mask].any()
    assert not got_x[~mask].any()
    for name, gradient in gradients(layer).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-13)
    assert torch.equal(metrics["num_tokens_per_expert"], layer.metrics["num_tokens_per_expert"])
    torch.testing.assert_close(metrics["balance_loss"], layer.metrics["balance_loss"])
    torch.testing.assert_close(metrics["z_loss"], layer.metrics["z_loss"])


@pytest.mark.parametrize("masked", [False, True], ids=["empty", "all masked"])
def test_no_token_at_all(masked):
    layer = make_layer(balance=moe_ext.nn.Balance(z_coef=0.1), capacity=1.0)
    tokens = 4 if masked else 0
    x = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(tokens, dtype=torch.bool)
    y = layer(x, token_mask=mask if masked else None)
    assert y.shape == x.shape
    assert not y.any()
    y.sum().backward()
    for name, gradient in gradients(layer).items():
        assert gradient is not None, name
        assert not gradient.any(), name
    assert float(layer.metrics["balance_loss"]) == 0.0
    assert float(layer.metrics["z_loss"]) == 0.0


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 2, 2, 8)], ids=str)
def test_any_leading_shape_and_strides(shape):
    layer = make_layer()
    x = torch.randn(shape, dtype=torch.float64)
    strided = torch.randn(*shape, 2, dtype=torch.float64)[..., 0].copy_(x)
    assert layer(strided).shape == shape
    assert torch.equal(layer(strided), layer(x))


@pytest.mark.parametrize("in_python", [False, True])
def test_losses_are_injected_in_training_only_and_scaled(in_python, monkeypatch):
    if in_python:
        monkeypatch.setattr(_runtime_library, "load", lambda: None)
    layer = make_layer(balance=moe_ext.nn.Balance(coef=0.5, z_coef=0.25))
    x = torch.randn(9, 8, dtype=torch.float64)
    router = layer.router.weight

    def router_grad(scale):
        set_loss_scale(torch.nn.Sequential(layer), scale)
        layer.zero_grad()
        # A loss that ignores the output: what arrives at the router is injected.
        (layer(x) * 0).sum().backward()
        return router.grad.clone()

    one = router_grad(1.0)
    assert one.any()
    torch.testing.assert_close(router_grad(0.25), one * 0.25)
    torch.testing.assert_close(router_grad(torch.tensor(8.0, dtype=torch.float64)), one * 8)
    assert set(layer.losses) == {"balance", "z"}
    torch.testing.assert_close(layer.losses["balance"], 0.5 * layer.metrics["balance_loss"])
    torch.testing.assert_close(layer.losses["z"], 0.25 * layer.metrics["z_loss"])
    assert not any(term.requires_grad for term in layer.losses.values())
    layer.eval()
    assert not router_grad(1.0).any()


def test_inject_loss_is_the_identity_with_a_second_gradient():
    y = torch.randn(3, requires_grad=True)
    p = torch.tensor(2.0, requires_grad=True)
    out = inject_loss(y, p**2, 3.0)
    assert torch.equal(out, y)
    out.sum().backward()
    assert torch.equal(y.grad, torch.ones(3))
    assert float(p.grad) == 12.0


@pytest.mark.skipif(_runtime_library.load() is None, reason="a function in Python returns a view")
def test_the_output_can_be_written_to():
    layer = make_layer(balance=moe_ext.nn.Balance(coef=0.5, z_coef=0.25))
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def written_to(x):
        y = layer(x)
        y += x
        return y

    expected = outcome(layer, x, lambda x: layer(x) + x)
    assert_all_close(outcome(layer, x, written_to), expected, rtol=0, atol=0)


def test_injected_losses_under_compiled_autograd():
    found = []
    for compiled in (False, True):
        y, p = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        objective = (2 * inject_loss(y * 3, p**2, torch.tensor(0.5))).sum()
        if compiled:
            with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
                objective.backward()
        else:
            objective.backward()
        found.append((y.grad.tolist(), float(p.grad)))
    assert found[0] == found[1] == ([6.0, 6.0, 6.0], 2.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_neither_gradients_nor_metrics(use_reentrant):
    layer = make_layer(balance=moe_ext.nn.Balance(z_coef=0.1))
    x = torch.randn(9, 8, dtype=torch.float64)
    want = [*outcome(layer, x), *layer.metrics.values()]
    run = functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
    assert_all_close([*outcome(layer, x, run), *layer.metrics.values()], want, rtol=0, atol=0)


def test_autocast():
    layer = make_layer(torch.float32, balance=moe_ext.nn.Balance(z_coef=0.1), shared_expert=4)
    x = torch.randn(33, 8, requires_grad=True)
    full = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
        routed = layer.router(x)
    assert half.dtype == torch.bfloat16
    assert routed.logits.dtype == torch.float32
    assert torch.equal(routed.gate.topk_idx, layer.router(x).gate.topk_idx)
    # bfloat16 keeps 8 bits; three roundings in a row on values near one.
    torch.testing.assert_close(half.float(), full, rtol=3e-2, atol=3e-2)
    double = make_layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert double(x.double()).dtype == torch.float64
    half.float().square().sum().backward()
    for name, gradient in gradients(layer).items():
        assert gradient.dtype == torch.float32, name
        assert gradient.any(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(dtype):
    layer = make_layer(torch.float32)
    low = copy.deepcopy(layer).to(dtype)
    x = torch.randn(17, 8).to(dtype)
    y = low(x)
    assert y.dtype == dtype
    assert low.router(x).logits.dtype == torch.float32
    y.sum().backward()
    assert all(gradient.dtype == dtype for gradient in gradients(low).values())


def test_deepcopy_state_dict_and_repr():
    layer = make_layer(shared_expert=4, bias=True)
    x = torch.randn(5, 8, dtype=torch.float64)
    y = layer(x)
    y.sum().backward()
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y)
    fresh = moe_ext.MoELayer(8, 6, 5, shared_expert=4, bias=True, dtype=torch.float64)
    assert not torch.equal(fresh(x), y)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    fresh.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(fresh(x), y)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "router.weight": (5, 8),
        "experts.gate_up_proj": (5, 12, 8),
        "experts.gate_up_proj_bias": (5, 12),
        "experts.down_proj": (5, 8, 6),
        "experts.down_proj_bias": (5, 8),
        "shared_expert.gate_up_proj.weight": (8, 8),
        "shared_expert.gate_up_proj.bias": (8,),
        "shared_expert.down_proj.weight": (8, 4),
        "shared_expert.down_proj.bias": (8,),
    }
    assert "num_experts=5" in repr(layer)
    assert "top_k=2" in repr(layer)


def test_meta_device_then_reset():
    with torch.device("meta"):
        layer = moe_ext.MoELayer(8, 6, 5, shared_expert=4)
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    direct = moe_ext.MoELayer(8, 6, 5, shared_expert=4)
    for (name, value), other in zip(layer.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("options", [{}, {"bias": True, "shared_expert": 4}], ids=str)
def test_layers_of_fake_tensors(options):
    with torch._subclasses.FakeTensorMode():
        layer = moe_ext.MoELayer(8, 6, 5, **options)
        layer(torch.empty(2, 3, 8)).sum().backward()
    shapes = [parameter.grad.shape for parameter in layer.parameters()]
    assert shapes == [parameter.shape for parameter in layer.parameters()]


def test_modules_of_ones_own():
    class FirstExpert(torch.nn.Module):
        def forward(self, x_TD, *, token_mask=None):
            logits = torch.zeros(x_TD.shape[0], 3)
            return RouterOutput(logits, moe_ext.ops.topk_gate(logits, 1, token_mask=token_mask))

    class Double(torch.nn.Module):
        def forward(self, rows, expert_offsets):
            return rows * 2

    layer = moe_ext.MoELayer(4, 1, 3, 1, router=FirstExpert(), experts=Double())
    x = torch.randn(6, 4)
    assert torch.equal(layer(x), 2 * x)
    assert layer.metrics["num_tokens_per_expert"].tolist() == [6, 0, 0]


def test_what_the_caller_knows_of_the_tokens_reaches_the_router():
    class Listening(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.heard = inner, []

        def forward(self, x_TD, **given):
            self.heard.append({k: v for k, v in given.items() if v is not None})
            return self.inner(x_TD, **given)

    layer = make_layer()
    layer.router = Listening(layer.router)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    ids = torch.arange(6).view(2, 3)
    layer(x)
    layer(x, token_ids=ids, token_idx=ids + 10, token_mask=ids > 2)
    assert layer.router.heard[0] == {}
    heard = {name: value.tolist() for name, value in layer.router.heard[1].items()}
    assert heard == {
        "token_ids": [0, 1, 2, 3, 4, 5],
        "token_idx": [10, 11, 12, 13, 14, 15],
        "token_mask": [False, False, False, True, True, True],
    }


def test_a_router_brings_its_number_of_choices():
    assert moe_ext.MoELayer(8, 6, 5).top_k == 2
    layer = moe_ext.MoELayer(8, 6, 5, router=TopKRouter(8, 5, 3))
    assert layer.top_k == 3
    layer(torch.randn(6, 8))
    assert int(layer.metrics["num_tokens_per_expert"].sum()) == 18


def test_same_bits_for_any_number_of_threads(num_threads):
    layer, x, found = make_layer(torch.float32), torch.randn(300, 8), []
    for threads in (1, 2, 3):
        num_threads(threads)
        found.append(outcome(layer, x))
    for other in found[1:]:
        assert_all_close(other, found[0], rtol=0, atol=0)


class OwnRouter(moe_ext.nn.Router):
    """One that cannot weigh a choice which is not its own."""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 6}, ValueError, r"TopKRouter: expected top_k to be in 1..num_experts=5, got 6"),
        ({"top_k": 0}, ValueError, r"expected top_k to be in 1..num_experts=5, got 0"),
        ({"activation": "swish"}, ValueError, r"activation to be one of .*, got 'swish'"),
        ({"router": "argmax"}, ValueError, r"router to be one of .*, or a module .* got 'argmax'"),
        ({"balance": "batch"}, ValueError, r"MoELayer: .* balance to be one of .*, got 'batch'"),
        ({"capacity": -1.25}, ValueError, r"Capacity: .*factor to be positive, got -1.25"),
        ({"capacity": 0.0}, ValueError, r"Capacity: expected factor to be positive, got 0.0"),
        ({"capacity": math.inf}, ValueError, r"Capacity: .* factor to be positive, got inf"),
        ({"balance": -1.0}, ValueError, r"Balance: expected coef to be at least 0, got -1.0"),
        ({"balance": math.nan}, ValueError, r"Balance: expected coef to be at least 0, got nan"),
        ({"shared_expert": -1}, ValueError, r"SharedExpert: .*ffn_dim to be at least 1, got -1"),
        ({"dispatcher": "ring"}, ValueError, r"dispatcher to be one of .*'auto'.*, got 'ring'"),
        ({"dispatcher": 3}, ValueError, "or a TokenDispatcher, got 3"),
        ({"model_dim": 0}, ValueError, "to be at least 1, got 0"),
        ({"ffn_dim": 0}, ValueError, "to be at least 1, got 0"),
        ({"num_experts": 0}, ValueError, "to be at least 1, got 0"),
        (
            {"num_experts": 2**61},
            ValueError,
            r"^MoELayer: .*num_experts to be below 2\*\*31",
        ),
        ({"model_dim": 8.0}, TypeError, "^MoELayer: expected model_dim to be an integer, got 8.0"),
        ({"ffn_dim": 6.0}, TypeError, "^MoELayer: expected ffn_dim to be an integer, got 6.0"),
        ({"num_experts": 5.0}, TypeError, "^MoELayer: .* num_experts to be an integer, got 5.0"),
        ({"num_experts": torch.tensor(5)}, TypeError, "num_experts to be an integer, got tensor"),
        ({"num_experts": True}, TypeError, "^MoELayer: .*num_experts to be an integer, got True"),
        ({"top_k": 2.0}, TypeError, "^MoELayer: expected top_k to be an integer, got 2.0"),
        ({"capacity": True}, TypeError, "capacity to be of type Real or .*, got True"),
        ({"row_budget": True}, TypeError, "row_budget to be of type Real or .*, got True"),
        ({"shared_expert": True}, TypeError, "shared_expert to be of type Real or .*, got True"),
        ({"ep_group": -100}, TypeError, "ep_group to be None or a ProcessGroup .*, got -100"),
        # Parts that contradict the layer, or each other.
        ({"top_k": 3, "router": TopKRouter(8, 5, 2)}, ValueError, "to have top_k=3, got 2"),
        ({"router": TopKRouter(9, 5, 2)}, ValueError, "router to have model_dim=8, got 9"),
        ({"router": TopKRouter(8, 4, 2)}, ValueError, "router to have num_experts=5, got 4"),
        ({"experts": GroupedExperts(5, 9, 6)}, ValueError, "to have model_dim=8, got 9"),
        ({"experts": GroupedExperts(8, 8, 4)}, ValueError, "to have num_experts=5, got 8"),
        (
            {"router": OwnRouter(8, 5, 2), "capacity": Capacity(1.0, overflow="reroute")},
            ValueError,
            r"\(with_choice\) with capacity.overflow='reroute', got OwnRouter",
        ),
    ],
    ids=str,
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        moe_ext.MoELayer(**{"model_dim": 8, "ffn_dim": 6, "num_experts": 5} | options)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_what_is_written_for_many_ranks_runs_on_one(name):
    """A dispatcher's name that needs ranks, with one: torchtitan #3082."""
    x, found = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).double(), []
    for dispatcher in ("local", name):
        budget = RowBudget(4, static=True) if dispatcher == "symm_mem" else None
        layer = make_layer(dispatcher=dispatcher, row_budget=budget)
        assert layer.explain_dispatch().name == "LocalDispatcher"
        found.append(outcome(layer, x))
    assert_all_close(*found)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.ones(3, 7)}, ValueError, r"x to be of shape \[..., 8\], got \(3, 7\)"),
        ({"x": torch.ones(())}, ValueError, r"expected x to be of shape \[..., 8\], got \(\)"),
        ({"x": torch.ones(3, 8).long()}, TypeError, "x to be floating point, got torch.int64"),
        ({"x": [1.0]}, TypeError, "^MoELayer: expected x to be a tensor, got list"),
        ({"x": torch.ones(3, 8)}, TypeError, r"cast one of them \(layer.to\(torch.float32\)"),
        ({"x": torch.ones(3, 8)}, TypeError, "dtype torch.float64, .*got torch.float32"),
        ({"x": torch.ones(3, 8).double() * math.nan}, RuntimeError, "(?i)nan"),
        ({"token_mask": torch.ones(3)}, TypeError, "token_mask to be bool, got torch.float32"),
        ({"token_mask": torch.ones(2) > 0}, ValueError, r"mask to be of shape \(3,\), got \(2,\)"),
        ({"token_mask": [True] * 3}, TypeError, "token_mask to be of type Tensor, got .True"),
        ({"token_ids": np.ones(3)}, TypeError, "token_ids to be of type Tensor, got array"),
        ({"token_ids": torch.ones(3).int()}, TypeError, "token_ids to be int64, got torch.int32"),
        ({"token_ids": torch.ones(1, 3).long()}, ValueError, r"ids to be of shape \(3,\), got \(1"),
        ({"token_idx": torch.ones(3).int()}, TypeError, "token_idx to be int64, got torch.int32"),
        ({"token_idx": torch.ones(1, 3).long()}, ValueError, r"idx to be of shape \(3,\), got \(1"),
    ],
)
def test_wrong_inputs(changed, error, message):
    with pytest.raises(error, match=message):
        make_layer()(**{"x": torch.ones(3, 8, dtype=torch.float64)} | changed)


def test_attributes_take_what_the_constructor_takes():
    made = moe_ext.MoELayer(8, 6, 5, balance="sequence", capacity=1.25, row_budget=None)
    later = moe_ext.MoELayer(8, 6, 5)
    later.balance, later.capacity = "sequence", 1.25
    assert (made.balance, made.capacity) == (later.balance, later.capacity)
    assert (later.balance.scope, later.capacity) == ("sequence", Capacity(1.25))
    later.balance, later.capacity, later.row_budget = 0.5, None, 30
    assert (later.balance.coef, later.capacity) == (0.5, None)
    assert later.row_budget == RowBudget(30)
    later.z_loss_coef = 0.25
    assert (later.balance.coef, later.balance.z_coef) == (0.5, 0.25)


@pytest.mark.parametrize("scopes", [("micro_batch", "global_batch"), ("global_batch", "sequence")])
def test_a_loss_of_another_scope_may_be_set_later(scopes):
    x = torch.randn(2, 2, 9, 8)
    for before, after in (scopes, scopes[::-1]):
        torch.manual_seed(0)
        made = moe_ext.MoELayer(8, 6, 4, balance=after)
        later = copy.deepcopy(made)
        later.balance = before
        later(x[0])
        later.balance = after
        for layer in (made, later):
            for each in x:
                layer(each).sum().backward()
        assert torch.equal(made.router.weight.grad, later.router.weight.grad)
        assert torch.equal(made.metrics["balance_loss"], later.metrics["balance_loss"])


@pytest.mark.parametrize("updates", [("sign", "quantile"), ("quantile", "sign")])
def test_a_router_that_balances_otherwise_may_be_set_later(updates):
    routers = [
        TopKRouter(8, 4, score_fn="sigmoid", selection_bias=True, bias_update=update)
        for update in updates
    ]
    made = moe_ext.MoELayer(8, 6, 4, router=copy.deepcopy(routers[1]))
    later = moe_ext.MoELayer(8, 6, 4, router=routers[0])
    later.router = routers[1]
    x = torch.randn(40, 8)
    for layer in (made, later):
        layer(x)
        moe_ext.nn.update_selection_bias(layer)
    assert torch.equal(made.router.selection_bias, later.router.selection_bias)


def test_a_capacity_that_draws_may_be_set_later():
    x, found = torch.randn(40, 8), []
    for at_once in (True, False):
        torch.manual_seed(0)
        drops = Capacity(0.5, drop="random", seed=3)
        layer = moe_ext.MoELayer(8, 6, 4, capacity=drops if at_once else None)
        router = copy.deepcopy(layer.router)
        layer.capacity = drops
        layer.router = router
        found.append(layer(x))
        assert int(layer.metrics["num_dropped"]) > 0
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("num_experts", 3, ValueError, r"to be 4, for which the layer was made, got 3"),
        ("model_dim", 16, ValueError, r"to be 8, for which the layer was made, got 16"),
        ("top_k", 3, AttributeError, "top_k"),
        ("balance", "batch", ValueError, "expected balance to be one of"),
        ("router", TopKRouter(8, 5), ValueError, "expected router to have num_experts=4, got 5"),
        ("router", "sigmoid", TypeError, "expected router to be of type Module, got 'sigmoid'"),
        ("capacity", "1.25", TypeError, "to be of type Real or Capacity, got '1.25'"),
        ("row_budget", True, TypeError, "to be of type Real or RowBudget, got True"),
        ("dispatcher", "dedup", TypeError, "to be a TokenDispatcher once the layer is made"),
    ],
)
def test_wrong_attributes_change_nothing(name, value, error, message):
    options = {"score_fn": "sigmoid", "selection_bias": True, "bias_update": "quantile"}
    layer = moe_ext.MoELayer(8, 6, 4, router=TopKRouter(8, 4, **options))
    before, histogram = getattr(layer, name), layer.required_bias
    with pytest.raises(error, match=message):
        setattr(layer, name, value)
    assert getattr(layer, name) is before or getattr(layer, name) == before
    assert layer.required_bias is histogram is not None


OTHER_DEFAULTS = {"dtype": (torch.float32, torch.bfloat16), "device": (None, "meta")}
COUNTS = torch.ones(9)


@pytest.mark.parametrize(
    "make",
    [
        lambda **made: TopKRouter(8, 40, selection_bias=True, **made),
        lambda **made: HashRouter(8, 40, vocab_size=99, **made),
        lambda **made: HashRouter(8, 40, vocab_size=99, method="random", **made),
        lambda **made: HashRouter(8, 40, vocab_size=9, token_counts=COUNTS, **made),
    ],
)
@pytest.mark.parametrize(("kind", "values"), OTHER_DEFAULTS.items())
def test_another_default_of_torch_changes_nothing(make, kind, values):
    x, ids, found = torch.randn(30, 8), torch.arange(30) % 9, []
    made = {"dtype": torch.float32, "device": "cpu"}
    set_default = getattr(torch, f"set_default_{kind}")
    for value in values:
        set_default(value)
        try:
            torch.manual_seed(0)
            layer = moe_ext.MoELayer(8, 6, 40, router=make(**made), capacity=1.0, **made)
            layer(x, token_ids=ids)
            found.append({**dict(layer.router.named_buffers()), **layer.metrics})
        finally:
            set_default(values[0])
    for name, value in found[0].items():
        assert value.dtype == found[1][name].dtype and torch.equal(value, found[1][name]), name


def test_top_k_is_that_of_the_router():
    layer = moe_ext.MoELayer(8, 6, 4, capacity=Capacity(1.0, pad=True))
    layer.router.top_k = 1
    layer(torch.randn(40, 8))
    assert layer.top_k == 1
    # 10 rows an expert have room for its share of one choice a token, not of two.
    assert int(layer.metrics["num_dropped"]) == int(
        (layer.metrics["num_tokens_per_expert"] - 10).clamp(min=0).sum()
    )


def test_router_options_reach_the_gate():
    torch.manual_seed(0)
    router = TopKRouter(
        8, 6, 2, score_fn="sigmoid", renormalize=False, scale=2.0, num_groups=3, top_groups=1,
        selection_bias=True,
    )  # fmt: skip
    x = torch.randn(40, 8)
    out = router(x)
    # One group of two experts: the pair is (2g, 2g + 1) in some order.
    assert torch.equal(out.gate.topk_idx[:, 0] // 2, out.gate.topk_idx[:, 1] // 2)
    scores = 2.0 * out.logits.sigmoid().gather(1, out.gate.topk_idx)
    torch.testing.assert_close(out.gate.topk_weights, scores)
    router.selection_bias[4:] = 10.0
    assert set(router(x).gate.topk_idx.flatten().tolist()) == {4, 5}
    assert "selection_bias" in router.state_dict()
    assert router(x.bfloat16()).logits.dtype == torch.float32
    router.selection_bias[0] = 1 + 2**-20
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert float(router.selection_bias[0]) == 1 + 2**-20
    assert router.double().selection_bias.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 4}, r"expected num_groups to divide num_experts=6, got 4"),
        ({"num_groups": 3, "top_groups": 4}, r"expected top_groups to be in 1..num_groups=3"),
        ({"num_groups": 6, "top_groups": 1}, r"leave at least top_k=2 experts, got 1"),
    ],
)
def test_wrong_router_options(options, message):
    with pytest.raises(ValueError, match=message):
        TopKRouter(8, 6, 2, **options)


def test_the_constructor_takes_sixteen_arguments():
    assert len(inspect.signature(moe_ext.MoELayer).parameters) == 16


def test_losses_may_be_set_between_steps():
    layer = moe_ext.MoELayer(8, 6, 5)
    assert (layer.balance_loss_coef, layer.z_loss_coef, layer.loss_mode) == (0.01, 0.0, "inject")
    layer.balance_loss_coef, layer.z_loss_coef, layer.loss_mode = 0.5, 0.1, "return"
    assert layer.balance == moe_ext.nn.Balance(coef=0.5, z_coef=0.1, mode="return")
    with pytest.raises(ValueError, match="Balance: expected coef to be at least 0, got -1"):
        layer.balance_loss_coef = -1
    preset = moe_ext.nn.presets.qwen3(8, 6, 4, 2, balance="sequence")
    assert preset.balance == moe_ext.nn.Balance("sequence", coef=0.002)
