"""Order of the streams while rows travel, with stand-ins for CUDA's: no GPU is needed."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checks import assert_passed, outcomes

from moe_ext import MoELayer
from moe_ext.distributed import streams
from moe_ext.distributed.dispatch import rows

EXCHANGE = ["side waits for main", "exchange on side", "record 2 on side"]
ARRIVAL = "main waits for side"


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """Every tensor is taken for one on a device with streams; what happens is logged."""

    def __init__(self):
        self.log = []
        self.main, self.side = FakeStream("main", self.log), FakeStream("side", self.log)
        self.current = self.main

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, tensor, stream):
        entry = f"on {stream.name}"
        if self.log[-1] == f"record 1 {entry}":
            self.log[-1] = f"record 2 {entry}"
        else:
            self.log.append(f"record 1 {entry}")

    @contextlib.contextmanager
    def in_place(self):
        original = dist.all_to_all_single

        def exchange(out, x, *args, **kwargs):
            if x.dtype != torch.int64:
                self.log.append(f"exchange on {self.current.name}")
            return original(out, x, *args, **kwargs)

        with contextlib.ExitStack() as stack:
            for target, name, new in [
                (streams, "has_streams", lambda device: True),
                (streams, "side_stream", lambda device: self.side),
                (torch.cuda, "current_stream", lambda device: self.current),
                (torch.cuda, "stream", self.stream),
                (torch.Tensor, "record_stream", lambda *args: self.record(*args)),
                (dist, "all_to_all_single", exchange),
            ]:
                stack.enter_context(mock.patch.object(target, name, new, create=True))
            yield


def layer():
    torch.manual_seed(3)
    return MoELayer(8, 6, 4, ep_group=dist.group.WORLD, shared_ffn_dim=4, dtype=torch.float64)


def step(sharded):
    torch.manual_seed(5 + dist.get_rank())
    x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    sharded(x).square().sum().backward()
    return [x.grad, *(p.grad for p in sharded.parameters())]


def check_rows_are_awaited_only_where_they_are_used():
    sharded, cuda = layer(), FakeCuda()
    sharded.shared_expert.register_forward_hook(lambda *_: cuda.log.append("shared expert"))
    sharded.shared_expert.down_proj.register_full_backward_hook(
        lambda *_: cuda.log.append("shared expert backward")
    )
    want = step(layer())
    with cuda.in_place():
        found = step(sharded)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert cuda.current is cuda.main
    # Rows, then their weights.
    forward = [*EXCHANGE, ARRIVAL, *EXCHANGE, ARRIVAL, *EXCHANGE, "shared expert", ARRIVAL]
    backward = [*EXCHANGE, "shared expert backward", ARRIVAL, *EXCHANGE, ARRIVAL]
    backward += [*EXCHANGE, ARRIVAL]
    assert cuda.log == [*forward, *backward]


def check_backward_twice_exchanges_twice():
    cuda, rank = FakeCuda(), dist.get_rank()
    x = torch.arange(3.0, requires_grad=True)[:, None] + rank
    send, receive = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    y = rows.all_to_all_rows(x, dist.group.WORLD, send, receive, grad_scale=2.0)
    leaf = x
    with cuda.in_place():
        first = torch.autograd.grad(y.square().sum(), leaf, retain_graph=True)[0]
        second = torch.autograd.grad(y.square().sum(), leaf)[0]
    torch.testing.assert_close(first, 4 * x.detach())
    assert torch.equal(first, second)
    assert cuda.log == [*EXCHANGE, ARRIVAL] * 2


def check_a_device_without_streams_calls_in_line():
    with mock.patch.object(torch.cuda, "current_stream", side_effect=AssertionError):
        step(layer())


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def found():
    return outcomes(2, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_streams(found, check):
    assert_passed(found, check)
