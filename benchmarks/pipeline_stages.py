"""Stages that sleep for the cost of each action."""

import time

import torch
import torch.distributed as dist
from torch import nn

from moe_ext.dispatch.rows import all_to_all_rows
from moe_ext.pipeline import Costs, plan_turns
from moe_ext.pipeline.check import in_flight


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, costs, meet):
        ctx.costs, ctx.meet = costs, meet
        time.sleep(costs[0])
        meet()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.costs[1])
        ctx.meet()
        return grad.clone(), None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, costs):
        ctx.costs = costs
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.costs[2])
        return grad, None


class Sleeper(nn.Module):
    """Sleeps for `costs`: forward, gradient of the input, gradient of the weight.

    `meet` is called at the end of the first two.
    """

    def __init__(self, costs, meet=lambda: None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.costs, self.meet = costs, meet

    def forward(self, x):
        """The input as it is, after a sleep."""
        return _Input.apply(x, self.costs, self.meet) + _Weight.apply(self.weight, self.costs)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad.clone(), None


class Sleeping(nn.Module):
    """Rows go to the other ranks and back, and sleep before, there and behind.

    A forward pass sleeps for `seconds`, and so do the gradients of the rows and of the weight: the
    latter while the gradients of the rows travel, as in a layer.
    """

    COLUMNS = 256
    # Shares of a pass before rows are sent, while they are away, and after they are back.
    SHARES = (0.1, 0.8, 0.1)

    def __init__(self, seconds, rows, group, *, is_first):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds, self.group, self.is_first = seconds, group, is_first
        self.rows = torch.zeros(rows, self.COLUMNS)

    def forward(self, x):
        """The mean of the rows, added to the input."""
        before, there, behind = (share * self.seconds for share in self.SHARES)
        size = dist.get_world_size(self.group)
        parts = [len(self.rows) // size] * size
        weight = []

        def begin():
            costs = (0.0, 0.0, self.seconds)
            weight.append(_Weight.apply(self.weight, costs))

        rows = self.rows + x.mean()
        if not rows.requires_grad:
            rows.requires_grad_()  # the rows of the first stage get a gradient, too
        sent = _Sleep.apply(rows, before)
        there_rows = all_to_all_rows(sent, self.group, parts, parts, meanwhile=begin)
        results = _Sleep.apply(there_rows + weight[0], there)
        back = _Sleep.apply(all_to_all_rows(results, self.group, parts, parts), behind)
        return x + back.mean()


def exchange_costs(num_stages, forward, rows, weight, transfer):
    """The costs of such stages, each recomputed before its backward pass.

    The first stage computes all in W, since its input has no gradient.
    """
    a, b = Sleeping.SHARES[0], sum(Sleeping.SHARES[:2])
    again = [(share * forward, share * forward) for share in (a, b)]
    first, last = (forward + share * rows for share in (a, b))
    gradient, whole = forward + rows, forward + rows + weight

    def shares(pairs, whole):
        return [(start / whole, end / whole) for start, end in pairs]

    exchanges = {
        "F": shares(again, forward),
        "B": shares([*again, (first, first), (last, last + weight)], whole),
        "I": shares([*again, (first, first), (last, last)], gradient),
        "0I": (),
    }
    exchanges["0W"] = exchanges["B"]
    # The second forward pass runs while the gradient is on its way.
    ahead = {"B": forward / whole, "I": forward / gradient, "0I": 1.0, "0W": forward / whole}
    others = num_stages - 1
    inputs, weights = [0.0, *[gradient] * others], [whole, *[weight] * others]
    return Costs(forward, inputs, weights, transfer=transfer, exchanges=exchanges, ahead=ahead)


def plan_exchanges(table, costs, lanes):
    """One action at a time with what the table holds, several with three micro-batches more."""
    more = 0 if lanes == 1 else 3
    return plan_turns(table, costs, lanes=lanes, max_in_flight=max(in_flight(table)) + more)


def costs_of(stages):
    """The costs of such stages; the first one has no gradient of its input."""
    forward, inputs, weights = zip(*stages, strict=True)
    return Costs(forward, (0.0, *inputs[1:]), weights)
