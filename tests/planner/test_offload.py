"""Plans with the optimizer on the host: when they pay, what they take, and trained."""

import dataclasses
import itertools
import json

import pytest
import torch
from planner_models import SMALL, STEP, best_of_all, small_mixtral
from rank_checks import Checks

from moe_ext.distributed.dtensor import local_part
from moe_ext.planner import (
    CLUSTERS,
    ClusterSpec,
    Host,
    Job,
    Level,
    Plan,
    StepCost,
    plan,
)
from moe_ext.planner.axes import columns_of

CHECKS = Checks()
HOST = Host(4e8, 1e10, 1e10)
CLUSTER = ClusterSpec(
    *((Level("node", 4, 1e-6, 1e10),), {"float32": 1e11, "bfloat16": 1e11}, 4e8, 1e10), host=HOST
)
PLAIN = {"pp": 1, "tp": 1, "cp": 1, "micro_batch": 1, "dispatcher": "alltoall"}


def with_memory(processor, host=4e8):
    held = dataclasses.replace(HOST, memory=host)
    return dataclasses.replace(CLUSTER, memory=processor, host=held)


def test_pays_where_memory_binds():
    """Less memory: nothing, a recompute, the host beside it, and none at all."""
    fixed = {**PLAIN, "ep": 1, "zero": 0}
    chosen = []
    for memory in (4e8, 1.35e7, 1.2e7):
        found = plan(SMALL, with_memory(memory), **STEP, fixed=fixed)
        chosen.append(found.choice["offload"])
        assert found.memory <= memory
        # Without a host it takes longer, or does not fit.
        alone = dataclasses.replace(found.cluster, host=None)
        try:
            seconds = plan(SMALL, alone, **STEP, fixed=fixed).seconds
        except ValueError as error:
            assert "binding is" in str(error)
            seconds = float("inf")
        assert (seconds == found.seconds) == (chosen[-1] == "none") and seconds >= found.seconds
        if chosen[-1] == "host":
            assert found.memory_terms()["optimizer"] == found.time_terms()["update"] == 0
            assert found.time_terms()["offload"] > 0 and found.host_memory > 0
            assert "on its host" in str(found)
            assert sum(found.time_terms().values()) == pytest.approx(found.seconds)
            assert "binding is" in found.why_not(offload="none", ep=1, zero=0, pp=1, tp=1, cp=1)
    assert chosen[0] == "none" and chosen[-1] == "host"
    # More than any placement of one rank has without it.
    assert seconds == float("inf")


def test_tells_what_binds():
    fixed = {**PLAIN, "ep": 1, "zero": 0}
    made = plan(SMALL, CLUSTER, **STEP, fixed=fixed)
    told = made.why_not(**fixed, offload="host")
    assert "binding is offload" in told and "a quicker link to the host" in told
    with pytest.raises(ValueError, match=r"GB of 0.0 on the host: more pp or ep, ZeRO 1"):
        plan(SMALL, with_memory(4e8, 1e5), **STEP, fixed={**fixed, "offload": "host"})
    with pytest.raises(
        ValueError, match="into memory, got none: the smallest takes .* binding is .*: "
    ):
        plan(SMALL, with_memory(1.2e7, 1e5), **STEP, fixed=fixed)


def test_costs_its_bytes():
    cost, placed = StepCost(SMALL, CLUSTER, Job(4, 256, 16)), {"ep": 2, "zero": 1}
    dense, experts = (float(part) for part in cost.sizes.parameters(columns_of([placed])))
    stepped = dense / 4 + experts
    c = columns_of([{**placed, "offload": "host"}])
    # Two bytes down and up; moments and weights in float32, a gradient and a weight.
    assert float(cost.end.offload(c)) == pytest.approx(stepped * (4 + 24 + 4) / 1e10)
    assert float(cost.end.update(c)) == 0 == float(cost.end.offload(columns_of([placed])))
    assert float(cost.memory.host(c)) == pytest.approx(1.1 * 12 * stepped)


@pytest.mark.parametrize(("memory", "host"), [(4e8, 4e8), (4e6, 4e8), (4e6, 3e6)])
def test_search_finds_the_best_of_all(memory, host):
    cost = StepCost(SMALL, with_memory(memory, host), Job(4, 256, 16, "float32", load=0.3))
    fixed = {"dispatcher": "alltoall", "micro_batch": 1, "cp": 1, "turns": 0}
    fixed |= {"etp": 1, "balance": "none"}
    found = best_of_all(cost, fixed)
    c = columns_of([found.best.choice])
    assert float(cost.memory.host(c)) <= host


def test_file_of_a_host(tmp_path):
    path = tmp_path / "cluster.json"
    for cluster in (CLUSTER, *CLUSTERS.values()):
        path.write_text(json.dumps(cluster.to_dict()))
        assert ClusterSpec.of(path) == cluster
    made = plan(SMALL, CLUSTER, **STEP, fixed={**PLAIN, "offload": "host"})
    made.to_json(path)
    assert Plan.from_json(path) == made


@CHECKS((0,), (1,))
def trains_as_adamw_here(zero):
    fixed = {**PLAIN, "ep": 2, "zero": zero, "recompute": 0}
    weights = []
    for offload in ("none", "host"):
        model = small_mixtral()
        made = plan(
            *(model, CLUSTER), num_ranks=4, seq_len=16, global_batch=8, dtype="float32",
            fixed={**fixed, "offload": offload},
        )  # fmt: skip
        applied = made.apply(model)
        if offload == "host":
            with pytest.raises(ValueError, match="to be torch.optim.AdamW for offload='host', got"):
                applied.optimizers(torch.optim.SGD, lr=0.1)
        optimizers = applied.optimizers(torch.optim.AdamW, lr=1e-3, eps=1e-4, foreach=True)
        for i in range(2):
            draw = torch.Generator().manual_seed(4 * i + applied.mesh.data_rank)
            ids = torch.randint(64, (2, 16), generator=draw)
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            applied.sync_gradients()
            for optimizer in optimizers:
                optimizer.step()
        weights.append(torch.cat([local_part(p.detach()).flatten() for p in model.parameters()]))
    # AdamW's moments take the last bits of sums in another order.
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    names = {type(getattr(each, "optim", each)).__name__ for each in optimizers}
    assert names == {"CPUAdamW"}


@CHECKS((0,))
def keeps_the_bytes_of_the_plan(zero):
    model = small_mixtral().bfloat16()
    made = plan(
        *(model, CLUSTER), num_ranks=4, seq_len=16, global_batch=8, dtype="bfloat16",
        fixed={**PLAIN, "ep": 2, "zero": zero, "recompute": 0, "offload": "host"},
    )  # fmt: skip
    applied = made.apply(model)
    (inner,) = applied.optimizers(torch.optim.AdamW, lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    inner.step()
    state = itertools.chain.from_iterable(each.values() for each in inner.state.values())
    held = sum(local_part(x).nbytes for x in state if x.dim())
    # The routers' and norms' numbers are few.
    assert 1.1 * held == pytest.approx(made.host_memory, rel=0.01)


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name):
    pytest.importorskip("transformers")
    CHECKS.assert_passed(4, name)
