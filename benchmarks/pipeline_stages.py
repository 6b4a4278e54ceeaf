"""Stages that sleep for the cost of each action."""

import time

import torch
from torch import nn

from moe_ext.pipeline import Costs


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


def costs_of(stages):
    """The costs of such stages; the first one has no gradient of its input."""
    forward, inputs, weights = zip(*stages, strict=True)
    return Costs(forward, (0.0, *inputs[1:]), weights)
