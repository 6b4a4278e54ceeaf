"""Code of one rank raises between two exchanges: every rank raises, with its words, at once."""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks
from torch import nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from moe_ext import MoELayer
from moe_ext.comm import c10d, collectives, reports, shared_memory
from moe_ext.distributed import HierarchicalDispatcher, RankFailureError, sync_gradients
from moe_ext.nn import Dispatch, ModuleExperts, RowBudget
from moe_ext.testing import spawn_ranks

DIM = 8
# Over two ranks; the first one looks at a store to which no rank has told anything.
CHECKS = Checks()


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient today")


class Faulty(nn.Module):
    """A module of a layer, which raises where it is told to."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.raises = inner, None

    def __getattr__(self, name):
        # A layer asks its experts and its router for what they are.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x, *args, **kwargs):
        if self.raises == "forward":
            raise KeyError("no such weight")
        if self.raises == "backward":
            x = RaisesInBackward.apply(x)
        y = self.inner(x, *args, **kwargs)
        if self.raises == "dtype":
            return y.double()
        return nn.functional.pad(y, (0, 1)) if self.raises == "width" else y


WORDS = {
    "forward": "KeyError: 'no such weight'",
    "backward": "ValueError: no gradient today",
    "width": "ValueError: MoELayer: expected experts to return rows of shape",
    "dtype": "ValueError: AllToAllDispatcher: expected experts to return torch.float32 for rows of",
}
OWN = {"forward": KeyError, "backward": ValueError, "width": ValueError, "dtype": ValueError}
# Where the others meet the error, in the class that they raise it in.
THEIRS = {**OWN, "forward": RuntimeError}


def make_layer(rank, dispatcher, part, rows, overlap=1):
    group = dist.group.WORLD
    if dispatcher == "hierarchical":
        dispatcher = HierarchicalDispatcher(12, group, node_size=2)
    budget = None if rows is None else RowBudget(rows)
    options = {
        "dispatcher": Dispatch(dispatcher, overlap=overlap),
        "ep_group": group,
        "row_budget": budget,
    }
    if part == "own experts":
        own = [Faulty(nn.Linear(DIM, DIM)) for _ in range(12 // dist.get_world_size())]
        experts = ModuleExperts(own, ep_group=group)
        layer = MoELayer(DIM, 6, 12, 2, experts=experts, **options)
        return layer, own[0]
    layer = MoELayer(DIM, 6, 12, 2, shared_expert=4, **options)
    faulty = Faulty(getattr(layer, part))
    setattr(layer, part, faulty)
    return layer, faulty


def one_fault(rank, dispatcher, part, when, victim, rows=None, recomputed=False, overlap=1):
    """What a step raises and in how many seconds, and whether the next one is that of before."""
    torch.manual_seed(0)
    layer, faulty = make_layer(rank, dispatcher, part, rows, overlap)
    torch.manual_seed(rank)
    x = torch.randn(6 + rank, DIM, requires_grad=True)

    def step():
        layer.zero_grad()
        x.grad = None
        y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        layer(y).square().sum().backward()
        sync_gradients(layer)
        return x.grad.clone()

    before = step()
    faulty.raises = when if rank == victim else None
    found, started = None, time.monotonic()
    try:
        step()
    except Exception as error:
        found = error
    seconds = time.monotonic() - started
    faulty.raises = None
    return (type(found), str(found)), seconds, torch.equal(step(), before)


FAULTS = (
    ("alltoall", "experts", "forward", 1),
    ("alltoall", "experts", "backward", 0),
    ("alltoall", "experts", "width", 1),
    ("dedup", "experts", "width", 0, 8),
    ("alltoall", "experts", "dtype", 1),
    ("alltoall", "shared_expert", "forward", 0),
    ("alltoall", "shared_expert", "backward", 1),
    ("alltoall", "own experts", "forward", 1),
    ("alltoall", "own experts", "backward", 1),
    ("alltoall", "router", "backward", 0),
    ("alltoall", "experts", "backward", 1, None, True),
    ("alltoall", "experts", "forward", 1, 8),
    ("alltoall", "experts", "backward", 1, 8),
    ("alltoall", "shared_expert", "backward", 1, 8),
    ("dedup", "experts", "forward", 0),
    ("dedup", "shared_expert", "backward", 1),
    ("dedup", "experts", "backward", 1, 8),
    ("dedup", "shared_expert", "backward", 0, 8),
    ("allgather", "experts", "forward", 1),
    ("allgather", "experts", "backward", 0),
    ("auto", "own experts", "forward", 1),
    ("auto", "experts", "backward", 1),
)
FAULTS_OF_NODES = (
    ("hierarchical", "experts", "forward", 1),
    ("hierarchical", "experts", "backward", 2),
    ("hierarchical", "shared_expert", "forward", 3),
)


# Several exchanges are underway when a rank raises.
FAULTS_OF_PARTS = (
    ("alltoall", "experts", "forward", 1, None, False, 3),
    ("alltoall", "experts", "backward", 0, None, False, 3),
    ("dedup", "experts", "forward", 2, None, False, 3),
    ("dedup", "experts", "backward", 1, None, False, 3),
    ("dedup", "shared_expert", "backward", 1, None, False, 3),
)


def run_faults_between_networks(rank, faults):
    """The same where rows for higher ranks and for lower ones travel over a group each."""
    shared_memory.network_identity, collectives._LEAST_BYTES = lambda: rank, 1
    return run_faults(rank, faults)


def run_faults(rank, faults):
    found = [one_fault(rank, *faults[0])]
    reports._LOOK_EVERY = timedelta(seconds=0.05)
    return found + [one_fault(rank, *fault) for fault in faults[1:]]


@pytest.mark.parametrize(
    ("run", "num_ranks", "faults", "store"),
    [
        (run_faults, 2, FAULTS, "tcp"),
        (run_faults, 4, FAULTS_OF_NODES, "file"),
        (run_faults_between_networks, 3, FAULTS_OF_PARTS, "tcp"),
    ],
)
def test_every_rank_raises_the_error_of_one(run, num_ranks, faults, store):
    found = spawn_ranks(run, num_ranks, faults, store=store)
    for i, (dispatcher, part, when, victim, *_) in enumerate(faults):
        for rank in range(num_ranks):
            (kind, text), seconds, same = found[rank][i]
            case = (dispatcher, part, when, rank, text)
            if rank == victim:
                assert kind is OWN[when], case
            else:
                assert kind is THEIRS[when], case
                assert f"but rank {victim} raised {WORDS[when]}" in text, case
            # The others look after half a second in the first case.
            assert seconds < 3, case
            assert same, case


@CHECKS()
def an_error_on_a_device_is_kept():
    """A rank that misses another finds its error: no host waits on CUDA, and nobody is told."""
    with (
        contextlib.suppress(KeyError),
        reports.telling(dist.group.WORLD, torch.device("cuda"), "f"),
    ):
        if dist.get_rank() == 1:
            raise KeyError("no such weight")
    dist.barrier()
    store = c10d.default_store()
    assert store.add("moe_ext/raised/count", 0) == 0
    assert store.get("moe_ext/error/1").decode() == "f: 'no such weight'"
    # Reports of the next check come after the look of all ranks.
    dist.barrier()


@CHECKS()
def errors_of_a_rank_are_told_one_after_the_other():
    """A rank raises twice, and waits for nobody in between."""
    reports._LOOK_EVERY = timedelta(seconds=0.05)
    world, x = dist.group.WORLD, torch.ones(3)
    for word in ("first", "second", "third"):
        with pytest.raises(ValueError, match=f"{word} error"):
            with reports.telling(world, x.device, "f"):
                if dist.get_rank() == 1:
                    raise ValueError(f"{word} error")
            collectives.all_reduce_(x.clone(), world, operation="sum")
    assert collectives.all_reduce_(x, world, operation="sum")[0] == dist.get_world_size()


@CHECKS((None,), (4,))
def results_of_another_dtype_on_one_rank_are_refused_on_all(rows):
    reports._LOOK_EVERY = timedelta(seconds=0.05)
    layer, faulty = make_layer(dist.get_rank(), "alltoall", "experts", rows)
    x = torch.randn(6, DIM, requires_grad=True)
    faulty.raises = "dtype" if dist.get_rank() == 1 else None
    with pytest.raises(ValueError) as found:
        layer(x)
    assert str(found.value) == (
        "AllToAllDispatcher: expected the dtype of the experts' results to be equal on every "
        "rank, got torch.float32 on rank 0, torch.float64 on rank 1"
    )
    # All of them may return another one.
    faulty.raises = "dtype"
    y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.float64


def several_fail_at_once(rank):
    """All ranks but the last raise, and then all of them; ten times."""
    reports._LOOK_EVERY = timedelta(seconds=0.05)
    layer, faulty = make_layer(rank, "alltoall", "experts", None)
    x = torch.randn(5, DIM)
    found = []
    for i in range(10):
        faulty.raises = "forward" if rank < 2 + i % 2 else None
        started = time.monotonic()
        try:
            layer(x)
        except Exception as error:
            found.append((type(error), str(error), time.monotonic() - started))
        faulty.raises = None
        layer(x)
    return found


def test_ranks_that_raise_at_the_same_time_keep_their_own_errors():
    found = spawn_ranks(several_fail_at_once, 3)
    for i in range(10):
        raising = range(2 + i % 2)
        for rank in range(3):
            kind, text, seconds = found[rank][i]
            assert kind is (KeyError if rank in raising else RuntimeError)
            assert rank in raising or text.endswith("raised KeyError: 'no such weight'")
            assert seconds < 3


def replicas_of_a_group_that_fails(rank):
    """Ranks 0 and 1 share experts, as do 2 and 3; rank 1 raises, and then does nothing."""
    reports._LOOK_EVERY = timedelta(seconds=0.1)
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    ep_group, replicas = groups[rank // 2], groups[2 + rank % 2]
    torch.manual_seed(0)
    layer = MoELayer(DIM, 6, 4, 2, ep_group=ep_group)
    layer.experts = Faulty(layer.experts)
    layer.experts.raises = "backward" if rank == 1 else None
    started, text = time.monotonic(), ""
    try:
        layer(torch.randn(5, DIM)).sum().backward()
        collectives.all_reduce_(torch.ones(3), replicas, operation="sum")
    except Exception as error:
        text = f"{type(error).__name__} {getattr(error, 'ranks', ())} {error}"
    seconds = time.monotonic() - started
    store = c10d.default_store()
    store.set(f"ended/{rank}", "")
    # The others do not wait for a process to end.
    store.wait([f"ended/{other}" for other in range(4)])
    return text, seconds


def test_replicas_raise_too():
    found = spawn_ranks(replicas_of_a_group_that_fails, 4)
    for rank in (0, 2, 3):
        text, seconds = found[rank]
        assert "rank 1 raised ValueError: no gradient today" in text
        assert seconds < 4
    for rank in (2, 3):
        assert found[rank][0].startswith("RankFailureError (1,)")


def _exp_of_exp(x):
    with reports.telling(dist.group.WORLD, x.device, "f"):
        return x.exp().exp()


@CHECKS()
def a_backward_pass_without_rows_and_a_recomputation_are_nobodys_business():
    """A rank raises where nobody waits for it; later the others wait long for something else."""
    reports._LOOK_EVERY = timedelta(seconds=0.05)
    layer, _ = make_layer(dist.get_rank(), "alltoall", "experts", None)
    x = torch.randn(5, DIM, requires_grad=True)
    layer(x).sum().backward()
    # A pass of its own, without rows that travel.
    with pytest.raises(ValueError, match="no gradient"):
        RaisesInBackward.apply(x).sum().backward()
    if dist.get_rank() == 1:
        # torch ends a recomputation by an exception, where the backward pass has all it needs.
        # The name of the layer, for a message, takes a look at all objects there are.
        with mock.patch.object(reports, "with_layer", side_effect=AssertionError):
            checkpoint(_exp_of_exp, x, use_reentrant=False).sum().backward()
        time.sleep(0.4)
    layer(x).sum().backward()
    sync_gradients(layer)


def test_an_error_is_told_once():
    error = ValueError("x")
    reports.mark_told(error)
    with pytest.raises(ValueError, match="x"), reports.telling(None, torch.device("cpu"), "f"):
        raise error
    assert reports.is_told(error) and not reports.is_told(RankFailureError("", ()))


def function_with(forward, backward):
    """A function that changes nothing, and calls something in each pass."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            forward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found = backward(grad)
            return grad.clone() if found is None else found

    return Function.apply


def raising(error):
    def function(*args):
        raise error

    return function


# It exchanges no row, but says so.
exchange = function_with(reports.exchanged_rows, reports.exchanged_rows)
faulty = RaisesInBackward.apply


def calling(backward):
    """What calls something in its backward pass, after an exchange."""
    function = function_with(id, backward)
    return lambda x: exchange(function(x)).sum().backward()


def recomputing(inner, use_reentrant):
    return lambda x: exchange(checkpoint(inner, x, use_reentrant=use_reentrant)).sum().backward()


def fails_and_is_caught(grad):
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradient"):
        faulty(grad.detach().requires_grad_()).sum().backward()


def queues_what_raises(grad):
    """As DDP does where a communication hook raises."""
    Variable._execution_engine.queue_callback(raising(OSError("no route")))


def two_passes(x):
    y = exchange(exchange(x)).sum()
    y.backward(retain_graph=True)
    y.backward()


def second_derivative(x):
    (grad,) = torch.autograd.grad(exchange(x * x).sum(), x, create_graph=True)
    grad.sum().backward()


def raises_in_a_hook(x):
    y = x * 2
    y.register_hook(raising(KeyError("hook")))
    exchange(y).sum().backward()


def raises_in_a_thread(x):
    with ThreadPoolExecutor() as threads:
        threads.submit(exchange(faulty(x)).sum().backward).result()


PASSES = {
    # Run, class of its error, whether the others are told.
    "two exchanges, twice": (two_passes, None, False),
    "second derivative": (second_derivative, None, False),
    "dropped": (lambda x: exchange(faulty(x)).sum(), None, False),
    "early stop": (recomputing(lambda y: exchange(y.exp()).exp(), False), None, False),
    "caught inside": (calling(fails_and_is_caught), None, False),
    "no exchange": (lambda x: faulty(x).sum().backward(), ValueError, False),
    "error before it": (lambda x: faulty(exchange(x)).sum().backward(), ValueError, False),
    "exit": (calling(raising(SystemExit())), SystemExit, False),
    "function": (lambda x: exchange(faulty(x)).sum().backward(), ValueError, True),
    "grad": (lambda x: torch.autograd.grad(exchange(faulty(x)).sum(), x), ValueError, True),
    "hook": (raises_in_a_hook, KeyError, True),
    "error of C++": (calling(lambda grad: grad.new_ones(7)), RuntimeError, True),
    "recomputation": (recomputing(lambda y: faulty(exchange(y)), False), ValueError, True),
    "pass inside": (recomputing(lambda y: exchange(faulty(y)), True), ValueError, True),
    "end of the pass": (calling(queues_what_raises), OSError, True),
    "thread": (raises_in_a_thread, ValueError, True),
}


@pytest.mark.parametrize("name", PASSES)
def test_the_error_of_a_backward_pass_after_an_exchange_is_told(monkeypatch, name):
    run, kind, is_told = PASSES[name]
    told, queued, found = [], [], None
    after, before = c10d.call_after_backward, sys.gettrace()
    monkeypatch.setattr(reports, "_tell", lambda error, _: told.append(error))
    monkeypatch.setattr(
        c10d, "call_after_backward", lambda call: (queued.append(call._number), after(call))
    )
    sys.settrace(debugger := lambda *_: None)
    try:
        run(torch.ones(3, requires_grad=True))
    except BaseException as error:
        found = error
    kept = sys.gettrace()
    sys.settrace(before)
    assert (None if found is None else type(found)) is kind
    # Passes inside of one another raise the same.
    assert {id(error) for error in told} == ({id(found)} if is_told else set())
    assert len(set(queued)) == len(queued) and not reports._passes
    assert kept is debugger


def test_a_pass_that_a_debugger_evaluates_leaves_no_trace_function():
    found = []

    def trace(frame, event, _):
        # Nothing is traced meanwhile: the error comes unseen.
        if not found:
            found.append(None)
            with contextlib.suppress(ValueError):
                exchange(faulty(torch.ones(3, requires_grad=True))).sum().backward()
            found.append(sys.gettrace())

    before = sys.gettrace()
    sys.settrace(trace)
    torch.is_tensor(None)
    torch.is_tensor(None)
    kept = sys.gettrace()
    sys.settrace(before)
    assert kept is trace and found[1] is not trace


@CHECKS()
def the_engine_of_torch_is_not_replaced():
    engines = torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward
    layer, _ = make_layer(dist.get_rank(), "alltoall", "experts", None)
    layer(torch.randn(5, DIM, requires_grad=True)).sum().backward()
    sync_gradients(layer)
    after = torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward
    assert engines == after and after[0] is after[1] and not reports._passes


test_over_two_ranks = CHECKS.test(2)


def wait_in_unlike_messages(rank):
    """Errors where one of three ranks raises, and the others wait in messages of other parts."""
    group, sizes, x = dist.group.WORLD, [1, 1, 1], torch.zeros(3, 2)
    reports._LOOK_EVERY, reports._GRACE = timedelta(seconds=0.05), timedelta(seconds=1)
    collectives.all_to_all(x, group, operation="first")
    try:
        if rank == 0:
            with reports.telling(group, x.device, "op"):
                raise KeyError("no such weight")
        sizes = sizes if rank == 1 else None
        collectives.all_to_all(x, group, operation="op", send=sizes, receive=sizes)
    except Exception as error:
        return type(error), str(error)


def test_an_error_is_told_where_ranks_wait_in_unlike_messages():
    own, *others = spawn_ranks(wait_in_unlike_messages, 3)
    assert own == (KeyError, "'no such weight'")
    for kind, text in others:
        assert kind is RankFailureError and "rank 0 raised KeyError: 'no such weight'" in text
