"""How often layers over ranks wait for the device, with stand-ins for what CUDA alone has."""

import contextlib
import types
from unittest import mock

import torch
import torch.distributed as dist
from rank_checks import Checks, raised
from torch.overrides import TorchFunctionMode

from moe_ext import MoELayer
from moe_ext.attention import call, masks, ring_attention
from moe_ext.comm import agreement, collectives
from moe_ext.dispatch import static_sizes
from moe_ext.nn import RowBudget

READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
COPIES = {"tensor", "new_tensor", "as_tensor"}


class HostCalls(TorchFunctionMode):
    """Names of calls that would wait for the device: what reads it, and copies from the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS | COPIES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def world():
    return dist.group.WORLD


def check_a_layer_waits_once():
    torch.manual_seed(0)
    for dispatcher in ("alltoall", "dedup"):
        layer = MoELayer(8, 6, 4, ep_group=world(), dispatcher=dispatcher, capacity=None)
        for num_tokens in (5, 5, 7):
            x = torch.randn(num_tokens, 8, requires_grad=True)
            with HostCalls() as calls:
                layer(x).sum().backward()
        assert calls.names == ["tolist"], (dispatcher, calls.names)


def check_a_static_budget_waits_behind_its_first_round_or_never():
    sent, exchange = [], collectives._post

    def noting(out, x, *args):
        sent.append(x.is_floating_point())
        return exchange(out, x, *args)

    for overflow in ("rounds", "drop"):
        budget = RowBudget(6, overflow=overflow, static=True)
        layer = MoELayer(8, 6, 4, ep_group=world(), row_budget=budget)
        x = torch.randn(7, 8, requires_grad=True)
        with taken_for_cuda(), mock.patch.object(collectives, "_post", noting):
            for number in range(4):
                sent.clear()
                with HostCalls() as calls:
                    y = layer(x)
                    read = ["tolist"] if overflow == "rounds" else []
                    # The ranks compare a first call at once, and routers with the second one.
                    assert number < 2 or calls.names == read, (overflow, calls.names)
                    y.sum().backward()
                assert number < 2 or calls.names == read
        assert any(sent)


class Copy:
    """Of `streams.HostCopy`: a message that arrives when the test says so."""

    arrived = False

    def __init__(self, source):
        self.source = source

    def is_there(self):
        return Copy.arrived

    def rows(self):
        return self.source.tolist()


@contextlib.contextmanager
def taken_for_cuda():
    on = types.SimpleNamespace(has_streams=lambda device: True, HostCopy=Copy)
    with contextlib.ExitStack() as stack:
        for target, name, new in [
            (agreement, "streams", on),
            (static_sizes, "HostCopy", Copy),
            (call, "has_streams", on.has_streams),
            (call, "on_device", masks._copied),
        ]:
            stack.enter_context(mock.patch.object(target, name, new))
        Copy.arrived = False
        agreement._told.pop(world(), None)
        yield


def attend(length=4, **options):
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    options = {"is_causal": True, "cu_seqlens": (0, 3, 8), "layout": "contiguous", **options}
    out = ring_attention(q, k, v, group=world(), **options)
    out.sum().backward()
    return out.detach()


def check_an_attention_waits_for_its_first_call_alone():
    want = attend()
    with taken_for_cuda():
        assert torch.equal(attend(), want)
        for _ in range(3):
            with HostCalls() as calls:
                found = attend()
            assert torch.equal(found, want) and calls.names == [], calls.names
        told = agreement._told[world()]
        assert len(told.unread) == 3
        Copy.arrived = True
        attend()
        assert len(told.unread) == 1
        # Another length of the sequence is another call, and so is a sequence of unknown length.
        with mock.patch.object(agreement, "share", wraps=agreement.share) as share:
            attend(5, cu_seqlens=(0, 3, 10))
            attend(5, cu_seqlens=(0, 3, 10))
            assert share.call_count == 1
            attend(cu_seqlens=None)
            attend(cu_seqlens=None)
            assert share.call_count == 3


def check_a_difference_is_raised_by_the_next_call_everywhere():
    rank = dist.get_rank()
    differs = "expected window to be equal on every rank, got 7 on rank 0, 8 on rank 1"
    with taken_for_cuda():
        say(window=7)
        say(window=7)
        if rank == 0:
            # Has told this before, and goes on.
            say(window=7)
        else:
            raised(ValueError, differs, lambda: say(window=8))
        Copy.arrived = True
        if rank == 0:
            raised(ValueError, differs, lambda: say(window=7))


def check_a_problem_of_one_rank_is_raised_by_the_next_call_of_the_others():
    rank, refused = dist.get_rank(), "test: expected q to be right!+ on rank 0"
    with taken_for_cuda():
        say(window=3)
        if rank == 1:
            say(window=3)
            Copy.arrived = True
            raised(ValueError, refused, lambda: say(window=3))
        else:
            # Longer than a message.
            problem = "expected q to be right" + 2000 * "!"
            raised(ValueError, refused, lambda: say(problem, window=3))


def say(problem=None, **facts):
    call = agreement.Agreement("test", world(), torch.device("cpu"), repeats=True)
    return call.compare(facts, problem=problem)


test_host_reads = Checks.of(globals()).test(2)


def test_offsets_are_copied_to_a_device_once():
    offsets, device = (0, 3, 8), torch.device("meta")
    assert masks.on_device(offsets, device) is masks.on_device(offsets, device)
    # A copy within the host costs nothing, and nobody may see another's writes.
    assert masks.on_device(offsets, torch.device("cpu")).tolist() == [0, 3, 8]
