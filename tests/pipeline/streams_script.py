"""Steps of a pipeline on a device whose streams have clocks (tests/cpp/streams); prints JSON.

It is a process of its own, since torch's engine looks for devices at its first backward pass alone.
"""

import importlib.util
import json
import sys
import types
from unittest import mock

import torch
from torch import nn

from moe_ext.comm import point_to_point, streams
from moe_ext.pipeline import Action, ActionTable, Pipeline, make_table

torch.utils.rename_privateuse1_backend("streams")
DEVICE = torch.device("streams", 0)
# W of a stage before B of the same one, which adds to the same gradients.
MIXED = "0F0 1F0 2F0 2I0 2W0 1I0 0B0 0F1 1F1 2F1 1W0 2B1 1B1 0B1"


class DeviceModule(types.ModuleType):
    """The module of a device, as torch asks for it."""

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def manual_seed_all(self, seed):
        pass

    def _is_in_bad_fork(self):
        return False


class Scaled(torch.autograd.Function):
    """A node in Python, with a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(12, 6)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.ones(6))

    def forward(self, x):
        # One weight is used twice.
        hidden = torch.tanh(self.up(self.norm(x)))
        return Scaled.apply(x + self.down(hidden + self.up(x)), self.scale)


def table_of(name):
    if name == "mixed":
        return ActionTable([[Action.from_text(text) for text in MIXED.split()]])
    return make_table(name, 1, 4, stages_per_rank=2)


def loss_of(out, target):
    return (out - target).square().mean()


def grads_of(table, device, weight_stream):
    """The gradients behind each of two steps, the second of which adds to those of the first."""
    torch.manual_seed(0)
    stages = {i: Stage().double().to(device) for i in range(table.num_stages)}
    batches = torch.randn(table.num_micro_batches, 3, 6, dtype=torch.float64).to(device).unbind()
    pipeline, found = Pipeline(table, stages, loss_of, weight_stream=weight_stream), []
    for _ in range(2):
        pipeline.step(batches, batches)
        found += [p.grad * 2 for stage in stages.values() for p in stage.parameters()]
    return [grad.cpu().tolist() for grad in found]


def seeded(fake):
    """Races: two reads that no event orders, and memory that goes to the next tensor."""
    x, side = torch.ones(3, device=DEVICE), torch.Stream(device=DEVICE)
    with side:
        y = x + 1
    kept = y * 2
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        kept + 1
    del kept
    torch.ones(3, device=DEVICE)
    found = fake.seen()[1]
    torch.accelerator.current_stream().wait_stream(side)
    return found


def main(path):
    spec = importlib.util.spec_from_file_location("_C_streams", path)
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    torch._register_device_module("streams", DeviceModule("streams"))
    sides = {}

    def side_stream(device, purpose):
        if purpose not in sides:
            sides[purpose] = torch.Stream(device=DEVICE)
        return sides[purpose]

    for target, attribute, new in [
        (streams, "has_streams", lambda device: device.type == "streams"),
        (streams, "side_stream", side_stream),
        (point_to_point, "goes_in_order", lambda device: device.type == "streams"),
        (torch.cuda, "current_stream", lambda device: torch.accelerator.current_stream()),
        (torch.cuda, "stream", lambda stream: stream),
        (Pipeline, "_refuse", lambda *_: None),
    ]:
        mock.patch.object(target, attribute, new).start()
    found = {"seeded": seeded(fake)}
    for name in ("zbv", "mixed"):
        table = table_of(name)
        found[name] = {"cpu": grads_of(table, torch.device("cpu"), True)}
        for way in ("main", "side"):
            fake.seen()
            grads = grads_of(table, DEVICE, way == "side")
            events, races = fake.seen()
            found[name][way] = {"grads": grads, "events": events, "races": races}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
