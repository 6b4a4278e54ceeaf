"""Rates of this machine for plans."""

import dataclasses

import pytest
import torch.distributed as dist
from rank_checks import Checks

from moe_ext.distributed.cost_table import CostTable
from moe_ext.planner import CLUSTERS, CostModel, Job, ModelSpec, measure_cluster, plan, profile
from moe_ext.planner.search import columns_of

CHECKS = Checks()
MODEL = ModelSpec(
    *(4, 32, 4, 48, 64), num_kv_heads=2, num_experts=64, top_k=2, num_moe_layers=4, gated=True,
    gated_experts=True,
)  # fmt: skip


def test_rates_give_back_what_was_measured(monkeypatch):
    table = dataclasses.replace(CostTable.of_process(), copy_bandwidth=2.0**30)
    monkeypatch.setattr(CostTable, "measure", lambda **_: table)
    seconds = iter([1e-4, 0.5, 0.25])

    def timed(call, *_, **__):
        call()
        return next(seconds)

    monkeypatch.setattr(profile, "least_seconds", timed)
    found = measure_cluster(MODEL, CLUSTERS["h100"], dtype="float32", seq_len=128)
    assert found.memory_bandwidth == 2.0**31 and found.layer_seconds == 1e-4
    assert found.levels == CLUSTERS["h100"].levels and set(found.flops) == {"float32"}
    # One layer of sixteen experts: the pass that was timed, and its scores on top.
    one = dataclasses.replace(MODEL, num_layers=1, num_moe_layers=1, num_experts=16)
    cost = CostModel(one, found, Job(1, 128, 1, "float32"))
    terms = cost.terms(columns_of([profile.ALONE]))
    told = float(terms["compute"] + terms["elementwise"])
    # The costs of a column are float32.
    assert told == pytest.approx(0.5 + 0.25, rel=2**-22)


@CHECKS()
def ranks_measure_together():
    found = measure_cluster(
        MODEL, CLUSTERS["h100"], dtype="float32", seq_len=16, group=dist.group.WORLD
    )
    (level,) = found.levels
    assert level.size == dist.get_world_size() and level.bandwidth > 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found.to_dict() | {"source": ""})
    assert all(other == everyone[0] for other in everyone)
    made = plan(MODEL, found, num_ranks=2, seq_len=16, global_batch=4, dtype="float32")
    assert made.seconds > 0


@pytest.mark.parametrize("name", CHECKS)
def test_over_two_ranks(name):
    CHECKS.assert_passed(2, name)
