"""Rates of this machine for plans."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from rank_checks import Checks

from moe_ext.comm.rates import CodecRate, CostTable
from moe_ext.planner import CLUSTERS, Job, ModelSpec, StepCost, measure_cluster, plan, profile
from moe_ext.planner.axes import columns_of
from moe_ext.planner.cluster import MEASURED

CHECKS = Checks()
MODEL = ModelSpec(
    *(4, 32, 4, 48, 64), num_kv_heads=2, num_experts=64, top_k=2, num_moe_layers=4, gated=True,
    gated_experts=True,
)  # fmt: skip


def test_rates_give_back_what_was_measured(monkeypatch):
    table = dataclasses.replace(CostTable.of_process(), copy_bandwidth=2.0**30)
    monkeypatch.setattr(CostTable, "measure", lambda **_: table)
    seconds = iter([1e-4, 0.5, 0.25, 0.125])

    def timed(call, *_, **__):
        call()
        return next(seconds)

    monkeypatch.setattr(profile, "_seconds", timed)
    found = measure_cluster(MODEL, CLUSTERS["h100"], dtype="float32", seq_len=128)
    assert found.memory_bandwidth == 2.0**31 and found.layer_seconds == 1e-4
    assert found.levels == CLUSTERS["h100"].levels and set(found.flops) == {"float32"}
    assert found.costs == table
    # This machine's memory, and none of the preset's host.
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.memory == min(whole, CLUSTERS["h100"].memory) and found.host is None
    small = dataclasses.replace(CLUSTERS["h100"], memory=1e9)
    seconds = iter([1e-4, 0.5, 0.25, 0.125])
    assert measure_cluster(MODEL, small, dtype="float32", seq_len=128).memory == 1e9
    with pytest.raises(ValueError, match="expected offload to be 'none' without cluster.host"):
        plan(MODEL, found, num_ranks=1, dtype="float32", fixed={"offload": "host"})
    # One layer of sixteen experts: the pass that was timed, and its scores on top.
    one = dataclasses.replace(MODEL, num_layers=1, num_moe_layers=1, num_experts=16)
    cost = StepCost(one, found, Job(1, 128, 1, "float32"))
    terms = cost.passes.terms(columns_of([{}]))
    told = float(terms["compute"] + terms["elementwise"])
    # The costs of a column are float32.
    assert told == pytest.approx(0.5 + 0.25, rel=2**-22)
    # The update that was timed, of the layer alone.
    column = columns_of([{}])
    parameters = sum(map(float, cost.sizes.parameters(column)))
    timed = profile._DecoderLayer(one, torch.device("cpu"), torch.float32)
    share = sum(p.numel() for p in timed.parameters()) / parameters
    assert float(cost.end.update(column)) * share == pytest.approx(0.125)
    assert set(found.measured) == {"update"}


def test_rates_are_those_of_the_slowest_rank(monkeypatch):
    codec = (CodecRate(4, 16, 8, 1.0, 4.0), CodecRate(8, 32, 16, 3.0, 5.0))
    table = dataclasses.replace(
        CostTable.of_process(), copy_bandwidth=2.0, product_rates={"float32": 4.0},
        codecs={"int8": codec, "bf16": codec[:1]},
    )  # fmt: skip
    given = []

    def slower(seconds, group, device):
        given.extend(seconds)
        return [each + 1 for each in seconds]

    monkeypatch.setattr(profile, "max_over_ranks", slower)
    found = profile._slowest(table, None, torch.device("cpu"))
    assert given == [0.5, 0.25, 1.0, 4.0, 3.0, 5.0, 1.0, 4.0]
    assert found.copy_bandwidth == 1 / 1.5 and found.product_rates == {"float32": 1 / 1.25}
    assert found.codecs["int8"][1] == CodecRate(8, 32, 16, 4.0, 6.0)
    assert found.codecs["bf16"] == (CodecRate(4, 16, 8, 2.0, 5.0),)


@CHECKS()
def ranks_measure_together():
    found = measure_cluster(
        MODEL, CLUSTERS["h100"], dtype="float32", seq_len=16, group=dist.group.WORLD
    )
    (level,) = found.levels
    assert level.size == dist.get_world_size() and level.bandwidth > 0
    # Both ranks share the machine's memory.
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.memory == min(whole / dist.get_world_size(), CLUSTERS["h100"].memory)
    assert found.host is None
    assert set(found.measured) == set(MEASURED) and min(found.measured.values()) >= 0
    assert set(found.costs.codecs) == set(profile.rehearsals(torch.float32))
    assert {"lossless fp32", "rows int8", "int8"} <= set(found.costs.codecs)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found.to_dict() | {"source": ""})
    assert all(other == everyone[0] for other in everyone)
    made = plan(MODEL, found, num_ranks=2, seq_len=16, global_batch=4, dtype="float32")
    assert made.seconds > 0


def test_parts_take_what_was_measured():
    """Each part by its factor, and no other one."""
    job = Job(4, 128, 8, "float32")
    placements = {
        "all_reduce": {"zero": 0},
        "broadcast": {"zero": 1},
        "fsdp": {"zero": 3},
        "exchange": {"ep": 4},
        "tensor": {"tp": 4},
        "update": {"zero": 0},
    }
    for part, choice in placements.items():
        column = columns_of([choice])

        def parts(measured, column=column):
            cluster = dataclasses.replace(CLUSTERS["h100"], flops={"float32": 1e12})
            cost = StepCost(MODEL, dataclasses.replace(cluster, measured=measured), job)
            messages, terms = cost.end.gradients(column), cost.passes.terms(column)
            exchange, tensor = (terms[name].to(messages) for name in ("experts", "tensor"))
            return torch.stack([messages, exchange, cost.end.update(column), tensor]).flatten()

        once, twice, thrice = (parts({part: factor}) for factor in (1.0, 2.0, 3.0))
        place = {"exchange": 1, "update": 2, "tensor": 3}.get(part, 0)
        assert [i for i in range(4) if once[i] != twice[i]] == [place]
        torch.testing.assert_close(thrice - twice, twice - once)
        none = parts({})
        assert torch.equal(none, once) != (part == "broadcast")


def test_a_busy_rank_is_quicker_where_ranks_share_cores():
    loads = (8,) * 8 + (0,) * 56  # one rank of eight has all tokens
    placed = columns_of([{"ep": 8}])

    def compute(sharing, load=loads):
        cluster = dataclasses.replace(CLUSTERS["h100"], measured={"sharing": sharing})
        return float(StepCost(MODEL, cluster, Job(8, 128, 8, load=load)).compute.products(placed))

    even = compute(1.0, load=0.0)
    beyond = [compute(sharing) - even for sharing in (1.0, 4.0, 8.0, 9.0)]
    assert beyond[1] == pytest.approx(beyond[0] / 7, rel=1e-5) and beyond[2:] == [0.0, 0.0]


def test_factors_of_unknown_parts_are_refused():
    for measured in ({"sends": 1.0}, {"update": -1.0}, {"update": float("nan")}):
        with pytest.raises(ValueError, match="^ClusterSpec: expected measured"):
            dataclasses.replace(CLUSTERS["h100"], measured=measured)


test_over_two_ranks = CHECKS.test(2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("mixtral-8x7b", CLUSTERS["h100"]), "expected model to be of type ModelSpec"),
        ((MODEL, "h100"), "expected cluster to be of type ClusterSpec"),
    ],
)
def test_names_are_told_from_specs(arguments, message):
    with pytest.raises(TypeError, match=f"measure_cluster: {message}"):
        measure_cluster(*arguments)
