"""Pipelines over a backend that tells messages apart by their order, as NCCL does."""

import functools
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import test_asynchronous
import test_executor
import test_stages
import torch
import torch.distributed as dist
from fake_nccl import FakeNccl
from rank_checks import Checks
from tables import table_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ext.comm import c10d, point_to_point, streams
from moe_ext.comm.point_to_point import PeerMessage
from moe_ext.nn.torch_state import TorchState
from moe_ext.pipeline import SCHEDULES, Costs, Pipeline, executor, make_table, plan_turns
from moe_ext.pipeline.check import messages_of_pairs
from moe_ext.testing import spawn_ranks

loss_of = nn.functional.mse_loss


def over_nccl(check, is_fast):
    with FakeNccl(is_fast).in_place():
        check()


def chosen(checks, *names):
    """Checks of a module against one process, over the stand-in: each with fast sends or slow."""
    found = [name for name in checks if name.startswith(names)]
    return {
        name: functools.partial(over_nccl, checks[name], bool(i % 2))
        for i, name in enumerate(found)
    }


over_2 = Checks(chosen(test_stages.over_2, "tied", "outputs"))
experts = (f"experts_over_ranks-{s}-none" for s in SCHEDULES)
over_4 = Checks(
    {
        **chosen(test_executor.over_4, "schedule", "a_table", *experts),
        **chosen(test_asynchronous.over_4, "weights", "both", "slices"),
    }
)
for unwanted in [name for name in over_4 if name.endswith("none-True")]:
    del over_4[unwanted]  # in turns


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class NoReads(TorchDispatchMode):
    """Refuses what makes the host read a tensor, and so wait for its device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads"
        return function(*args, **(kwargs or {}))


@over_2(("1f1b",), ("zb-h1",))
def streams_wait_and_the_host_does_not(name):
    rank, nccl = dist.get_rank(), FakeNccl()
    x = [torch.ones(2, 3)] * 4
    with nccl.in_place():
        table, stage = make_table(name, 2, 4), Stage()
        pipeline = Pipeline(table, {rank: stage}, loss_of, group=dist.group.WORLD)
        run = functools.partial(
            pipeline.step, x if rank == 0 else (), x if rank == 1 else (), loss_scale=0.5
        )
        waits = []
        wait = PeerMessage.wait
        with mock.patch.object(PeerMessage, "wait", lambda m: waits.append(m) or wait(m)):
            run()
        # For a format: of what comes into a stage, or, at the end of the step, of what has left.
        assert len(waits) <= 1
        del nccl.log[:]
        with (
            mock.patch.object(PeerMessage, "wait", None),
            mock.patch.object(executor, "run_in_turns", None),
            NoReads(),
        ):
            run()
    row = [a for a in pipeline.table.rows[rank] if "_" in a.kind]
    posts = [line for line in nccl.log if "behind" in line]
    assert [line.split()[0] for line in posts] == [
        "send" if action.kind.startswith("SEND") else "receive" for action in row
    ]
    received = [line.split()[1] for line in posts if line.startswith("receive")]
    taken = [line.split()[-1] for line in nccl.log if "waits for receive" in line]
    assert sorted(taken) == sorted(received)


test_two_ranks_have_what_one_process_has = over_2.test(2)


test_four_ranks_have_what_one_process_has = over_4.test(4)


def runs_crossed(rank):
    """A table whose rank 1 receives the last activation before the second one."""
    table = table_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F2 1RECV_F1 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2",
    )
    with pytest.raises(ValueError, match="got message 1 of rank 0 to rank 1 as 0SEND_F1 and 1RECV"):
        messages_of_pairs(table)
    x, start = [torch.ones(2, 3)] * 3, time.monotonic()
    pairs = dict.fromkeys([(0, 1), (1, 0)], [])
    with (
        mock.patch.object(executor, "check_table"),
        mock.patch.object(executor, "messages_of_pairs", lambda table: pairs),
        pytest.raises(AssertionError, match="deadlock on") as found,
        FakeNccl().in_place(),
    ):
        pipeline = Pipeline(table, {rank: Stage()}, loss_of, group=dist.group.WORLD)
        pipeline.step(x if rank == 0 else (), x if rank == 1 else ())
    return str(found.value), time.monotonic() - start


def test_another_order_would_end_in_a_deadlock():
    found = spawn_ranks(runs_crossed, 2)
    assert all(seconds < 15 for _, seconds in found), found
    assert "is sent where" in found[1][0] and "nothing was sent" in found[0][0]


class RaisesLater(Stage):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise KeyError("no such weight")
        return super().forward(x)


def fails_in_the_second_step(rank):
    """Errors of a step whose first rank raises, and of the one behind it."""
    x, start, nccl = [torch.ones(2, 3)] * 2, time.monotonic(), FakeNccl()
    with nccl.in_place():
        stage = RaisesLater(2) if rank == 0 else Stage()
        pipeline = Pipeline(
            make_table("gpipe", 2, 2), {rank: stage}, loss_of, group=dist.group.WORLD
        )
        run = functools.partial(pipeline.step, *((x, ()) if rank == 0 else ((), x)))
        run()
        while rank == 1 and not c10d.default_store().add("moe_ext/raised/count", 0):
            time.sleep(0.05)
        found = []
        for _ in range(2):
            with pytest.raises((KeyError, RuntimeError)) as error:
                run()
            found.append(f"{type(error.value).__name__} {error.value}")
    return found, time.monotonic() - start


def test_an_error_is_raised_by_the_next_step_of_the_others():
    """No host waits after the first step, which is over by then."""
    (own, _), (others, seconds) = spawn_ranks(fails_in_the_second_step, 2)
    assert own[0] == "KeyError 'no such weight'" and seconds < 15
    assert others[0].startswith("RankFailureError Pipeline.step, 0F0 ")
    assert "but rank 0 raised KeyError: 'no such weight'; the group is unusable now" in others[0]
    assert all(
        "expected no step before this one to have failed" in each[1] for each in (own, others)
    )


def refusals(rank):
    """Errors of a pipeline whose tensors count as those of CUDA, by the group and the table."""
    table, found = make_table("gpipe", 2, 2), []
    groups = [
        {"cpu": "gloo", "cuda": "gloo"},
        {"cpu": "gloo"},
        {"cuda": "nccl"},
        {"cpu": "gloo", "cuda": "nccl"},
    ]
    for known in groups:
        plan = plan_turns(table, Costs()) if known is groups[-1] else table
        with (
            mock.patch.object(point_to_point, "goes_in_order", lambda device: True),
            mock.patch.object(executor, "backends", lambda group, known=known: known),
            pytest.raises(ValueError) as error,
        ):
            Pipeline(plan, {rank: Stage()}, loss_of, group=dist.group.WORLD)
        found.append(str(error.value))
    return found


def test_refuses_what_nccl_cannot_serve():
    for *groups, turns in spawn_ranks(refusals, 2):
        for text, known in zip(groups, ("'gloo', 'cuda': 'gloo'", "'gloo'", "'nccl'"), strict=True):
            assert text.startswith("Pipeline: expected group to have NCCL, and a backend for the")
            assert f"{known}}}" in text
        assert turns.startswith("Pipeline: expected table to be an ActionTable for stages on CUDA")
        assert "got a TurnPlan" in turns


@pytest.mark.parametrize("name", ["zbv", "dual-pipe-v"])
def test_a_step_reads_no_tensor_and_mixes_no_devices(name):
    """On "meta", which has no data: a read raises, and so does a tensor of the CPU."""
    stages, x = {i: Stage().to("meta") for i in range(2)}, [torch.ones(2, 3, device="meta")] * 2
    with mock.patch.object(Pipeline, "_refuse"):
        pipeline = Pipeline(make_table(name, 1, 2), stages, loss_of)
    losses = pipeline.step(x, x, loss_scale=0.5)
    assert [loss.device.type for loss in losses] == ["meta"] * 2
    assert all(p.grad.is_meta for stage in stages.values() for p in stage.parameters())


def test_a_second_forward_pass_draws_from_the_state_of_its_device():
    generator, forked = torch.Generator().manual_seed(3), []
    cpu = torch.device("cpu")
    with (
        mock.patch.object(streams, "has_streams", lambda device: True),
        mock.patch.object(torch.cuda, "get_rng_state", lambda device: generator.get_state()),
        mock.patch.object(torch.cuda, "set_rng_state", lambda s, device: generator.set_state(s)),
        mock.patch.object(torch.random, "fork_rng", lambda d: forked.append(d) or nullcontext()),
    ):
        state = TorchState.now(cpu)
        drawn = torch.rand(3, generator=generator)
        with state.restored():
            assert torch.equal(torch.rand(3, generator=generator), drawn)
    assert forked == [[cpu]]
