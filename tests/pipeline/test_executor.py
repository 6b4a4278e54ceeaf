"""The executor: gradients of one process, from any schedule, with experts over ranks."""

import functools
import itertools
import os
import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks, full
from tables import table_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.utils.checkpoint import checkpoint

import moe_ext
from moe_ext.distributed import MoEMesh, count_traffic, fully_shard, sync_gradients
from moe_ext.pipeline import (
    SCHEDULES,
    Action,
    ActionTable,
    Costs,
    Pipeline,
    add_messages,
    make_table,
    plan_turns,
)
from moe_ext.testing import spawn_ranks

MICRO, BLOCKS, E = 4, 4, 4
# float64: sums of a few hundred terms near 1, whose order differs; 1e-9 is asked for.
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
over_4 = Checks()


class Block(nn.Module):
    """A dense layer and experts, whose balance loss is injected where the block runs."""

    def __init__(self, ep_group, has_experts=True):
        super().__init__()
        self.dense, self.experts = nn.Linear(8, 8), nn.Linear(8, 8)
        if has_experts:
            self.experts = moe_ext.MoELayer(8, 6, E, 2, ep_group=ep_group, balance=0.5)

    def forward(self, x):
        return x + self.experts(torch.tanh(self.dense(x)))


def is_block(module):
    return isinstance(module, Block)


def has_experts(block):
    return isinstance(block.experts, moe_ext.MoELayer)


class Stage(nn.Module):
    """Neighbouring blocks; the first maps the input, the last has the head."""

    def __init__(self, blocks, recompute):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(blocks), recompute
        for block in blocks:
            if recompute == "selective" and is_block(block) and has_experts(block):
                block.experts.experts = checkpoint_wrapper(block.experts.experts)

    def forward(self, x):
        for block in self.blocks:
            again = self.recompute == "by torch" and is_block(block)
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x


def layers(ep_group=None):
    """All layers of the model, the same on every rank; the first block is dense."""
    torch.manual_seed(5)
    found = _made(None)
    if ep_group is None:
        return found
    mine = _made(ep_group)
    mine.load_state_dict(found.state_dict())
    return mine


def _made(ep_group):
    blocks = [Block(ep_group, has_experts=i > 0) for i in range(BLOCKS)]
    return nn.ModuleList([nn.Linear(6, 8), *blocks, nn.Linear(8, 3)]).double()


def stages_of(table, rank, found, recompute=""):
    """Stages of a rank: as many blocks for each, the first and the last layer beside them."""
    each = BLOCKS // table.num_stages
    parts = [list(found[1 + s * each : 1 + (s + 1) * each]) for s in range(table.num_stages)]
    parts[0].insert(0, found[0])
    parts[-1].append(found[-1])
    owned = [stage for (_, stage), r in table.rank_of.items() if r == rank]
    return {s: Stage(parts[s], recompute) for s in owned}


def batches(rank=0):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(MICRO, 5, 6, dtype=torch.float64, generator=generator)
    return list(x), list(torch.randn(MICRO, 5, 3, dtype=torch.float64, generator=generator))


loss_of = nn.functional.mse_loss


@functools.cache
def one_process(num_batches=1):
    """The model after all micro-batches, one by one: mean of the losses; and the losses."""
    found, losses = layers(), []
    scale = 1 / (MICRO * num_batches)
    moe_ext.nn.set_loss_scale(found, scale)
    for rank in range(num_batches):
        for x, y in zip(*batches(rank), strict=True):
            losses.append(loss_of(nn.Sequential(*found)(x), y))
            (losses[-1] * scale).backward()
    return found, torch.stack(losses).detach()


def assert_same(table, rank, found, want):
    owned = {id(p) for m in stages_of(table, rank, found).values() for p in m.parameters()}
    for (name, p), q in zip(found.named_parameters(), want.parameters(), strict=True):
        if id(p) not in owned:
            assert p.grad is None, name
            continue
        message = lambda m, n=name: f"{n}: {m}"  # noqa: E731
        torch.testing.assert_close(full(p.grad), q.grad, msg=message, **TIGHT)


# Two exchanges in a pass of a layer, the last one beside the gradients of weights.
EXCHANGES = {
    "F": [(0.1, 0.1), (0.9, 0.9)],
    "B": [(0.1, 0.1), (0.5, 1.0)],
    "I": [(0.1, 0.1), (0.9, 0.9)],
}


@functools.cache
def planned(name, ranks):
    costs = Costs(transfer=0.25, exchanges=EXCHANGES)
    return plan_turns(make_table(name, ranks, MICRO), costs)


def run(
    name, ranks, group, rank, found, *, recompute="none", data=0, loss_scale=1.0, in_turns=False
):
    table = make_table(name, ranks, MICRO)
    stages = stages_of(table, rank, found, recompute)
    pipeline = Pipeline(
        planned(name, ranks) if in_turns else table,
        stages,
        loss_of,
        group=group,
        recompute=recompute == "full",
    )
    x, y = batches(data)
    first, last = 0 in pipeline.stages, table.num_stages - 1 in pipeline.stages
    losses = pipeline.step(x if first else (), y if last else (), loss_scale=loss_scale)
    return table, losses, pipeline


@functools.cache
def mesh():
    """Pipelines of 2 ranks, each stage with its experts over 2 ranks."""
    return MoEMesh(dp=1, ep=2, pp=2)


@over_4(("gpipe", "full"), ("zb-h1", "none"), ("interleaved", "by torch"), ("zbv", "by torch"))
def schedule(name, recompute):
    rank, found = mesh().pp_rank, layers()
    table, losses, pipeline = run(
        name, 2, mesh().pp_group, rank, found, recompute=recompute, loss_scale=2.0
    )
    want, want_losses = one_process()
    for p in found.parameters():
        if p.grad is not None:
            p.grad /= 2
    assert_same(table, rank, found, want)
    assert len(losses) == (MICRO if table.num_stages - 1 in pipeline.stages else 0)
    if losses:
        torch.testing.assert_close(torch.stack(losses), want_losses, **TIGHT)


@over_4()
def a_table_of_torch_with_messages():
    rank, found = mesh().pp_rank, layers()
    rows = get_schedule_ops("InterleavedZeroBubble", 2, MICRO, with_comms=True)
    table = table_of(*(" ".join(map(str, row)) for row in rows))
    pipeline = Pipeline(table, stages_of(table, rank, found), loss_of, group=mesh().pp_group)
    assert pipeline.table is table
    x, y = batches()
    for _ in range(2):
        pipeline.step(x if rank == 0 else (), y if rank == 1 else ())
    for p in found.parameters():
        if p.grad is not None:
            p.grad /= 2
    assert_same(table, rank, found, one_process()[0])


@over_4(
    *((name, "none") for name in SCHEDULES),
    *(("zero-bubble", how) for how in ("full", "selective")),
    *zip(SCHEDULES, itertools.cycle(("full", "selective")), itertools.repeat(True)),
    *((name, "none", True) for name in ("1f1b", "zbv", "dual-pipe-v")),
)
def experts_over_ranks(name, recompute, in_turns=False):
    pp, ep = mesh().pp_group, mesh().ep_group
    rank, data = mesh().pp_rank, mesh().ep_rank
    found = layers(ep)
    with count_traffic() as traffic:
        table, losses, pipeline = run(
            name, 2, pp, rank, found, recompute=recompute, data=data, in_turns=in_turns
        )
    sync_gradients(nn.ModuleList(pipeline.stages.values()), mesh=mesh())
    want, want_losses = one_process(2)
    assert_same(table, rank, found, want)
    if losses:
        mine = want_losses[data * MICRO : (data + 1) * MICRO]
        torch.testing.assert_close(torch.stack(losses), mine, **TIGHT)
    sent = add_messages(table).rows[rank]
    assert traffic.calls["send"] == sum(a.kind.startswith("SEND") for a in sent)
    # Each layer sends rows and weights there and rows back, forward and backward; W nothing more.
    # Experts in a wrapper take no weights.
    held = sum(has_experts(b) for s in pipeline.stages.values() for b in s.blocks if is_block(b))
    wants = {"none": 6, "full": 9, "selective": 4}
    assert traffic.calls["all_to_all"] == held * MICRO * wants[recompute], traffic.calls


@over_4(("1f1b",), ("zb-h1",), ("zbv",))
def experts_and_shards_of_fsdp(name):
    found = layers(mesh().ep_group)
    for block in filter(is_block, found):
        fully_shard(block, mesh())
    table, _, _ = run(name, 2, mesh().pp_group, mesh().pp_rank, found, data=mesh().ep_rank)
    for p in [*found[0].parameters(), *found[-1].parameters()]:
        if p.grad is not None:
            dist.all_reduce(p.grad, group=mesh().stage_group)
            p.grad /= 2
    assert_same(table, mesh().pp_rank, found, one_process(2)[0])


test_ranks_have_the_gradients_of_one_process = over_4.test(4)


class Fails(nn.Module):
    """A stage that raises or dies at its n-th forward pass, or in that micro-batch's backward."""

    def __init__(self, how, at):
        super().__init__()
        self.linear, self.how, self.at, self.count = nn.Linear(3, 3).double(), how, at, 0

    def forward(self, x):
        self.count += 1
        out = self.linear(x)
        if self.count == self.at + 1:
            if self.how == "raises":
                raise ValueError("no such weight")
            if self.how == "dies":
                os._exit(1)
            if self.how == "another shape":
                return out[:-1]
            if self.how == "raises backward":
                out.register_hook(self.fail)
        return out

    def fail(self, grad):
        raise KeyError("no such gradient")


def fails(rank, how, at, place):
    stage = Fails(how if rank == place else "", at)
    table = make_table("1f1b", 2, 3)
    pipeline = Pipeline(table, {rank: stage}, loss_of, group=dist.group.WORLD)
    x = [torch.ones(2, 3, dtype=torch.float64)] * 3
    start = time.monotonic()
    try:
        pipeline.step(x if rank == 0 else (), x if rank == 1 else ())
    except Exception as error:
        found = type(error).__name__, str(error), time.monotonic() - start
    with pytest.raises(RuntimeError, match="expected no step before this one to have failed"):
        pipeline.step()
    return found


@pytest.mark.parametrize(
    "how, at, place, kinds, texts",
    [
        (
            "raises",
            1,
            0,
            ("ValueError", "RankFailureError"),
            (
                "no such weight",
                "Pipeline.step, 0F1 (stage 0, micro-batch 1) on rank 0: expected every rank to "
                "take part, but rank 0 raised ValueError: no such weight",
            ),
        ),
        (
            "raises backward",
            1,
            1,
            ("RankFailureError", "KeyError"),
            (
                "Pipeline.step, 1B1 (stage 1, micro-batch 1) on rank 1: expected every rank to "
                "take part, but rank 1 raised KeyError: 'no such gradient'",
                "no such gradient",
            ),
        ),
        (
            "another shape",
            2,
            0,
            ("ValueError", "RankFailureError"),
            (
                "Pipeline.step: expected stage 0 to give the shape and dtype of its first "
                "micro-batch ((2, 3), torch.float64), got ((1, 3), torch.float64)",
                "0F2 (stage 0, micro-batch 2) on rank 0: expected every rank to take part",
            ),
        ),
        (
            "dies",
            1,
            1,
            ("RankFailureError", None),
            ("(stage 0, micro-batch ", None),
        ),
    ],
)
def test_a_failure_is_named_by_stage_micro_batch_and_action(how, at, place, kinds, texts):
    may_die = [place] if how == "dies" else []
    found = spawn_ranks(fails, 2, how, at, place, may_die=may_die)
    for kind, text, outcome in zip(kinds, texts, found, strict=True):
        if kind is not None:
            assert outcome[0] == kind, outcome
            assert text in outcome[1]
            assert outcome[2] < 10
    if how == "dies":
        # Its last gradient may be lost with it, and the send that it has not taken.
        assert re.match(r"Pipeline.step, 0(RECV_B|SEND_F)[012] ", found[0][1])
        assert "rank 1 died" in found[0][1] or "rank 1 did not answer" in found[0][1]


def fails_in_experts(rank):
    pp, place, found = mesh().pp_group, mesh().pp_rank, layers(mesh().ep_group)
    table = make_table("1f1b", 2, MICRO)
    stages = stages_of(table, place, found)
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == 3:
            raise ValueError("no such weight")

    if rank == 0:
        stages[0].blocks[2].experts.experts.register_forward_pre_hook(fail)
    pipeline = Pipeline(table, stages, loss_of, group=pp)
    x, y = batches()
    try:
        pipeline.step(x if place == 0 else (), y if place == 1 else ())
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_an_error_of_experts_ends_the_steps_of_all_ranks():
    found = spawn_ranks(fails_in_experts, 4)
    kinds, texts = zip(*found, strict=True)
    assert kinds == ("ValueError", "ValueError", "RankFailureError", "RankFailureError")
    told = "expected every rank to take part, but rank 0 raised ValueError"
    assert texts[0].startswith("no such weight")
    assert texts[1].startswith(f"AllToAllDispatcher of layer 'blocks.2.experts': {told}")
    for rank in (2, 3):
        where = f"1RECV_F2 (stage 1, micro-batch 2) on rank {rank}: AllToAllDispatcher"
        assert where in texts[rank] and told in texts[rank]
    if sys.version_info >= (3, 11):
        for rank in (0, 1):
            assert f"in Pipeline.step, 0F2 (stage 0, micro-batch 2) on rank {rank}" in texts[rank]


def one_rank(**changes):
    table = make_table("gpipe", 1, 2)
    options = {"table": table, "stages": {0: nn.Linear(3, 3)}, "loss_fn": loss_of, **changes}
    return Pipeline(options.pop("table"), options.pop("stages"), options.pop("loss_fn"), **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"table": make_table("gpipe", 2, 2)}, "a rank for each of the table's 2, got 1"),
        ({"table": ActionTable([[Action(0, "F", 0)]])}, "check_table: expected table to have 0I0"),
        (
            {"stages": {0: nn.Linear(3, 3), 1: nn.ReLU()}},
            r"expected stages to be \[0\].*got \[0, 1\]",
        ),
        ({"stages": {0: nn.Linear(3, 3, device="meta")}}, "weight of stage 0 on meta"),
        ({"max_in_flight": 1}, "to hold max_in_flight 1 micro-batches at most, got 2 at 0F1"),
        (
            {"table": ActionTable([[Action(0, "F", 0, version=1), Action(0, "B", 0, version=1)]])},
            "behind the update that makes them, got 0F0v1",
        ),
    ],
)
def test_refuses_what_it_cannot_run(changes, message):
    with pytest.raises(ValueError, match=message):
        one_rank(**changes)


def test_refuses_other_kinds_and_numbers_of_arguments():
    with pytest.raises(TypeError, match="Pipeline: expected group to be None or a ProcessGroup"):
        one_rank(group=3)
    with pytest.raises(TypeError, match="Pipeline: expected stages to be of type Mapping, got"):
        one_rank(stages=[nn.Linear(3, 3)])
    with pytest.raises(TypeError, match="Pipeline: expected stage 0 to be of type Module, got"):
        one_rank(stages={0: torch.tanh})
    x = torch.ones(2, 3)
    for nothing in (None, iter([x, x])):
        with pytest.raises(ValueError, match="expected inputs to be 2, one for each micro-batch"):
            one_rank().step(nothing, [x, x])
    with pytest.raises(ValueError, match="expected inputs to be 2, one for each micro-batch, got"):
        one_rank().step([x], [x, x])
    with pytest.raises(ValueError, match="expected targets to be 2, one for each micro-batch, got"):
        one_rank().step([x, x], [])
    table = make_table("zbv", 1, 2)
    pipeline = one_rank(table=table, stages={0: nn.Flatten(0), 1: nn.Linear(6, 6)})
    with pytest.raises(ValueError, match="stage 0 to give a tensor on cpu.* got torch.int64 on"):
        pipeline.step([x.long()] * 2, [x] * 2)


@pytest.mark.parametrize(
    "loss, text",
    [
        (nn.MSELoss(reduction="none"), r"torch.float32 on cpu of shape \(2, 3\)"),
        (lambda out, _: out.argmax(), r"torch.int64 on cpu of shape \(\)"),
        (lambda out, _: (out.mean(), {}), "tuple"),
        (lambda out, _: out.mean().item(), "float"),
    ],
)
def test_refuses_losses_that_are_not_one_number(loss, text):
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=f"expected loss_fn to give a tensor of one.*got {text}"):
        one_rank(loss_fn=loss).step([x, x], [x, x])


def test_one_process_runs_all_stages():
    found = layers()
    table, losses, _ = run("zbv", 1, None, 0, found)
    want, want_losses = one_process()
    assert_same(table, 0, found, want)
    torch.testing.assert_close(torch.stack(losses), want_losses, **TIGHT)


def test_a_second_forward_pass_draws_the_same_numbers_and_counts_nothing():
    grads, counts = [], []
    for recompute in (False, True):
        torch.manual_seed(3)
        router = moe_ext.nn.NoisyTopKRouter(8, E)
        router_of_bias = moe_ext.nn.TopKRouter(8, E, selection_bias=True)
        parts = [
            nn.Sequential(nn.Dropout(0.3), moe_ext.MoELayer(8, 6, E, router=r), nn.Dropout(0.3))
            for r in (router, router_of_bias)
        ]
        table = make_table("zbv", 1, 2)
        pipeline = Pipeline(table, dict(enumerate(parts)), loss_of, recompute=recompute)
        x = list(torch.randn(2, 5, 8))
        with torch.autocast("cpu", torch.bfloat16):
            pipeline.step(x, x)
        model = nn.ModuleList(parts)
        grads.append([p.grad for p in model.parameters()])
        counts.append({**dict(model.named_buffers()), "next": torch.rand(3)})
        counts[-1] |= {
            str(i): part[1].metrics["num_tokens_per_expert"] for i, part in enumerate(parts)
        }
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    assert counts[0].keys() == counts[1].keys() and len(counts[0]) > 3
    for name, value in counts[0].items():
        assert torch.equal(value, counts[1][name]), name
