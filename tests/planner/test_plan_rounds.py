"""Plans of jobs with local steps: what they cost, and rounds that ranks train."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from planner_models import (
    SMALL,
    best_of_all,
    columns,
    routing_of,
    run_step,
    small_mixtral,
)
from rank_checks import Checks

from moe_ext.comm.collectives import all_reduce_bytes
from moe_ext.distributed import count_traffic
from moe_ext.distributed.dtensor import local_part
from moe_ext.optim import DiLoCo
from moe_ext.planner import ClusterSpec, Job, Level, Plan, StepCost, plan
from moe_ext.planner.axes import DEFAULTS

CHECKS = Checks()
CLUSTER = ClusterSpec(
    (Level("node", 4, 1e-6, 1e10), Level("network", 1024, 1e-4, 1e7)), {"float32": 1e11}, 4e8, 1e10
)
JOB = Job(8, 256, 16, "float32", local_steps=10)
STEPS = 3
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def applied_to(model, codec="none", **fixed):
    """The plan with these values for four ranks, and rounds of three steps."""
    made = plan(
        *(model, CLUSTER), num_ranks=4, seq_len=16, global_batch=8, dtype="float32",
        local_steps=STEPS, local_codec=codec, fixed={**DEFAULTS, **fixed},
    )  # fmt: skip
    return made.apply(model)


def equal_over(group, tensors):
    """Whether the ranks of a group have the same numbers."""
    mine = torch.cat([local_part(x.detach()).flatten() for x in tensors])
    ranks = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(ranks, mine, group=group)
    return all(torch.equal(each, mine) for each in ranks)


CASES = [("none", {"ep": 2}), ("int8", {"ep": 4}), ("sparseloco", {"ep": 1})]
CASES += [
    ("bf16", {"ep": 2, "dispatcher": "dedup"}),
    ("none", {"pp": 2, "ep": 1, "schedule": "1f1b"}),
]


@CHECKS(*((i,) for i in range(len(CASES))))
def rounds_send_what_the_plan_says(case):
    codec, fixed = CASES[case]
    applied = applied_to(small_mixtral(), codec, **{"pp": 1, **fixed})
    mesh = applied.mesh
    assert applied.plan.choice["ep"] == fixed["ep"] and applied.plan.choice["zero"] == 0
    (inner,) = applied.optimizers(torch.optim.AdamW, lr=1e-2)
    outer = {"lr": 1.0} if codec == "sparseloco" else OUTER
    rounds, foretold = applied.local_steps(inner, **outer), applied.round_bytes()
    assert isinstance(rounds, DiLoCo)
    experts = [p for name, p in applied.model.named_parameters() if ".experts." in name]
    held = {id(p) for p in experts} if fixed["ep"] > 1 else set()
    dense = [p for p in applied.model.parameters() if id(p) not in held]
    with count_traffic() as traffic, rounds:
        for i in range(STEPS):
            draw = torch.Generator().manual_seed(10 * mesh.data_rank + i)
            own = torch.randint(64, (8 // mesh.data_size, 16), generator=draw).split(1)
            inner.zero_grad()
            routing = routing_of(applied, lambda own=own: run_step(applied, own))
            applied.sync_gradients()
            found = applied.sent_bytes(routing)
            assert found["gradients"] == 0
            foretold += sum(found.values())
            before = [local_part(p.detach()).clone() for p in experts]
            inner.step()
            if i < STEPS - 1:
                assert not equal_over(mesh.stage_group, dense)
    assert foretold == traffic.total_bytes, (foretold, traffic)
    assert rounds.round == 1 and equal_over(mesh.stage_group, dense)
    if mesh.edp_size > 1:
        assert equal_over(mesh.replica_mesh.get_group(), experts)
    else:
        # A step of AdamW alone: none of the outer optimizer's, which would go as far again.
        pairs = zip(map(local_part, experts), before, strict=True)
        moved = max(float((p - x).abs().max()) for p, x in pairs)
        assert moved < 1.3e-2


@CHECKS()
def times_a_step_with_its_share_of_a_round():
    applied = applied_to(small_mixtral(), ep=2, pp=1)
    seconds = applied.plan.time(small_mixtral, group=dist.group.WORLD, steps=1)
    assert 0 < seconds < 60


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name):
    pytest.importorskip("transformers")
    CHECKS.assert_passed(4, name)


def test_seconds_of_a_round():
    cost = StepCost(SMALL, CLUSTER, JOB)
    placed = columns(ep=4)
    dense, experts = (float(part) for part in cost.sizes.parameters(placed))
    assert float(cost.end.gradients(placed)) == 0
    # Over all eight ranks by the links of four, over pairs by those of each rank.
    rings = [
        2 * (7 * 1e-4 + all_reduce_bytes(4 * dense, 8) / 2 / (4 * 1e7)),
        2 * (1e-4 + all_reduce_bytes(4 * experts, 2) / 2 / 1e7),
    ]
    # Four numbers of float32 are read and written.
    passes = 2 * 4 * 4 * (dense + experts) / CLUSTER.memory_bandwidth
    assert float(cost.end.rounds(placed)) == pytest.approx((sum(rings) + passes) / 10, rel=1e-6)
    whole = StepCost(SMALL, CLUSTER, dataclasses.replace(JOB, local_steps=1))
    assert float(whole.end.rounds(placed)) == 0
    assert float(whole.end.gradients(placed)) == pytest.approx(sum(rings), rel=1e-6)
    # Experts that no other rank holds have no rounds.
    alone = float(cost.end.rounds(columns(ep=8)) * 10)
    assert alone == pytest.approx(rings[0] + passes * dense / (dense + experts), rel=1e-6)
    coded = StepCost(SMALL, CLUSTER, dataclasses.replace(JOB, local_codec="int8"))
    few = StepCost(SMALL, CLUSTER, dataclasses.replace(JOB, local_codec="sparseloco"))
    assert few.end.rounds(placed) < coded.end.rounds(placed) < cost.end.rounds(placed)


@pytest.mark.parametrize("codec", ["none", "int8", "sparseloco"])
def test_search_finds_the_best_of_all(codec):
    job = Job(8, 256, 16, "float32", load=0.3, local_steps=4, local_codec=codec)
    cost = StepCost(SMALL, dataclasses.replace(CLUSTER, memory=1.5e7), job)
    fixed = {"dispatcher": "alltoall", "turns": 0, "micro_batch": 1}
    found = best_of_all(cost, fixed)
    choice = found.best.choice
    assert [choice[name] for name in ("tp", "cp", "zero")] == [1, 1, 0]


def test_plan_with_local_steps(tmp_path):
    sizes = {"num_ranks": 8, "seq_len": 256, "global_batch": 16, "dtype": "float32"}
    fixed = {"zero": 0, "tp": 1, "cp": 1, "turns": 0}
    whole = plan(SMALL, CLUSTER, **sizes, fixed=fixed)
    made = plan(SMALL, CLUSTER, **sizes, local_steps=20, local_codec="int8", fixed=fixed)
    assert made.seconds < whole.seconds
    assert sum(made.time_terms().values()) == pytest.approx(made.seconds)
    assert made.time_terms()["gradient messages"] == 0 < made.time_terms()["rounds"]
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    old = json.loads((tmp_path / "plan.json").read_text())
    for name in ("local_steps", "local_codec"):
        del old["job"][name]
    (tmp_path / "plan.json").write_text(json.dumps(old))
    assert Plan.from_json(tmp_path / "plan.json").job.local_steps == 1
    # Each time a round: the more of them, the longer a step.
    slow = dataclasses.replace(made, job=dataclasses.replace(made.job, local_steps=2))
    assert slow.time_terms()["rounds"] == pytest.approx(10 * made.time_terms()["rounds"])


def test_memory_of_a_round():
    cost, placed = StepCost(SMALL, CLUSTER, JOB), columns(ep=8)
    dense, experts = (float(part) for part in cost.sizes.parameters(placed))
    assert float(cost.memory.terms(placed)["last round"]) == pytest.approx(2 * 4 * dense)
    both = float(cost.memory.terms(columns(ep=4))["last round"])
    assert both == pytest.approx(2 * 4 * (dense + 2 * experts))
    few = StepCost(SMALL, CLUSTER, dataclasses.replace(JOB, local_codec="sparseloco"))
    assert float(few.memory.terms(placed)["last round"]) == pytest.approx((4 + 8) * dense)


def test_refuses_jobs_without_rounds():
    made = plan(SMALL, CLUSTER, num_ranks=1, seq_len=16, global_batch=8, dtype="float32")
    import moe_ext.planner.apply as applied

    held = applied.Applied(torch.nn.Linear(2, 2), None, made)
    assert held.round_bytes() == 0
    inner = torch.optim.SGD(held.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="expected a plan made with local_steps above 1, got 1"):
        held.local_steps(inner, lr=1.0)
