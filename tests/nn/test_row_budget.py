import copy
import functools

import pytest
import torch
from layer_oracle import assert_all_close, outcome
from peak_memory import peak_bytes
from test_saved_bytes import saved_bytes
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext import _runtime_library
from moe_ext.dispatch.parts import fair_share, schedule
from moe_ext.distributed import LocalDispatcher
from moe_ext.nn import Balance, Capacity, GroupedExperts, RowBudget

# The same products; a token's rows are summed in the order of the rounds.
TIGHT = {"rtol": 1e-12, "atol": 1e-13}
E, K = 5, 2


def layers(budget, dtype=torch.float64, **options):
    """A layer within a budget, and the same one without."""
    torch.manual_seed(1)
    bounded = moe_ext.MoELayer(8, 6, E, K, row_budget=budget, dtype=dtype, **options)
    free = moe_ext.MoELayer(8, 6, E, K, dtype=dtype, **options)
    free.load_state_dict(bounded.state_dict())
    return bounded, free


def assert_same(bounded, free, x, mask=None, **tolerance):
    found, wanted = (outcome(layer, x, token_mask=mask) for layer in (bounded, free))
    assert_all_close(found, wanted, **{**TIGHT, **tolerance})
    for name, value in free.metrics.items():
        torch.testing.assert_close(bounded.metrics[name], value)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        *((rows, {}) for rows in (1, 7, 21, 41, 42, 1000)),
        (3, {"bias": True, "activation": "relu_squared"}),
        (42, {"bias": True, "activation": "relu_squared"}),
        (7, {"shared_expert": 4, "balance": Balance(z_coef=0.1)}),
        (3, {"capacity": 0.6}),
        (21, {"capacity": 0.6}),
    ],
    ids=str,
)
def test_rounds_equal_the_layer_without_a_budget(rows, options):
    bounded, free = layers(RowBudget(rows), **options)
    x = torch.randn(21, 8, dtype=torch.float64)
    assert_same(bounded, free, x)
    assert_same(bounded, free, x, torch.rand(21) < 0.5)
    assert_same(bounded, free, x[:0])


@pytest.mark.parametrize("overflow", ["rounds", "drop"])
def test_rounds_on_every_device(device, overflow):
    bounded, free = layers(RowBudget(11, overflow=overflow), balance=Balance(z_coef=0.1))
    x = torch.randn(21, 8, dtype=torch.float64)
    if overflow == "rounds":
        assert_same(bounded, free, x, torch.rand(21) < 0.7)
    else:
        assert all(gradient is not None for gradient in outcome(bounded, x))
        assert int(bounded.metrics["num_dropped"]) == 21 * K - 11


@pytest.mark.parametrize("rows", [4, 100])
def test_all_tokens_on_one_expert(rows):
    bounded, free = layers(RowBudget(rows), balance=0.0)
    for layer in (bounded, free):
        layer.router.weight.data.zero_()
    assert_same(bounded, free, torch.randn(21, 8, dtype=torch.float64))


@pytest.mark.parametrize("frozen", ["router", "experts", "x", "everything"])
def test_frozen_parts(frozen):
    bounded, free = layers(RowBudget(5), balance=0.0)
    found = []
    for layer in (bounded, free):
        for name, p in layer.named_parameters():
            p.requires_grad_(not (name.startswith(frozen) or frozen == "everything"))
        torch.manual_seed(3)
        x = torch.randn(9, 8, dtype=torch.float64)
        x.requires_grad_(frozen not in ("x", "everything"))
        y = layer(x)
        assert y.requires_grad == (frozen != "everything")
        if y.requires_grad:
            y.square().sum().backward()
        found.append([y.detach(), x.grad, *[p.grad for p in layer.parameters()]])
    assert_all_close(*found, **TIGHT)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    bounded, _ = layers(RowBudget(5))
    x = torch.randn(9, 8, dtype=torch.float64)
    run = functools.partial(checkpoint, bounded, use_reentrant=use_reentrant)
    assert_all_close(outcome(bounded, x, run), outcome(bounded, x), rtol=0, atol=0)


def test_experts_in_a_checkpoint_wrapper():
    bounded, _ = layers(RowBudget(5))
    wrapped, x = copy.deepcopy(bounded), torch.randn(9, 8, dtype=torch.float64)
    wrapped.experts = checkpoint_wrapper(wrapped.experts)
    assert_all_close(outcome(wrapped, x), outcome(bounded, x), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    bounded, free = layers(RowBudget(300), dtype=dtype)
    # Rows are rounded alike; sums over the rounds are rounded once, weight gradients once a round.
    assert_same(bounded, free, torch.randn(301, 8).to(dtype), rtol=3e-2, atol=3e-1)


def test_autocast():
    bounded, free = layers(RowBudget(100), dtype=torch.float32)
    x = torch.randn(301, 8)
    found = []
    for layer in (bounded, free):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        found.append([y.float(), *[p.grad for p in layer.parameters()]])
    assert_all_close(*found, rtol=3e-2, atol=3e-1)


class Exact(nn.Module):
    """Experts that compute in float32 under autocast."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, rows, expert_offsets):
        with torch.autocast("cpu", enabled=False):
            return rows.float() @ self.weight


def test_gradients_of_products_that_autocast_leaves_alone():
    bounded, _ = layers(RowBudget(100), dtype=torch.float32, experts=Exact())
    free, x = copy.deepcopy(bounded), torch.randn(301, 8)
    free.row_budget = None
    found = []
    for layer in (bounded, free):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.sum().backward()
        found.append([y, *[p.grad for p in layer.parameters()]])
    assert_all_close(*found, rtol=1e-4, atol=1e-4)


class Drawing(nn.Module):
    """Experts that draw random numbers."""

    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.draw = draw

    def forward(self, rows, expert_offsets):
        return self.draw(rows @ self.weight)


def with_hook(experts):
    experts.register_forward_hook(lambda module, args, rows: nn.functional.dropout(rows))
    return experts


class Dropped(nn.Module):
    """Parametrization that draws random numbers."""

    def forward(self, weight):
        return nn.functional.dropout(weight)


def with_parametrization(experts):
    nn.utils.parametrize.register_parametrization(experts, "down_proj", Dropped())
    return experts


LINEAR = functools.partial(GroupedExperts, E, 8, 6, gated=False)
DRAWING = {
    "a module": lambda: Drawing(nn.Dropout(0.5)),
    "a module of another name": lambda: Drawing(nn.RReLU(0.1, 0.9)),
    "a function": lambda: Drawing(nn.functional.dropout),
    "an activation": lambda: LINEAR(activation=nn.functional.dropout),
    "a norm": lambda: LINEAR(activation="relu", post_norm=nn.Dropout1d(0.5)),
    "a hook": lambda: with_hook(LINEAR(activation="relu")),
    "a parametrization": lambda: with_parametrization(LINEAR(activation="relu")),
}


@pytest.mark.parametrize("drawing", DRAWING)
def test_a_recomputed_round_draws_the_same_numbers(drawing):
    torch.manual_seed(0)
    experts = DRAWING[drawing]()
    layer = moe_ext.MoELayer(8, 6, E, K, experts=experts, row_budget=RowBudget(5), balance=0.0)
    layer.router.weight.data.zero_()  # the weights of the experts do not depend on x
    x = torch.randn(9, 8, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    # With the numbers that were drawn the outputs scale with x, so x . grad = y's sum.
    torch.testing.assert_close((x.grad * x).sum(), y.sum())
    state = torch.get_rng_state()
    layer(x).sum().backward()
    assert not torch.equal(torch.get_rng_state(), state)


def test_drop_keeps_the_first_slots_and_counts_the_others():
    bounded, free = layers(RowBudget(7, overflow="drop"))
    x = torch.randn(9, 8, dtype=torch.float64)
    mask = torch.arange(9) != 1
    y = bounded(x, token_mask=mask)
    assert int(bounded.metrics["num_dropped"]) == 8 * K - 7
    full = free(x, token_mask=mask)
    # Tokens 0, 2 and 3 have two slots each; token 4 keeps its first.
    torch.testing.assert_close(y[:4], full[:4], **TIGHT)
    assert not torch.allclose(y[4], full[4])
    assert y[4].any()
    assert not y[5:].any()
    bounded(x[:3])
    assert int(bounded.metrics["num_dropped"]) == 0
    y.sum().backward()


def test_drop_after_a_capacity():
    bounded, free = layers(RowBudget(9, overflow="drop"), capacity=0.5)
    x = torch.randn(20, 8, dtype=torch.float64)
    bounded(x)
    free(x)
    routed = 20 * K - int(free.metrics["num_dropped"])
    assert routed > 9
    assert int(bounded.metrics["num_dropped"]) == 20 * K - 9


def test_same_bits_for_any_number_of_threads(num_threads):
    bounded, _ = layers(RowBudget(50), dtype=torch.float32)
    x = torch.randn(100, 8)
    found = []
    for threads in (1, 3):
        num_threads(threads)
        found.append(outcome(bounded, x))
    assert_all_close(*found, rtol=0, atol=0)


T, D, F = 512, 32, 256


def documented_peak(rows):
    """The formula of docs/balance.md for float32, in bytes."""
    # In Python, the gradient of the up projection is not written over it.
    wide = 4 if _runtime_library.load() else 5
    return 4 * (rows * (3 * D + wide * F) + 4 * T * D + 2 * E * 3 * F * D + 12 * T * K + 2 * T * E)


def bounded_layer(rows):
    torch.manual_seed(0)
    budget = None if rows is None else RowBudget(rows)
    layer = moe_ext.MoELayer(D, F, E, K, row_budget=budget, balance=0.0)
    layer.router.weight.data.zero_()  # all tokens on experts 0 and 1
    return layer


@pytest.mark.parametrize("rows", [16, 256])
def test_peak_is_within_the_documented_function_of_the_budget(rows):
    layer = bounded_layer(rows)
    x = torch.randn(T, D, requires_grad=True)
    layer(x).sum().backward()  # tables of the library's products
    layer.zero_grad()
    x.grad = None
    peak = peak_bytes(lambda: layer(x).sum().backward())
    assert peak <= documented_peak(rows)
    assert peak > 0.75 * documented_peak(rows), "the formula says something"


def test_peak_without_a_budget_is_beyond_it():
    layer = bounded_layer(None)
    x = torch.randn(T, D, requires_grad=True)
    peak = peak_bytes(lambda: layer(x).sum().backward())
    assert peak > 2 * documented_peak(16)


def test_rounds_keep_no_rows_for_the_backward_pass():
    x = torch.randn(T, D, requires_grad=True)
    saved = {rows: saved_bytes(bounded_layer(rows), x) for rows in (16, 64, None)}
    assert saved[16] == saved[64]
    # The tokens, their weights and choices, and the logits.
    assert saved[64] <= T * (4 * D + 4 * K + 8 * K + 4 * E) + 1024
    assert saved[None] > saved[64] + T * K * (3 * F + D) * 4


def test_schedule_and_fair_share():
    torch.manual_seed(0)
    for ranks in (1, 2, 3, 4):
        for limit in (1, 5, 100):
            pairs = torch.randint(0, 30, (ranks, ranks)) * torch.randint(0, 2, (ranks, ranks))
            rounds = schedule(pairs, limit)
            assert torch.equal(torch.stack(rounds).sum(0), pairs)
            for share in rounds:
                assert int(share.sum(0).max()) <= limit
                assert int(share.sum(1).max()) <= limit
            for dim in (0, 1):
                cut = fair_share(pairs, limit, dim=dim)
                assert (cut <= pairs).all()
                want = pairs.sum(dim).clamp(max=limit)
                assert torch.equal(cut.sum(dim), want)
    assert fair_share(torch.tensor([[1, 9, 9]]), 8, dim=1).tolist() == [[1, 4, 3]]
    assert len(schedule(torch.zeros(2, 2, dtype=torch.int64), 3)) == 1
    # One source for one destination: as few rounds as the destination alone asks for.
    pairs = torch.tensor([[0, 40], [0, 0]])
    assert len(schedule(pairs, 10)) == 4


def test_deepcopy_and_eval():
    bounded, free = layers(RowBudget(5))
    x = torch.randn(9, 8, dtype=torch.float64)
    twin = copy.deepcopy(bounded).eval()
    with torch.no_grad():
        torch.testing.assert_close(twin(x), free(x), **TIGHT)
    assert "row_budget=RowBudget(rows=5" in repr(bounded)


class Elsewhere:
    """A dispatcher of the caller's own."""

    def __init__(self):
        self.inner = LocalDispatcher(E)

    def dispatch(self, *args, **kwargs):
        return self.inner.dispatch(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RowBudget(0), ValueError, r"RowBudget: expected rows to be at least 1, got 0"),
        (lambda: RowBudget(3, overflow="wait"), ValueError, r"expected overflow .*got 'wait'"),
        (lambda: layers(7.5), TypeError, r"RowBudget: expected rows to be an integer, got 7.5"),
        (
            lambda: layers(RowBudget(3), capacity=Capacity(1.0, pad=True)),
            ValueError,
            r"MoELayer: expected capacity.pad to be False with row_budget, got Capacity",
        ),
        (
            lambda: layers(RowBudget(3), dispatcher=Elsewhere())[0](torch.ones(2, 8).double()),
            ValueError,
            r"expected dispatcher to be one of .*'local'.* with row_budget, got Elsewhere",
        ),
    ],
)
def test_wrong_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_padding_that_is_asked_for_later_is_refused():
    layer, x = layers(RowBudget(3))[0], torch.ones(2, 8).double()
    layer(x)
    layer.capacity = Capacity(1.0, pad=True)
    with pytest.raises(ValueError, match="capacity.pad to be False with row_budget, got Capacity"):
        layer(x)
