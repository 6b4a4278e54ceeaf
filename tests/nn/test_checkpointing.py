"""Chains with few slots: runs are the fewest possible, and gradients those of a plain chain."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint_sequential

import moe_ext
from moe_ext.nn import checkpoint_chain


@functools.cache
def fewest_runs(num_modules, slots):
    """Dynamic programming over where the second slot lies."""
    if num_modules == 1:
        return 0
    if slots == 0:
        return math.inf
    return min(
        m + fewest_runs(m, slots) + fewest_runs(num_modules - m, slots - 1)
        for m in range(1, num_modules)
    )


class Step(nn.Module):
    """Counts its runs, and at each the results of steps that are alive."""

    def __init__(self, seen):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.seen, self.runs = seen, 0

    def forward(self, x):
        self.runs += 1
        y = torch.tanh(x @ self.weight)
        self.seen.append(StorageWeakRef(y.untyped_storage()))
        self.seen.most = max(self.seen.most, sum(not ref.expired() for ref in self.seen))
        return y


class Seen(list):
    most = 0


def trained(run, num_modules):
    """Runs of each step, most results alive, and gradients."""
    torch.manual_seed(0)
    seen = Seen()
    steps = [Step(seen) for _ in range(num_modules)]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    run(steps, x).square().sum().backward()
    return [s.runs for s in steps], seen.most, [x.grad, *(s.weight.grad for s in steps)]


@pytest.mark.parametrize("slots, r", [(1, 1), (1, 4), (2, 2), (3, 2), (3, 3), (5, 2)])
def test_runs_memory_and_gradients(slots, r):
    longest = math.comb(slots + r, slots)
    for num_modules in (longest - 1, longest, longest + 1):
        runs, alive, gradients = trained(lambda s, x: checkpoint_chain(s, x, slots), num_modules)
        *_, want = trained(lambda s, x: nn.Sequential(*s)(x), num_modules)
        assert all(map(torch.equal, gradients, want))
        # The run whose activations the gradient is taken from, and at most r (r + 1) others.
        assert max(runs) - 1 <= r + (num_modules > longest)
        assert sum(runs) - num_modules == fewest_runs(num_modules, slots)
        # Beside the slots: a step's input, its result, and that of the step which ran before.
        assert alive <= slots + 3
    assert max(trained(lambda s, x: checkpoint_chain(s, x, slots), longest)[0]) - 1 == r


def test_segments_of_square_root():
    """Torch's own segments: twice the square root of the results, and one more run of each."""
    runs, alive, gradients = trained(
        lambda s, x: checkpoint_sequential(s, 4, x, use_reentrant=False), 16
    )
    _, all_alive, want = trained(lambda s, x: nn.Sequential(*s)(x), 16)
    assert all(map(torch.equal, gradients, want))
    assert max(runs) == 2
    assert alive <= 2 * 4 + 1 < all_alive


def test_expert_layers_count_once():
    def layers():
        torch.manual_seed(0)
        return nn.ModuleList(
            moe_ext.MoELayer(
                8,
                8,
                4,
                router=moe_ext.nn.TopKRouter(8, 4, selection_bias=True),
                balance=moe_ext.nn.Balance("global_batch"),
            )
            for _ in range(5)
        ).double()

    x = torch.randn(12, 8, dtype=torch.float64)
    plain, chain = layers(), layers()
    nn.Sequential(*plain)(x).square().sum().backward()
    checkpoint_chain(list(chain), x, 2).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), chain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for a, b in zip(plain, chain, strict=True):
        assert all(map(torch.equal, a.metrics.values(), b.metrics.values()))
    moe_ext.nn.update_selection_bias(plain)
    moe_ext.nn.update_selection_bias(chain)
    for (name, a), b in zip(plain.named_buffers(), chain.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_refusals():
    with pytest.raises(ValueError, match=r"checkpoint_chain: expected slots to be at least 1"):
        checkpoint_chain([torch.tanh], torch.ones(1), 0)
    with pytest.raises(ValueError, match=r"checkpoint_chain: expected modules to hold at least"):
        checkpoint_chain([], torch.ones(1), 1)
