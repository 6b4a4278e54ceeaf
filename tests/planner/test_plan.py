"""Plans against brute force, against what ranks send, and trained."""

import argparse
import dataclasses
import html
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from forked import Script
from planner_models import SIZES, SMALL, STEP, best_of_all, columns

from moe_ext import __main__
from moe_ext.attention import choose_scheme
from moe_ext.pipeline import make_table, simulate
from moe_ext.planner import (
    CLUSTERS,
    ClusterSpec,
    CodecRate,
    CostTable,
    Job,
    Level,
    Plan,
    StepCost,
    cli,
    exchange_bytes,
    html_report,
    plan,
    preset,
    search,
)
from moe_ext.planner.axes import columns_of
from moe_ext.planner.expert_load import LOADS, load_of
from moe_ext.planner.stage_layers import (
    divide,
    even_stages,
    rank_columns,
    simulated,
    turn_costs,
    turn_plan,
)

MIXED = dataclasses.replace(SMALL, num_layers=6, dense_ffn_dim=256)
CLUSTER = ClusterSpec(
    (Level("node", 4, 1e-6, 1e10), Level("network", 1024, 1e-5, 1e9)), {"float32": 1e11}, 4e8, 1e10
)
CONFIG = {**SIZES, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("ranks", "memory", "axes"),
    [
        (4, 1.4e7, {"micro_batch": 1, "scheme": "ring"}),
        (4, 5.5e6, {"zero": 0}),
        (8, 1e7, {"zero": 1, "micro_batch": 1, "tp": 1, "cp": 2}),
        (16, 8e6, {"tp": 1, "cp": 1, "zero": 1}),
    ],
)
def test_search_finds_the_best_of_all(ranks, memory, axes):
    model = SMALL if "zero" not in axes else MIXED
    cluster = ClusterSpec(CLUSTER.levels, CLUSTER.flops, memory, 1e10)
    cost = StepCost(model, cluster, Job(ranks, 256, 16, "float32", load=0.3))
    # See `test_search_in_turn_finds_the_best_of_all`.
    fixed = {"dispatcher": "alltoall", "etp": 1, "balance": "none", "turns": 0, **axes}
    found = best_of_all(cost, fixed)
    assert found.best.memory <= memory
    assert [each.seconds for each in found.pareto] == sorted(each.seconds for each in found.pareto)
    assert ranks > 4 or found == search(cost, fixed=fixed)


@pytest.mark.parametrize(
    ("experts", "load", "link", "memory"),
    [(8, 1.5, 1e10, 2e7), (8, 1.5, 1e8, 2e7), (2, 0.0, 1e10, 1.6e7), (2, 2.0, 1e9, 1.6e7)],
)
def test_search_finds_the_best_of_all_ways_to_spread_experts(experts, load, link, memory):
    sizes = {"num_experts": experts, "top_k": experts // 4 or 1, "ffn_dim": 768 // experts}
    model = dataclasses.replace(SMALL, **sizes)
    cluster = ClusterSpec((Level("node", 4, 1e-6, link),), CLUSTER.flops, memory, 1e10)
    cost = StepCost(model, cluster, Job(4, 256, 16, "float32", load=load))
    fixed = {"zero": 0, "recompute": 0, "pp": 1, "tp": 1, "cp": 1}
    found = best_of_all(cost, fixed)
    # With few experts they are cut; uneven ones move where the link is quick.
    assert (found.best.choice["etp"] > 1) == (experts == 2)
    if experts == 8:
        assert (found.best.choice["balance"] == "exact") == (link == 1e10)


def test_sequences_by_rings_or_by_heads():
    for kv_heads in (4, 2, 1):
        model = dataclasses.replace(SMALL, num_kv_heads=kv_heads)
        cost = StepCost(model, CLUSTER, Job(4, 256, 16, "float32"))
        sizes = {"batch": 1, "heads": 4, "kv_heads": kv_heads, "dim": 16, "seq_len": 256}
        found = choose_scheme(**sizes, num_ranks=4, dtype=torch.float32, is_causal=True)
        heads = next(each for each in found.candidates if each.scheme == "ulysses")
        seconds = float(cost.passes.terms(columns(cp=4, scheme="ulysses"))["context"])
        sent = seconds / SMALL.num_layers - 6e-6
        if kv_heads == 4:
            both = heads.forward_bytes + heads.backward_bytes
            assert sent * 1e10 == pytest.approx(both)
        fixed = {"cp": 4, "pp": 1, "tp": 1}
        schemes = {each.choice["scheme"] for each in search(cost, fixed=fixed).pareto}
        assert "ring" in schemes or kv_heads == 4
    # A hop that hides behind its block costs nothing, and an exchange of heads does.
    quick = dataclasses.replace(CLUSTER, levels=(Level("node", 4, 0.0, 1e12),))
    slow = dataclasses.replace(CLUSTER, levels=(Level("node", 4, 1e-6, 1e8),))
    for cluster, scheme in ((quick, "ring"), (slow, "ulysses")):
        made = StepCost(dataclasses.replace(SMALL, num_kv_heads=4), cluster, cost.job)
        assert search(made, fixed=fixed).best.choice["scheme"] == scheme


def test_shards_of_experts():
    spread = {"ep": 2, "etp": 2}
    cost = StepCost(SMALL, CLUSTER, Job(4, 256, 16, "float32"))
    whole, shards = columns(ep=4), columns(**spread)
    assert torch.equal(cost.sizes.parameters(whole)[1], cost.sizes.parameters(shards)[1])
    assert torch.equal(cost.compute.products(whole), cost.compute.products(shards))
    # Each row is there twice, and has half of the hidden numbers.
    more = cost.compute.elementwise(shards) - cost.compute.elementwise(whole)
    rows = 256 * SMALL.top_k * SMALL.num_layers
    assert float(more) == pytest.approx(rows * 2 * 2 * 64 * 4 / CLUSTER.memory_bandwidth)
    # Loads are those of the places, not of the shards.
    uneven = StepCost(SMALL, CLUSTER, Job(4, 256, 16, "float32", load=1.0))
    assert uneven.compute.products(shards) < uneven.compute.products(whole)
    assert uneven.job.imbalance(8, 2) == pytest.approx(
        2 * sum(1 / i for i in (1, 2, 3, 4)) / sum(1 / i for i in range(1, 9))
    )
    torch.manual_seed(0)
    idx = [torch.rand(4096, 8).argsort(1)[:, :2] for _ in range(4)]
    # Shards of an expert are side by side: expert e is on ranks 2 (e // 4) and the next one.
    slots = [
        torch.stack([x // 4 * 8 + s * 4 + x % 4 for s in range(2)], -1).flatten(1) for x in idx
    ]
    for dispatcher, combine in (("alltoall", "exact"), ("dedup", "reduced"), ("dedup", "exact")):
        sent = exchange_bytes(
            slots, 1, num_experts=16, model_dim=64, dispatcher=dispatcher, combine=combine,
            weighed=combine == "reduced",
        )  # fmt: skip
        told = 4096 * sum(cost.exchange.sent(2, 2, dispatcher, None, combine))
        # Of 4096 random tokens a share is off by a hundredth.
        assert sent == pytest.approx(told, rel=0.03), (dispatcher, combine)


def test_balance_by_its_break_even():
    # Half of all rows are those of the first expert.
    load = (7.0, 1, 1, 1, 1, 1, 1, 1)
    job = Job(4, 256, 16, "float32", load=load)
    plain, even = columns(ep=4), columns(ep=4, balance="exact")
    quick = dataclasses.replace(CLUSTER, levels=(Level("node", 4, 0.0, 1e12),))
    cost = StepCost(SMALL, quick, job)
    # The first rank has 8 of 14 rows: three others come to take a part.
    over = 4 * 8 / 14
    flops = 4 * 256 * SMALL.top_k * 2 * SMALL.expert_parameters / (1e11 * CLUSTER.efficiency)
    assert float(cost.compute.products(plain) - cost.compute.products(even)) == pytest.approx(
        flops * (over - 1)
    )
    sent = 4 * 3 * SMALL.expert_parameters * 4 / 1e12
    found = cost.passes.terms(even)
    assert float(found["moved experts"]) == pytest.approx(2 * sent)
    assert float(cost.passes.terms(plain)["moved experts"]) == 0
    # Rows of all ranks are alike, and one layer's weights of two experts and one that came more.
    held = [float(cost.memory._layer_numbers(each)[0][-1]) for each in (plain, even)]
    rows = 256 * SMALL.top_k * (over - 1) * (4 * (64 + 3 * 96) + 28)
    copies = 3 * SMALL.expert_parameters * 4
    assert held[0] - held[1] == pytest.approx(rows - copies)
    # Saved 3 (over - 1) of the products, taken twice what travels: beyond that nothing moves.
    limit = 2 * 3 * SMALL.expert_parameters * 4 / (3 * (over - 1) * flops / 4)
    for factor in (0.99, 1.01):
        levels = (Level("node", 4, 0.0, limit * factor),)
        at = StepCost(SMALL, dataclasses.replace(CLUSTER, levels=levels), job)
        assert (float(at.passes.terms(even)["moved experts"]) > 0) == (factor > 1)
        assert (float(at.compute.products(even)) < float(at.compute.products(plain))) == (
            factor > 1
        )
    # A burst moves experts in its own step alone.
    burst = StepCost(SMALL, quick, dataclasses.replace(job, load=((1.0,) * 8, load)))
    assert float(burst.passes.terms(even)["moved experts"]) == pytest.approx(sent)


def test_capacity():
    job = Job(4, 256, 16, "float32", load=(7.0, 1, 1, 1, 1, 1, 1, 1), capacity_factor=2.0)
    # Of 14 rows the first expert takes 3.5; its rank has 4.5, and 3.5 go nowhere.
    assert job.imbalance(8, 4) == pytest.approx(4 * 4.5 / 14)
    assert job.dropped_share(8) == pytest.approx(3.5 / 14)
    made = plan(SMALL, CLUSTER, **STEP, load=job.load, capacity_factor=2.0, fixed={"ep": 4})
    assert made.dropped_share == pytest.approx(0.25) and made.choice["balance"] == "none"
    assert "25 % of the choices go to no expert" in str(made)
    free = dataclasses.replace(job, capacity_factor=None)
    limited, whole = (StepCost(SMALL, CLUSTER, each) for each in (job, free))
    one = columns(ep=4)
    assert limited.compute.products(one) < whole.compute.products(one)
    assert limited.memory.fullest(one) < whole.memory.fullest(one)


@pytest.mark.parametrize(
    ("ranks", "memory", "rate", "axes"),
    [
        (4, 1.4e7, 1e9, {"tp": 1, "cp": 1, "micro_batch": 1}),
        (8, 1e7, 1e8, {"pp": 2, "tp": 1, "cp": 1, "micro_batch": 1, "zero": 0}),
        (8, 1e8, 1e9, {"pp": 4, "schedule": "zb-h1", "micro_batch": 1}),
        (16, 1e7, 1e9, {"pp": 4, "cp": 1, "zero": 1, "micro_batch": 1}),
    ],
)
def test_search_in_turn_finds_the_best_of_all(ranks, memory, rate, axes):
    levels = (Level("node", 4, 1e-6, rate), Level("network", 1024, 1e-5, rate / 10))
    cluster = ClusterSpec(levels, CLUSTER.flops, memory, 1e10)
    cost = StepCost(MIXED, cluster, Job(ranks, 256, 16, "float32", load=0.3))
    fixed = {"dispatcher": "alltoall", "balance": "none", "etp": 1, **axes}
    found = search(cost, fixed=fixed)
    in_turn = search(cost, fixed={**fixed, "turns": 1}, exhaustive=True).best
    assert in_turn.choice["pp"] > 1 and in_turn.choice["ep"] > 1
    # All placements are those of the two.
    one_by_one = search(cost, fixed={**fixed, "turns": 0}, exhaustive=True).best
    assert found.best == min(one_by_one, in_turn, key=lambda each: each.seconds) and found.proven
    for each in (in_turn, one_by_one):
        assert float(cost.least(columns_of([each.choice]))) <= each.seconds * (1 + 1e-6)


def ends_of(cost, own):
    """Seconds of gradient messages and the optimizer on the slowest rank."""
    return float((cost.end.gradients(own) + cost.end.update(own)).max())


def test_slow_links_have_exchanges_in_turn(tmp_path):
    options = {**STEP, "global_batch": 32}
    fixed = {"pp": 2, "ep": 2, "tp": 1, "cp": 1, "etp": 1, "micro_batch": 1, "zero": 0}
    made = []
    for rate in (5e8, 1e13):
        cluster = ClusterSpec((Level("node", 4, 0.0, rate),), CLUSTER.flops, 4e8, 1e10)
        made.append(plan(SMALL, cluster, **options, fixed=fixed))
    slow, quick = made
    assert slow.choice["turns"] == 1 and quick.choice["turns"] == 0
    assert "s a step instead of" in slow.why_not(turns=0, **fixed)
    assert "s a step instead of" in quick.why_not(turns=1, **fixed)
    slow.to_json(tmp_path / "plan.json")
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == slow
    # What runs is what was simulated.
    cost, c = StepCost(again.model, again.cluster, again.job), columns_of([again.choice])
    found = turn_plan(cost, c, again.stages)
    own = rank_columns(cost, c, again.stages)
    assert found.makespan + ends_of(cost, own) == slow.seconds
    # No order is quicker than what a rank computes, and none is needed where it all hides.
    work, exchanges = cost.passes.apart(own)
    assert found.makespan >= 16 * float(work.maximum(exchanges).max())
    with pytest.raises(ValueError, match="to have a mesh of 4 ranks with .*turns"):
        plan(SMALL, cluster, **options, fixed={"pp": 1, "turns": 1})


@pytest.mark.parametrize("layers", [2, 4, 12])
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_exchanges_that_are_waited_for_take_as_long_with_and_without_turns(
    schedule, recompute, layers
):
    model = dataclasses.replace(
        SMALL, num_layers=4 * layers, num_moe_layers=4 * layers, vocab_size=1
    )
    cluster = ClusterSpec((Level("node", 8, 1e-6, 1e9),), CLUSTER.flops, 1e12, 1e10)
    cost = StepCost(model, cluster, Job(8, 256, 32, "float32"))
    placed = {"pp": 4, "ep": 2, "schedule": schedule, "recompute": recompute}
    c, in_turn = columns(**placed), columns(**placed, turns=1)
    stages = even_stages(4 * layers, c)
    own, found = rank_columns(cost, in_turn, stages), turn_costs(cost, in_turn, stages)
    for s, exchanges in enumerate(cost.passes.apart(own)[1].tolist()):
        count = {kind: len(found.exchanges[f"{s}{kind}"]) for kind in "FB"}
        sent = [found.transfer[f"{s}{kind}"] * count[kind] for kind in "FB"]
        assert sum(sent) == pytest.approx(exchanges)
        assert sent[1] == pytest.approx((1 + recompute) * sent[0])
    # The closed form leaves out hops.
    table = make_table(schedule, 4, 16)
    seen = simulate(table, dataclasses.replace(found, hop=0.0)).makespan + ends_of(cost, own)
    assert seen == pytest.approx(float(cost.seconds(c)), rel=1e-6)
    assert (
        turn_plan(cost, in_turn, stages).makespan
        > simulate(table, dataclasses.replace(found, exchanges={})).makespan
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
@pytest.mark.parametrize("pp", [2, 4])
def test_no_step_in_turn_is_quicker_than_the_bound(schedule, pp):
    model, found = dataclasses.replace(SMALL, num_layers=8, num_moe_layers=8), []
    for rate, micro, recompute in itertools.product((1e8, 1e9, 1e10), (4, 16), (0, 1)):
        cluster = ClusterSpec((Level("node", 8, 1e-6, rate),), CLUSTER.flops, 1e12, 1e10)
        cost = StepCost(model, cluster, Job(2 * pp, 256, 2 * micro, "float32"))
        placed = {"pp": pp, "ep": 2, "schedule": schedule, "recompute": recompute}
        c = columns(**placed, turns=1)
        stages = divide(cost, c, all_again=True)
        made, own = turn_plan(cost, c, stages), rank_columns(cost, c, stages)
        assert float(cost.least(c)) <= made.makespan + ends_of(cost, own) * (1 + 1e-6)
        is_late = False
        for rank, starts in enumerate(made.starts):
            steps = {"F": 1, "B": -1, "W": -1}
            held = max(itertools.accumulate(steps.get(s.action.kind, 0) for s in starts))
            # A pass that ends is counted when it has begun.
            most = float(own["in_flight"][rank])
            assert held <= most * (2 if schedule == "interleaved" else 1)
            steps = {"I": 1, "W": -1}
            late = max(itertools.accumulate(steps.get(s.action.kind, 0) for s in starts))
            is_late |= rank > 0 and late > float(own["late"][rank])
        # An order that puts off more than memory counts is not taken.
        seconds = math.inf if is_late else made.makespan + ends_of(cost, own)
        assert simulated(cost, c, stages) == seconds
        found.append(is_late)
    assert any(found) == (schedule == "zb-h1" and pp == 2) and not all(found)


def test_coding_of_rows_is_counted():
    rates = tuple(CodecRate(n, 2 * n, n, 3e-9 * n, 1e-9 * n) for n in (2**14, 2**24))
    costs = dataclasses.replace(CostTable.of_process(), codecs={"rows int8": rates})
    # Two rows of 64 numbers a token, forward and backward, in 4 layers.
    numel, terms = 256 * 2 * 64, []
    for cluster in (CLUSTER, dataclasses.replace(CLUSTER, costs=costs)):
        assert ClusterSpec.of(json.loads(json.dumps(cluster.to_dict()))) == cluster
        cost = StepCost(SMALL, cluster, Job(4, 256, 16, "float32"))
        for wire in ("int8", None):
            found = cost.passes.terms(columns(ep=4, wire=wire))["experts"]
            sent = sum(cost.exchange.sent(4, 1, "alltoall", wire, "exact"))
            terms.append(float(found) - 2 * 4 * (256 * sent / 1e10 + 2e-6))
    # 4 bytes of each number and 68 of 64, written and read, or 4 ns.
    wanted = [2 * 4 * numel * each for each in (2 * (4 + 68 / 64) / 1e10, 0, 4e-9, 0)]
    assert terms == pytest.approx(wanted, abs=1e-12)


def test_formulas():
    cost = StepCost(preset("deepseek-v3"), CLUSTERS["h100"], Job(256))
    assert sum(cost.exchange.sent(1, 1, "alltoall", None, "exact")) == 0
    # 8 rows of 7168 numbers of 2 bytes there and back, but for a 64th of them.
    plain = sum(cost.exchange.sent(64, 1, "alltoall", None, "exact"))
    assert plain == pytest.approx(2 * 8 * 7168 * 2 * 63 / 64)
    once = sum(cost.exchange.sent(8, 1, "dedup", None, "reduced"))
    assert once < 0.7 * sum(cost.exchange.sent(8, 1, "alltoall", None, "exact"))
    assert Job(4).imbalance(8, 4) == 1
    assert Job(4, load=(5.0, 1, 1, 1)).imbalance(4, 2) == 1.5


def test_loads(tmp_path):
    # Each step sends all tokens to one rank, and the mean load is even.
    turns = ((1.0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    assert Job(4, load=turns).imbalance(4, 4) == 4
    uneven = Job(4, load=((1.0, 1, 1, 1), (5.0, 1, 1, 1)))
    assert uneven.imbalance(4, 2) == 1.25 and uneven.imbalance(4, 2, peak=True) == 1.5
    sizes = {"num_experts": 8, "top_k": 2}
    for name in LOADS:
        assert load_of(name, **sizes) == load_of(name.partition("_")[0], **sizes)
    file = tmp_path / "load.json"
    file.write_text(json.dumps(turns))
    assert load_of(file, num_experts=4, top_k=1) == turns
    options = {**STEP, "fixed": {"ep": 4, "pp": 1, "tp": 1}}
    seconds = [plan(SMALL, CLUSTER, load=load, **options).seconds for load in ("W0", "W4", "W1")]
    assert seconds[0] == seconds[1] < seconds[2]
    made = plan(SMALL, CLUSTER, load="W6", **options)
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made


def test_operations_of_attention():
    # 128 heads of 192 numbers in the scores and 128 in their values, over half of the sequence.
    assert preset("deepseek-v3").scores_dim == 128 * (192 + 128) // 2
    assert preset("deepseek-v3").mean_keys(4096) == 2048
    # Every second layer sees 128 tokens, fewer at the start.
    seen = [min(i + 0.5, 128) for i in range(4096)]
    assert preset("gpt-oss-120b").mean_keys(4096) == pytest.approx(
        (2048 + sum(seen) / 4096) / 2, rel=1e-3
    )
    cost = StepCost(SMALL, CLUSTER, Job(4, 256, 16, "float32"))
    slow = dataclasses.replace(CLUSTER, score_efficiency=CLUSTER.efficiency / 4)
    four = StepCost(SMALL, slow, cost.job)
    layers, one = SMALL.num_layers, columns()
    scores = layers * 256 * 4 * 128 * SMALL.scores_dim / 1e11 / CLUSTER.efficiency
    assert float(four.compute.products(one) - cost.compute.products(one)) == pytest.approx(
        3 * scores
    )
    # Without a fused kernel twice as many, and six accesses to each of them.
    eager = StepCost(SMALL, CLUSTER, dataclasses.replace(cost.job, eager_attention=True))
    assert float(eager.compute.products(one) - cost.compute.products(one)) == pytest.approx(scores)
    more = SMALL.num_layers * 256 * 6 * SMALL.num_heads * 256 * 4 / CLUSTER.memory_bandwidth
    assert float(eager.compute.elementwise(one) - cost.compute.elementwise(one)) == pytest.approx(
        more
    )


def test_exchanges_behind_other_micro_batches():
    cost = StepCost(SMALL, CLUSTER, Job(8, 256, 16, "float32"))
    hidden = StepCost(SMALL, CLUSTER, dataclasses.replace(cost.job, hidden_exchanges=True))
    slow = dataclasses.replace(CLUSTER, flops={"float32": 1e16}, memory_bandwidth=1e15)
    for ep in (2, 8):
        seen, left = (each.passes.terms(columns(ep=ep)) for each in (cost, hidden))
        assert float(seen["experts"]) > 0 and float(left["experts"]) == 0
        assert all(torch.equal(seen[name], left[name]) for name in seen if name != "experts")
        # Longer than the work, they show by the rest.
        bare = StepCost(SMALL, slow, cost.job).passes.terms(columns(ep=ep))
        left = StepCost(SMALL, slow, hidden.job).passes.terms(columns(ep=ep))
        work = float(bare["compute"] + bare["elementwise"])
        assert float(left["experts"]) == pytest.approx(float(bare["experts"]) - work)


def seconds_of_terms(cluster, job, **axes):
    return {
        name: float(value)
        for name, value in StepCost(SMALL, cluster, job).passes.terms(columns(**axes)).items()
    }


def test_products_take_whole_waves_of_tiles():
    m, job = preset("llama-3-8b"), Job(1, 200, 1)
    flat = dataclasses.replace(CLUSTERS["h100"], multiprocessors=0)
    waves = dataclasses.replace(flat, multiprocessors=100)
    plain, slow = (
        float(StepCost(m, each, job).compute.products(columns())) for each in (flat, waves)
    )
    # Products of queries with keys and values, and of gate with up, by columns, and the others.
    shapes = [(4096, 6144), (4096, 4096), (4096, 2 * 14336), (14336, 4096)]

    def share(high, wide):
        tiles = min(math.ceil(high / a) * math.ceil(wide / b) for a, b in ((128, 256), (256, 128)))
        return math.ceil(tiles / 100) * 100 * 128 * 256 / (high * wide)

    # A product and the gradients of its input and of its matrix.
    over = [(share(200, n) + share(200, k) + share(k, n)) / 3 for k, n in shapes]
    more = sum(k * n * (each - 1) for (k, n), each in zip(shapes, over, strict=True))
    assert more > 0.05 * sum(k * n for k, n in shapes)
    rate = flat.flops["bfloat16"] * flat.efficiency
    assert slow - plain == pytest.approx(32 * 200 * 2 * more / rate)
    # Experts of a rank share their waves, and latent attention has five products.
    for name, ep in (("qwen3-30b", 8), ("deepseek-v3", 64)):
        job, many = Job(64, 4096, 64), columns(ep=ep)
        each = [float(StepCost(preset(name), c, job).compute.products(many)) for c in (flat, waves)]
        assert each[0] < each[1] < 1.3 * each[0]
        last = [float(StepCost(preset(name), c, job).bound(many)) for c in (flat, waves)]
        assert last[0] < last[1] <= float(StepCost(preset(name), waves, job).least(many))


def test_a_tp_group_of_all_ranks_of_a_node_launches_longer():
    job = Job(8, 256, 16, "float32")
    slow = dataclasses.replace(CLUSTER, layer_seconds=1.0)
    longer = dataclasses.replace(slow, node_launches=0.5)
    node = CLUSTER.levels[0].size
    for tp in (2, 4):
        before, after = (seconds_of_terms(each, job, tp=tp) for each in (slow, longer))
        whole = 3.0 * (SMALL.num_layers + 1)
        assert after["launches"] - before["launches"] == pytest.approx(
            0.5 * whole if tp == node else 0.0
        )


def test_messages_behind_the_work_of_programs_that_hide_them():
    job = Job(8, 256, 16, "float32")
    hidden = dataclasses.replace(job, hidden_gradients=True, hidden_tensor=True)
    slow = dataclasses.replace(CLUSTER, flops={"float32": 1e16}, memory_bandwidth=1e15)
    for cluster in (CLUSTER, slow):
        seen, left = (seconds_of_terms(cluster, each, tp=2) for each in (job, hidden))
        shown = max(seen["tensor"] - seen["compute"], 0.0)
        assert left["tensor"] == pytest.approx(shown)
        assert all(seen[name] == left[name] for name in seen if name != "tensor")
        for zero in (1, 2, 3):
            one = columns(zero=zero)
            open_, shut = (StepCost(SMALL, cluster, each) for each in (job, hidden))
            work = sum(float(value) for value in shut.passes.terms(one).values())
            work *= float(shut.sizes.num_micro_batches(one)) if zero > 1 else 1
            rest = max(float(open_.end.gradients(one)) - work, 0.0)
            assert float(shut.end.gradients(one)) == pytest.approx(rest)


def test_a_router_that_keeps_to_few_nodes_sends_less_between_them():
    m = preset("deepseek-v3")
    free, kept = (StepCost(m, CLUSTERS["h100"], Job(64, node_limit=limit)) for limit in (0, 4))
    way = (64, 1, "hierarchical", None, "reduced")
    (near, far), (inside, outside) = (each.exchange.sent(*way) for each in (free, kept))
    # Of eight nodes of 32 experts eight at random have five and a quarter.
    nodes = 8 * (1 - math.comb(224, 8) / math.comb(256, 8))
    assert inside == near and outside == pytest.approx(far * 4 / nodes)
    all_nodes = StepCost(m, CLUSTERS["h100"], Job(64, node_limit=8))
    assert all_nodes.exchange.sent(*way) == (near, far)


def test_layers_in_a_narrow_format():
    m, cluster = preset("llama-3-8b"), CLUSTERS["h100"]
    twice = dataclasses.replace(
        cluster, flops={**cluster.flops, "float8": 2 * cluster.flops["bfloat16"]}
    )
    wide, narrow = (
        StepCost(m, twice, Job(8, 256, 16, layer_dtype=dtype)) for dtype in (None, "float8")
    )
    one = columns()
    scores = 32 * float(wide.compute.scores(wide.sizes.tokens(one)))
    assert float(wide.compute.products(one)) - scores == pytest.approx(
        2 * (float(narrow.compute.products(one)) - scores)
    )
    assert torch.equal(wide.compute.output(one), narrow.compute.output(one))
    # Two passes of three read 2 bytes and write a byte twice of each number.
    rounded = 32 * 256 * (2 * 4096 + 4096 + 14336) * 4 * 2 / 3
    more = float(narrow.compute.elementwise(one) - wide.compute.elementwise(one))
    assert more == pytest.approx(rounded / twice.memory_bandwidth)
    with pytest.raises(ValueError, match="expected cluster.flops to have float8"):
        StepCost(m, cluster, Job(8, layer_dtype="float8"))


def test_the_backward_pass_of_fused_attention_has_five_products():
    job = Job(4, 256, 16, "float32")
    fused, eager = (
        StepCost(SMALL, CLUSTER, job),
        StepCost(SMALL, CLUSTER, dataclasses.replace(job, eager_attention=True)),
    )
    one = columns()
    for each, passes in ((fused, 0.5), (eager, 0.0)):
        more = float(each.passes.terms(one)["compute"] - 3 * each.compute.products(one))
        scores = SMALL.num_layers * float(each.compute.scores(each.sizes.tokens(one)))
        assert more == pytest.approx(passes * scores, abs=1e-12)


def test_a_ring_leaves_a_node_by_the_links_of_all_its_ranks():
    cost = StepCost(SMALL, CLUSTER, Job(8, 256, 16, "float32"))
    # Four ranks of a node have 1e9 bytes a second each; of every fourth rank there is one.
    for size, stride, links in ((8, 1, 4), (4, 2, 2), (2, 4, 1)):
        found = cost.sizes.ring(torch.tensor([size]), torch.tensor([stride]), torch.tensor([1e6]))
        sent = (size - 1) / size * 1e6
        assert float(found) == pytest.approx((size - 1) * 1e-5 + sent / (links * 1e9))


def test_launches_and_the_output():
    cost = StepCost(SMALL, CLUSTER, Job(4, 256, 16, "float32"))
    busy = sum(float(value) for value in cost.passes.terms(columns(pp=4, ep=1)).values())
    slow = dataclasses.replace(CLUSTER, layer_seconds=busy)
    found = StepCost(SMALL, slow, cost.job).passes.terms(columns(pp=4))
    # A layer on each rank and what is beside it: three passes, less the time that work takes.
    assert float(found["launches"]) == pytest.approx(5 * busy)
    assert float(cost.passes.terms(columns(pp=4))["launches"]) == 0
    # The last of the stages alone has the output, and a recompute has none.
    placed = columns(pp=4, recompute=1)
    each, last = (
        float(sum(cost.passes.terms(placed).values())),
        3 * float(cost.compute.output(placed)),
    )
    ends = float(cost.end.gradients(placed) + cost.end.update(placed))
    assert float(cost.seconds(placed)) == pytest.approx(16 * (each + last) + 3 * each + ends)
    gap = simulated(cost, placed) - float(cost.seconds(placed))
    assert 0 <= gap < 0.1 * (each + last) * 16
    # AdamW's two moments of float32 weights, read and written, a gradient and a weight.
    rate = CLUSTER.memory_bandwidth
    held = sum(float(part) for part in cost.sizes.parameters(columns()))
    assert float(cost.end.update(columns())) == pytest.approx(held * (16 + 8) / rate)


def test_plan_is_written_and_told(tmp_path):
    made = plan(SMALL, CLUSTER, **STEP, load=[1.0] * 8)
    made.to_json(tmp_path / "plan.json")
    held = json.loads((tmp_path / "plan.json").read_text())
    assert made.choice["etp"] == 1
    for each in (held, *held["pareto"], *held["runners_up"]):
        # As in a file from before the axis was there.
        del each["choice"]["etp"]
    (tmp_path / "old.json").write_text(json.dumps(held))
    assert Plan.from_json(tmp_path / "old.json").choice == made.choice
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == made
    assert sum(made.time_terms().values()) == pytest.approx(made.seconds)
    assert "binding is" in made.why_not(tp=4) and "s a step" in str(made)
    page = html_report(made, why_not={"tp=4": made.why_not(tp=4)})
    assert page.count("<svg") == 3 and "http" not in page.replace("http-", "")


def test_a_runner_up_that_is_quicker_is_not_proven(monkeypatch):
    made = plan(SMALL, CLUSTER, **STEP, fixed={"pp": 1, "tp": 1, "cp": 1})
    assert made.proven and len(made.runners_up) == 2
    monkeypatch.setattr(Plan, "time", lambda self, *_, **__: -self.seconds)
    best, seconds = made.rerank(lambda: torch.nn.Linear(1, 1))
    assert best.choice == made.runners_up[1].choice and seconds[2] == min(seconds)
    assert "not proven best" in str(best) and best.runners_up == ()
    monkeypatch.setattr(Plan, "time", lambda self, *_, **__: self.seconds)
    assert made.rerank(lambda: torch.nn.Linear(1, 1))[0] is made


def test_numbers_of_numpy_are_numbers(tmp_path):
    options = {**STEP, "num_ranks": 2, "local_steps": 4, "capacity_factor": 1.5}
    whole = {name: np.int64(x) for name, x in options.items() if isinstance(x, int)}
    theirs = {**options, **whole, "capacity_factor": np.float32(1.5)}
    model = dataclasses.replace(SMALL, moe_layers=tuple(range(SMALL.num_moe_layers)))
    same = dataclasses.replace(SMALL, moe_layers=tuple(np.arange(SMALL.num_moe_layers)))
    cluster = dataclasses.replace(CLUSTER, flops={"float32": 2.0**36})
    alike = dataclasses.replace(
        CLUSTER, memory=np.float32(4e8), flops={"float32": np.float32(2**36)}
    )
    load, fixed = [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0], {"pp": 1, "tp": 1}
    made = plan(model, cluster, **options, load=load, fixed=fixed)
    for given in (np.array(load), torch.tensor(load), list(np.array(load, dtype="i"))):
        like = {name: np.int64(value) for name, value in fixed.items()}
        found = plan(same, alike, **theirs, load=given, fixed=like)
        found.to_json(tmp_path / "plan.json")
        assert Plan.from_json(tmp_path / "plan.json") == found == made
    assert load_of(np.float32(0.5), num_experts=8, top_k=2) == 0.5


def test_sequences_of_odd_length():
    options = {**STEP, "seq_len": 33}
    alone = plan(SMALL, CLUSTER, **{**options, "num_ranks": 1})
    assert alone.memory < plan(SMALL, CLUSTER, **{**options, "num_ranks": 1, "seq_len": 34}).memory
    shared = plan(SMALL, CLUSTER, **options)
    assert (shared.choice["tp"], shared.choice["cp"]) == (1, 1)
    with pytest.raises(ValueError, match="'cp': 2}, got none; change seq_len, "):
        plan(SMALL, CLUSTER, **options, fixed={"cp": 2})


def test_launchers_start_every_rank(tmp_path):
    made = plan(SMALL, CLUSTER, **{**STEP, "num_ranks": 2}, fixed={"pp": 1, "tp": 1, "cp": 1})
    made.to_json(tmp_path / "plan.json")
    script = "import os, sys; open('rank' + os.environ['RANK'], 'w').write(' '.join(sys.argv[1:]))"
    (tmp_path / "train.py").write_text(script)
    line = made.commands("train.py")["torchrun"].replace("torchrun", "-m torch.distributed.run", 1)
    log = tmp_path / "log"
    code = Script(shlex.split(line), dict(os.environ), log, tmp_path).wait(timeout=120)
    assert code == 0, log.read_text()
    told = {p.name: p.read_text() for p in tmp_path.glob("rank*")}
    assert told == dict.fromkeys(("rank0", "rank1"), "--plan plan.json")


def test_launchers_of_many_nodes(tmp_path):
    fixed = {"pp": 1, "tp": 1, "cp": 1}
    made = plan(preset("mixtral-8x7b"), "h100", num_ranks=32, global_batch=64, fixed=fixed)
    found = made.commands("run.py")
    assert "--nnodes 4 " in found["torchrun"] and "--nproc-per-node 8 run.py" in found["torchrun"]
    subprocess.run(["bash", "-n"], input=found["slurm"], text=True, check=True)
    # Commands of a cluster, told rather than run.
    stubs = "scontrol() { printf 'first\\nsecond\\n'; }; srun() { echo \"$@\"; }\n"
    done = subprocess.run(["bash"], input=stubs + found["slurm"], capture_output=True, text=True)
    assert done.stdout.strip() == found["torchrun"].replace("$MASTER_ADDR", "first")
    assert "--nodes=4" in found["slurm"] and "--gpus-per-node=8" in found["slurm"]
    specs = json.loads(found["kubernetes"])["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in specs.items()} == {"Master": 1, "Worker": 3}
    (container,) = specs["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "run.py", "--plan", "plan.json"]
    told = json.loads(made.commands("run.py --lr '1 2'")["kubernetes"])["spec"]
    (container,) = told["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"][1:4] == ["run.py", "--lr", "1 2"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_command(tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = ["-m", "moe_ext", "plan", "--cluster", "h100", "--gpus", "4"]
    options = ["--global-batch", "8", "--seq-len", "128", "--fix", "pp=1"]
    options += ["--why-not", "tp=2", "--why-not", "ep=7"]
    options += ["--load", "W1", "--profile"]
    rates = CostTable.of_process()
    rates = dataclasses.replace(rates, codecs={"rows mx": (CodecRate(4, 16, 8, 1.0, 2.0),)})
    rates.save(tmp_path / "costs.json")
    options += ["--costs", str(tmp_path / "costs.json")]
    out = ["--out", str(tmp_path / "plan.json"), "--report", str(tmp_path / "plan.html")]
    log = tmp_path / "out", tmp_path / "err"
    command += ["--model", str(config)]
    code = Script([*command, *options, *out], dict(os.environ), log).wait(timeout=120)
    said, errors = (each.read_text() for each in log)
    assert code == 0, errors
    assert (
        "Gflop/s in bfloat16" in said
        and "why not tp=2" in said
        and "why not ep=7: plan: expected ranks, heads, experts" in said
        and "examples/train_moe_lm.py --plan " in said
    )
    for text in (said, (tmp_path / "plan.html").read_text()):
        assert re.search(r"mixtral: .* layers; .*: 4 ranks, .* 8 sequences of 128 .*bfloat16", text)
    page = html.unescape((tmp_path / "plan.html").read_text())
    assert page.count(f"--plan {tmp_path / 'plan.json'}") == 2 and "Nothing builds" not in page
    made = Plan.from_json(tmp_path / "plan.json")
    assert made.choice["pp"] == 1 and made.cluster.costs == rates
    monkeypatch.setattr(sys, "argv", [*command[1:], "--model", "nothing"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2 and "expected model to be one of" in capsys.readouterr().err
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    arguments = ["--model", str(config), "--cluster", "h100", "--gpus", "4", "--costs"]
    out = ["--out", str(tmp_path / "other.json"), "--global-batch=8", "--seq-len=128"]
    out += ["--report", str(tmp_path / "other.html"), "--fix=pp=1"]
    for option, problem in (
        ("--fix=tp=2 --fix=zero=1", "expected zero to be 0, 2 or 3 for tp=2"),
        ("--layer-dtype=bfloat16", "expected a plan without layer_dtype"),
        ("--hidden-exchanges", "expected a plan without hidden_exchanges"),
        ("--hidden-gradients", "expected a plan without hidden_gradients"),
        ("--hidden-tensor", "expected a plan without hidden_tensor"),
    ):
        assert cli.run(parser.parse_args([*arguments[:-1], *out, *option.split()])) == 0
        told = capsys.readouterr().out
        page = html.unescape((tmp_path / "other.html").read_text())
        for text in (told, page):
            assert f"Nothing builds it yet: {problem}" in text and "torchrun" not in text
    for file, text in (("none.json", "No such file"), ("config.json", "expected schema to be 1")):
        assert cli.run(parser.parse_args([*arguments, str(tmp_path / file)])) == 2
        assert text in capsys.readouterr().err

    def full(*of: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Plan, "to_json", full)
    assert cli.run(parser.parse_args([*arguments[:-1], *out])) == 2
    assert "moe_ext plan: [Errno 28] No space left" in capsys.readouterr().err
