"""How many functions and operators one forward pass of the layer calls."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ext
from moe_ext import _runtime_library
from moe_ext.testing import spawn_ranks

# Neither reads nor writes an element.
FREE = {"view", "t", "transpose", "detach", "promote_types", "unsqueeze", "squeeze", "expand"}


class Calls(TorchDispatchMode):
    """Names of the operators that run, those that only make a view left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name not in FREE:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def entered(run):
    """Names of the functions of ours, in Python, that a call enters."""
    folder = str(Path(moe_ext.__file__).parent)
    names = []

    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            names.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.skipif(_runtime_library.load() is None, reason="the calls are in Python")
def test_forward_enters_few_functions_of_ours():
    """Between products that empty the caches, each takes 2 to 4 us of a small layer's time."""
    layer, x = moe_ext.MoELayer(16, 24, 4, 2), torch.randn(2, 8, 16)
    layer(x)
    names = entered(lambda: layer(x))
    assert len(names) <= 30, names


def entered_over_ranks(rank):
    layer = moe_ext.MoELayer(16, 24, 4, ep_group=dist.group.WORLD, dispatcher="alltoall")
    x = torch.randn(64, 16, requires_grad=True)
    for _ in range(2):  # with these ranks compare routers
        layer(x)
    return entered(lambda: layer(x))


@pytest.mark.skipif(_runtime_library.load() is None, reason="the calls are in Python")
def test_forward_over_ranks_enters_few_functions_of_ours():
    for names in spawn_ranks(entered_over_ranks, 2):
        assert len(names) <= 124, Counter(names)


def entered_by_data_parallel_steps(rank):
    """Functions of ours in two steps of a model without experts, and in those of one with them."""
    found = []
    for width in (16, None):
        model = torch.nn.Linear(16, width) if width else moe_ext.MoELayer(16, 24, 4)
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def steps(model=model, optimizer=optimizer):
            for _ in range(2):
                model(torch.randn(8, 16)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        found.append(entered(steps))
    return found


def test_data_parallel_steps_of_a_model_without_experts_enter_no_function_of_ours():
    for without, with_experts in spawn_ranks(entered_by_data_parallel_steps, 2):
        assert without == []
        assert with_experts  # and what is ours is seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("z_loss_coef", [0.0, 1e-3])
def test_forward_calls_fewer_than_twelve_operators(training, z_loss_coef):
    layer = moe_ext.MoELayer(16, 24, 4, 2, balance=moe_ext.nn.Balance(z_coef=z_loss_coef)).train(
        training
    )
    x = torch.randn(2, 8, 16)
    with Calls() as calls:
        layer(x)
    assert len(calls.names) < 12, calls.names


def test_losses_that_nobody_wants_are_not_computed():
    layer = moe_ext.MoELayer(16, 24, 4, 2, balance=0.0)
    with Calls() as calls:
        layer(torch.randn(2, 8, 16))
    assert not any("loss" in name for name in calls.names), calls.names
    with Calls() as calls:
        layer.metrics["z_loss"]
        layer.metrics["balance_loss"]
    assert sum("loss" in name for name in calls.names) == 2


@pytest.mark.parametrize("loss_mode", ["inject", "return"])
def test_losses_wait_for_a_reader_where_nothing_is_recorded(loss_mode):
    layer = moe_ext.MoELayer(16, 24, 4, 2, balance=moe_ext.nn.Balance(z_coef=1e-3, mode=loss_mode))
    x = torch.randn(2, 8, 16)
    layer(x)
    expected = layer.losses
    with torch.no_grad(), Calls() as calls:
        layer(x)
    assert not any("loss" in name for name in calls.names), calls.names
    assert list(layer.losses) == ["balance", "z"]
    assert {name: float(term) for name, term in layer.losses.items()} == {
        name: float(term.detach()) for name, term in expected.items()
    }
    assert float(layer.metrics["z_loss"]) * 1e-3 == pytest.approx(float(expected["z"].detach()))


def test_number_of_operators_does_not_depend_on_tokens_or_experts():
    counts = set()
    for num_tokens, num_experts in ((1, 2), (64, 2), (64, 16), (300, 16)):
        layer = moe_ext.MoELayer(16, 24, num_experts, 2)
        x = torch.randn(num_tokens, 16)
        with Calls() as calls:
            layer(x)
        counts.add(tuple(calls.names))
    assert len(counts) == 1, counts
