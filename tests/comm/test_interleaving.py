"""`run_in_turns`: passes of layers in turn have the bits that they have one after the other."""

import functools

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import moe_ext
from moe_ext.attention import sequence_parallel
from moe_ext.attention.context import shared_sequences
from moe_ext.comm import collectives, reports, shared_memory
from moe_ext.comm.interleaving import pass_turn
from moe_ext.comm.shared_memory import Neighbours
from moe_ext.dispatch import rows
from moe_ext.distributed import count_traffic, run_in_turns

E, D, MICRO = 4, 8, 4


class Model(nn.Module):
    """Two layers, and dropout between them."""

    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(3)
        self.recompute = recompute
        made = {"ep_group": dist.group.WORLD, "shared_expert": 5}
        self.layers = nn.ModuleList(
            [
                moe_ext.MoELayer(D, 6, E, 2, dispatcher="alltoall", **made),
                moe_ext.MoELayer(
                    D, 6, E, 2, dispatcher=moe_ext.nn.Dispatch("dedup", overlap=2), **made
                ),
            ]
        )
        if recompute == "selective":
            for layer in self.layers:
                layer.experts = checkpoint_wrapper(layer.experts)

    def forward(self, x):
        for layer in self.layers:
            full = self.recompute == "full"
            x = checkpoint(layer, x, use_reentrant=False) if full else layer(x)
        return x


def batches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    # Other numbers of tokens on other ranks, and none.
    sizes = [5, 0, 9, 3] if dist.get_rank() else [4, 6, 1, 8]
    return [torch.randn(size, D, generator=generator) for size in sizes]


def outcome(recompute, run):
    """Outputs and gradients of micro-batches, the next one forward beside each one backward."""
    model, found = Model(recompute), []

    def forward(x):
        x = x.clone().requires_grad_()
        return x, model(x)

    def backward(x, y):
        y.square().sum().backward()
        return x.grad, y

    xs = batches()
    ahead = forward(xs[0])
    with count_traffic() as traffic:
        for x in xs[1:]:
            ahead, done = run([functools.partial(forward, x), functools.partial(backward, *ahead)])
            found += done
        found += backward(*ahead)
    return [*found, *[p.grad for p in model.parameters()]], traffic.calls


def one_by_one(functions):
    return [function() for function in functions]


def check_passes_in_turn_have_their_bits():
    for recompute in ("none", "full", "selective"):
        (found, calls), (want, wanted) = (
            outcome(recompute, run) for run in (run_in_turns, one_by_one)
        )
        assert calls == wanted
        for one, other in zip(found, want, strict=True):
            assert torch.equal(one, other), recompute


def check_one_computes_while_the_other_waits():
    order = []

    def send(name):
        order.append(name)
        collectives.all_to_all(torch.zeros(2, 1), dist.group.WORLD, operation="test", counted=False)
        order.append(name)

    run_in_turns([functools.partial(send, name) for name in "ab"])
    assert order == ["a", "b", "a", "b"]


def check_an_exchange_passes_the_turn_once():
    group, passed = dist.group.WORLD, []
    x = torch.ones(2, 64)  # rows that travel over two groups between hosts
    with pytest.MonkeyPatch.context() as patch:
        me = dist.get_rank()
        patch.setitem(shared_memory.known, group, Neighbours(None, me, me + 1, over_network=True))
        patch.setattr(reports.lane, "turns", object())
        patch.setattr(reports, "pass_turn", lambda: passed.append(1))
        assert rows.all_to_all_rows(x, group, [1, 1], [1, 1]).equal(x)
    assert len(passed) == 1


def check_an_error_ends_all():
    model, x = Model("none"), torch.ones(4, D)

    def fail(*_):
        raise ValueError("no such expert")

    if dist.get_rank() == 1:
        model.layers[1].experts.register_forward_pre_hook(fail)
    others = [functools.partial(model.layers[0], x), functools.partial(model, x)]
    with pytest.raises(ValueError, match="no such expert"):
        run_in_turns(others)
    with pytest.raises(ValueError, match="no such expert"):
        run_in_turns(others[::-1])


test_over_ranks = Checks.of(globals()).test(2)


def test_random_numbers_and_settings_are_those_of_each_alone():
    def draw(length):
        found = []
        for _ in range(length):
            found.append(torch.rand(2))
            pass_turn()
        return torch.stack(found), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    torch.manual_seed(1)
    want = torch.rand(4, 2)
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu"):
        found = run_in_turns([functools.partial(draw, 2), functools.partial(draw, 3)])
    assert [settings for _, *settings in found] == [[False, True]] * 2
    for (numbers, *_), length in zip(found, (2, 3), strict=True):
        assert torch.equal(numbers, want[:length])
    # The first one's are behind it, the other one's are not.
    assert torch.equal(torch.rand(2), want[2])


@pytest.mark.parametrize(
    "context", [lambda: sequence_parallel(None), lambda: torch.device("meta"), torch.inference_mode]
)
def test_modes_hold_for_all(context):
    def look():
        pass_turn()
        return shared_sequences(), torch.ones(2).device.type, torch.is_inference_mode_enabled()

    with context():
        assert run_in_turns([look] * 3) == [look()] * 3
        assert run_in_turns([look] * 3) == [look()] * 3
    assert run_in_turns([look] * 3) == [(None, "cpu", False)] * 3


def test_operators_of_all_are_counted_and_faked():
    x = torch.ones(4, 4)
    with FlopCounterMode(display=False) as counter:
        run_in_turns([lambda: x @ x] * 3)
    assert counter.get_total_flops() == 3 * 2 * 4**3
    with torch._subclasses.FakeTensorMode():
        found = run_in_turns([lambda: torch.ones(2)] * 3)
    assert all(type(each) is not torch.Tensor for each in found)
    assert all(type(each) is torch.Tensor for each in run_in_turns([lambda: x + x] * 3))


def test_nothing_and_one_alone():
    assert run_in_turns([]) == []
    assert run_in_turns([lambda: 3]) == [3]
