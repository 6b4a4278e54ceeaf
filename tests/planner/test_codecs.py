"""Codecs of plans: taken where they pay by their rates, and not foretold where they cannot be."""

import dataclasses

import pytest
import torch
from planner_models import SMALL, STEP, best_of_all

from moe_ext.planner import (
    ClusterSpec,
    CodecRate,
    CostTable,
    Job,
    Level,
    StepCost,
    plan,
)
from moe_ext.planner.axes import DEFAULTS, GRADIENTS, KV_WIRES, choice_of, columns_of
from moe_ext.planner.stage_layers import divide, simulated

# A few meshes, so that a search takes little.
ALONE = {"tp": 1, "cp": 1, "turns": 0}
# Seconds a number, to encode as to decode.
QUICK, SLOW = 1e-12, 1e-6


def cluster_of(bandwidth, *, memory=4e8, latency=0.0, **codecs):
    """One level of links; codecs by their seconds a number and share of the bytes of float32."""
    rates = {
        name.replace("_", " "): tuple(
            CodecRate(n, 4 * n, round(4 * n * share), n * seconds, n * seconds)
            for n in (2**4, 2**24)
        )
        for name, (seconds, share) in codecs.items()
    }
    costs = dataclasses.replace(CostTable.of_process(), codecs=rates) if rates else None
    level = Level("node", 1024, latency, bandwidth)
    return ClusterSpec((level,), {"float32": 1e11}, memory, 1e10, costs=costs)


def choice_on(cluster, **fixed):
    few = {"pp": 1, "tp": 1, "cp": 1, "etp": 1, "micro_batch": 1, "recompute": 0}
    return plan(SMALL, cluster, **STEP, fixed={**few, **fixed}).choice


def test_rows_lose_no_bit_where_that_is_quicker():
    for seconds, bandwidth, taken in (
        (QUICK, 1e8, "lossless"),
        (QUICK, 1e13, None),
        (SLOW, 1e8, None),
        # Half of 4 bytes is saved: 1 and 3 ns there and back pay at 2 / 2e-9 bytes a second.
        (1e-9, 0.99e9, "lossless"),
        (1e-9, 1.01e9, None),
    ):
        cluster = cluster_of(bandwidth, lossless_fp32=(seconds, 0.5))
        assert choice_on(cluster, ep=4)["wire"] == taken, (seconds, bandwidth)
        # A gather of tokens has rows of one length.
        assert choice_on(cluster, ep=4, dispatcher="allgather")["wire"] is None
    # Not weighed without its rate, and taken where it is asked for.
    for cluster in (cluster_of(1e8), cluster_of(1e8, lossless_bf16=(QUICK, 0.5))):
        assert choice_on(cluster, ep=4)["wire"] is None
        assert choice_on(cluster, wire="lossless")["wire"] == "lossless"


@pytest.mark.parametrize("dispatcher", ["alltoall", "dedup"])
@pytest.mark.parametrize("share", [0.25, None])
def test_bytes_of_rows_that_lose_no_bit(dispatcher, share):
    """The measured share of the bytes of rows, or that of normally distributed numbers."""
    codecs = {} if share is None else {"lossless_fp32": (1e-9, share)}
    cost = StepCost(SMALL, cluster_of(1e9, **codecs), Job(4, 256, 16, "float32"))
    whole, coded = (
        sum(cost.exchange.sent(4, 1, dispatcher, wire, "exact")) for wire in (None, "lossless")
    )
    # Of two experts of eight: those of other ranks, and their number where a token goes once.
    sent = 2 * 3 / 4 if dispatcher == "alltoall" else 3 * (1 - 6 * 5 / (8 * 7))
    rows = (sent + 2 * 3 / 4) * 64 * 4
    if share is None:
        share = -(-64 * 4 * 26.8 // 32) / (64 * 4)
    assert whole - coded == pytest.approx((1 - share) * rows)
    # In six messages there and back, with a message of lengths each way.
    columns = [{"ep": 4, "dispatcher": dispatcher, "wire": wire} for wire in (None, "lossless")]
    plain, found = (float(cost.passes.terms(columns_of([each]))["experts"]) for each in columns)
    each = 2e-9 if codecs else 2 * (4 + share * 4) / 1e10
    coding = 256 * rows / 4 * each
    # Forward and backward, in four layers; of whole numbers in each message.
    assert found - plain == pytest.approx(8 * (coding - 256 * (1 - share) * rows / 1e9), rel=1e-3)


def test_messages_that_lose_no_bit_are_coded_one_by_one():
    rates = (CodecRate(2**14, 2**16, 2**15, 1e-3, 2e-3), CodecRate(2**24, 2**26, 2**25, 1.0, 2.0))
    costs = dataclasses.replace(CostTable.of_process(), codecs={"lossless fp32": rates})
    cluster = dataclasses.replace(cluster_of(1e30, latency=1e-5), costs=costs)
    cost = StepCost(SMALL, cluster, Job(4, 256, 16, "float32"))
    plain, found = (
        float(cost.passes.terms(columns_of([{"ep": 4, "wire": wire}]))["experts"])
        for wire in (None, "lossless")
    )
    # Six messages there and back, each smaller than the least that was measured; the lengths of the
    # messages take a message more each way.
    assert found - plain == pytest.approx(8 * (6 * 3e-3 + 2e-5))
    assert plain == pytest.approx(8 * 2e-5)


def test_gradients_lose_no_bit_where_that_is_quicker():
    one = {"ep": 1, "zero": 0}
    for seconds, bandwidth, taken in (
        (QUICK, 1e8, "lossless"),
        (QUICK, 1e13, "none"),
        (SLOW, 1e8, "none"),
        # All are encoded once and decoded 3 / 2 times, and 3 / 2 times half of 4 bytes is saved.
        (1e-9, 1.19e9, "lossless"),
        (1e-9, 1.21e9, "none"),
    ):
        cluster = cluster_of(bandwidth, lossless_fp32=(seconds, 0.5))
        assert choice_on(cluster, **one)["gradients"] == taken, (seconds, bandwidth)
        # FSDP2 and tensor parallelism average by themselves, and one rank has none to send to.
        for alone in ({"zero": 3}, {"zero": 0, "tp": 4}, {"zero": 0, "pp": 4}):
            assert choice_on(cluster, **alone)["gradients"] == "none"
    for cluster in (cluster_of(1e8), cluster_of(1e8, lossless_bf16=(QUICK, 0.5))):
        assert choice_on(cluster)["gradients"] == "none"
        assert choice_on(cluster, gradients="lossless")["gradients"] == "lossless"


def test_messages_of_coded_gradients():
    rates = {"int8": (3e-9, 0.3), "bf16": (2e-9, 0.5)}
    cost = StepCost(SMALL, cluster_of(1e9, latency=1e-6, **rates), Job(4, 256, 16, "float32"))
    unknown = StepCost(SMALL, cluster_of(1e9, latency=1e-6), cost.job)
    for ep, ranks in ((1, (4, 4)), (2, (4, 2))):
        numels = list(map(float, cost.sizes.parameters(columns_of([{"ep": ep}]))))

        def told(codec, cost=cost, ep=ep):
            return float(cost.end.gradients(columns_of([{"ep": ep, "gradients": codec}])))

        def wanted(num_bytes, encode, decode, passes, rounds=2, ranks=ranks, numels=numels):
            total = 0.0
            for numel, size in zip(numels, ranks, strict=True):
                total += rounds * (size - 1) * 1e-6
                total += 2 * (size - 1) / size * numel * num_bytes / 1e9
                encodes, decodes = passes(size)
                total += numel * (encodes * encode + decodes * decode)
            return total

        assert told("none") == pytest.approx(wanted(4, 0, 0, lambda _: (0, 0)), rel=1e-5)
        # A scale for 256 codes. What comes in as shards goes out as sums.
        coded = wanted(1 + 4 / 256, 3e-9, 3e-9, lambda size: (1 + 1 / size, 2))
        assert told("int8") == pytest.approx(coded, rel=1e-4)
        coded = wanted(2, 2e-9, 2e-9, lambda _: (1, 1))
        assert told("bf16") == pytest.approx(coded, rel=1e-4)
        # Not measured: through the memory, and with lengths before the two messages.
        share = 4 * 26.8 / 32

        def passes(size):
            return 1, 2 * (size - 1) / size

        each = (4 + share) / 1e10
        coded = wanted(share, each, each, passes, rounds=4)
        assert told("lossless", unknown) == pytest.approx(coded, rel=1e-4)


def test_memory_of_coded_gradients():
    cost = StepCost(SMALL, cluster_of(1e9), Job(4, 256, 16, "float32"))
    placed = [{"ep": 2, "gradients": codec} for codec in ("none", "lossless", "int8")]
    dense, experts = (float(part[0]) for part in cost.sizes.parameters(columns_of(placed)))
    terms = cost.memory.terms(columns_of(placed))
    # Two float32 numbers of each, and of the shard of the sum over four and over two ranks.
    owed = 8 * (dense * 5 / 4 + experts * 3 / 2)
    assert terms["feedback"].tolist() == pytest.approx([0, 0, owed])
    assert "feedback" not in cost.memory.terms(columns_of(placed[:2]))
    with_few = StepCost(SMALL, cost.cluster, Job(4, 1, 16, "float32"))
    temporary = with_few.memory.terms(columns_of(placed))["temporary"].tolist()
    assert temporary[1:] == pytest.approx([8.5 * (dense + experts), 8 * (dense + experts)])


def test_keys_of_a_ring_are_rounded_where_it_is_asked_for():
    assert choice_on(cluster_of(1e6, rows_int8=(QUICK, 0.3)), cp=4)["kv_wire"] is None
    few = {"turns": 0, "micro_batch": 1, "kv_wire": "int8"}
    made = plan(SMALL, cluster_of(1e6), **STEP, fixed=few)
    assert made.choice["cp"] > 1 and made.choice["kv_wire"] == "int8"
    plain = plan(SMALL, cluster_of(1e9), **STEP, fixed={"ep": 4, **ALONE})
    assert "kv_wire=int8: " in plain.why_not(**few)
    # Rings so slow that blocks hide little of them: four heads of 16 numbers in 20 bytes each.
    for rates, encode, decode in (({"rows_int8": (3e-9, 0.3)}, 3e-9, 3e-9), ({}, 36, 36)):
        cost = StepCost(SMALL, cluster_of(1e5, **rates), Job(4, 256, 16, "float32"))
        if not rates:
            # Read and written: 4 bytes and 20 of 16 numbers.
            encode = decode = (4 + 20 / 16) / 1e10
        for again in (0, 1):
            placed = [{"cp": 4, "kv_wire": wire, "recompute": again} for wire in (None, "int8")]
            plain, coded = cost.passes.terms(columns_of(placed))["context"].tolist()
            # Keys and values of 64 tokens, in four layers forward, backward and once more.
            numel, passes = 2 * 64 * 64, 4 * (2 + again)
            saved = 3 * numel * (4 - 20 / 16) / 1e5 - numel * (encode + 4 * decode)
            assert plain - coded == pytest.approx(passes * saved, rel=1e-5)


CODED = {"lossless_fp32": (QUICK, 0.6)}
FEW = {"micro_batch": 1, "turns": 0, "dispatcher": "alltoall"}


@pytest.mark.parametrize(
    ("ranks", "memory", "axes"),
    [
        (4, 1.4e7, {"micro_batch": 1, "zero": 0, "ep": 4}),
        (8, 1e7, {**FEW, "zero": 1, "tp": 1, "ep": 4}),
        (8, 1e7, {**FEW, **ALONE, "wire": "int8", "gradients": "lossless"}),
        (4, 2e7, {**FEW, "gradients": "int8", "etp": 1, "balance": "none", "scheme": "ring"}),
        (4, 2e7, {**FEW, "kv_wire": "fp8", "zero": 0}),
    ],
)
def test_search_finds_the_best_of_all(ranks, memory, axes):
    cluster = cluster_of(2e8, memory=memory, **CODED)
    cost = StepCost(SMALL, cluster, Job(ranks, 256, 16, "float32", load=0.3))
    fixed = {"combine": "exact", **axes}
    found = best_of_all(cost, fixed)
    for axis in ("wire", "gradients"):
        assert found.best.choice[axis] == axes.get(axis, "lossless") or axes.get("ep") is None


def columns_with(options, num=60, ranks=8):
    """Random placements of which each axis of `options` has one of its values."""
    generator = torch.Generator().manual_seed(0)

    def one(values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    rows = []
    while len(rows) < num:
        pp, tp, cp = one((1, 2, 4)), one((1, 2)), one((1, 2))
        row = {"pp": pp, "tp": tp, "cp": cp, "schedule": one(("1f1b", "gpipe", "zb-h1"))}
        row |= {"zero": one((0, 1)), "recompute": one((0, 1)), "dispatcher": "alltoall"}
        row["ep"] = one([ep for ep in (1, 2, 4, 8) if ranks // pp % ep == 0])
        if ranks % (pp * tp * cp) == 0:
            rows.append(row | {name: one(values) for name, values in options.items()})
    return columns_of(rows)


def test_bounds_are_below_what_steps_take():
    costs = StepCost(SMALL, cluster_of(2e8, **CODED), Job(8, 256, 16, "float32", load=0.3))
    options = {"wire": (None, "lossless", "int8"), "gradients": GRADIENTS, "kv_wire": KV_WIRES}
    columns = columns_with(options)
    for bounds in (costs.bound(columns), costs.least(columns)):
        for i, bound in enumerate(bounds.tolist()):
            one = {name: column[i : i + 1] for name, column in columns.items()}
            seconds = simulated(costs, one, divide(costs, one, all_again=True))
            # Columns are float32.
            assert bound <= seconds * (1 + 1e-6), choice_of(columns, i)


def test_a_plan_says_why_it_has_no_other_codec():
    made = plan(SMALL, cluster_of(1e13), **STEP, fixed={"ep": 4})
    for codec in ("int8", "lossless"):
        told = made.why_not(pp=1, **ALONE, wire=codec)
        assert f"wire={codec}: " in told and "binding is experts" in told
        assert f"gradients={codec}: " in made.why_not(pp=1, **ALONE, gradients=codec)


def test_every_axis_has_a_default():
    assert choice_of(columns_of([{}]), 0) == DEFAULTS
