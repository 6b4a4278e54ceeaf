"""Order of the streams while rows travel, with stand-ins for CUDA's: no GPU is needed."""

import contextlib
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks

from moe_ext import MoELayer
from moe_ext.comm import streams, workers
from moe_ext.dispatch import rows

EXCHANGE = ["tokens waits for main", "exchange on tokens"]


def arrival(number):
    return f"main waits for work {number} of tokens"


class FakeFuture:
    """torch's with devices wants a device."""

    def set_result(self, value):
        self.value = value

    def wait(self):
        return self.value


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, torch.device("cpu")
        self.num_events = 0

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.num_events += 1
        return f"work {self.num_events} of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class FakeCuda:
    """Every tensor is taken for one on a device with streams; what happens is logged."""

    def __init__(self):
        self.log = []
        self.main = self.current = FakeStream("main", self.log)
        self.sides = {}

    def side(self, purpose):
        return self.sides.setdefault(purpose, FakeStream(purpose, self.log))

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

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
                (streams, "side_stream", lambda device, purpose: self.side(purpose)),
                (torch.cuda, "current_stream", lambda device: self.current),
                (torch.cuda, "stream", self.stream),
                (dist, "all_to_all_single", exchange),
            ]:
                stack.enter_context(mock.patch.object(target, name, new, create=True))
            yield


def layer():
    torch.manual_seed(3)
    return MoELayer(8, 6, 4, ep_group=dist.group.WORLD, shared_expert=4, dtype=torch.float64)


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
    # The weights go before the rows, and are waited for behind them, each by its own event.
    want = [*EXCHANGE, *EXCHANGE, arrival(2), arrival(1)]
    want += [*EXCHANGE, "shared expert", arrival(3)]
    want += [*EXCHANGE, "shared expert backward", arrival(4)]
    want += [*EXCHANGE, *EXCHANGE, arrival(6), arrival(5)]
    assert cuda.log == want


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
    assert cuda.log == [*EXCHANGE, arrival(1), *EXCHANGE, arrival(2)]


def check_an_exchange_waits_for_no_other_purpose_and_holds_its_memory():
    cuda = FakeCuda()
    with cuda.in_place():
        sent = torch.ones(3)
        memory = weakref.ref(sent)
        gradients = streams.run_beside(
            lambda: cuda.log.append("reduction"), torch.ones(2), purpose="gradients"
        )
        tokens = streams.run_beside(
            lambda: cuda.log.append(f"exchange on {cuda.current.name}"), sent, purpose="tokens"
        )
        del sent
        assert memory() is not None
        tokens.join()
        assert memory() is None
        want = ["gradients waits for main", "reduction", *EXCHANGE, arrival(1)]
        assert cuda.log == want
        # Nobody waits for it, and its memory may go to the next tensors.
        del gradients
        assert cuda.log == [*want, "main waits for work 1 of gradients"]
        with pytest.raises(ZeroDivisionError):
            streams.run_beside(lambda: 1 // 0, torch.ones(2), purpose="tokens")
        assert cuda.log[-1] == arrival(2)
        # On another stream than that which the memory goes back to.
        beside = streams.run_beside(lambda: None, torch.ones(2), purpose="tokens")
        other = FakeStream("other", cuda.log)
        with cuda.stream(other):
            beside.join()
        assert sorted(cuda.log[-2:]) == [arrival(3), arrival(3).replace("main", "other")]


def check_a_collective_beside_the_caller_is_joined_by_who_waits():
    cuda = FakeCuda()
    x = torch.ones(4)
    with cuda.in_place(), mock.patch.object(torch.futures, "Future", lambda devices: FakeFuture()):
        pending = workers.start(
            lambda x, messages: [x + 1],
            (x,),
            dist.group.WORLD,
            "sum",
            finish=lambda found: found[0],
            async_op=True,
        )
        assert cuda.log == ["gradients waits for main"]
        assert torch.equal(pending.wait(), x + 1)
    assert cuda.log[-1] == "main waits for work 1 of gradients"


def check_a_device_without_streams_calls_in_line():
    with mock.patch.object(torch.cuda, "current_stream", side_effect=AssertionError):
        step(layer())


test_streams = Checks.of(globals()).test(2)
