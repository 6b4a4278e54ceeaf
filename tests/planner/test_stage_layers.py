"""Layers of stages against all divisions of small models."""

import dataclasses
import itertools

import pytest
import torch
from planner_models import columns

from moe_ext.pipeline import make_table
from moe_ext.planner import (
    CLUSTERS,
    Job,
    ModelSpec,
    Plan,
    RecurrentSpec,
    StepCost,
    plan,
    preset,
    search,
)
from moe_ext.planner.axes import choice_of
from moe_ext.planner.stage_layers import (
    StageLayers,
    divide,
    divisible,
    rank_columns,
    simulated,
    split_evenly,
    stage_columns,
)

EXPERTS = {"num_experts": 8, "top_k": 2, "gated": True, "gated_experts": True}
MODELS = {
    "alike": ModelSpec(5, 64, 4, 96, 512, num_moe_layers=5, **EXPERTS),
    "dense first": ModelSpec(6, 64, 4, 96, 128, num_moe_layers=4, dense_ffn_dim=512, **EXPERTS),
    "in turn": ModelSpec(
        6, 64, 4, 96, 128, num_moe_layers=3, moe_layers=(1, 3, 5), dense_ffn_dim=512, **EXPERTS
    ),
    "hybrid": ModelSpec(
        *(6, 64, 4, 96, 128),
        num_moe_layers=2,
        moe_layers=(1, 4),
        mixers=("recurrent", "recurrent", "attention", "recurrent", "recurrent", "both"),
        recurrent=RecurrentSpec(64 * 640, 512, 4, 8, 4, 32, 64, has_beta=True),
        **EXPERTS,
    ),
}


def cost_of(name, memory=4e9, ranks=3):
    cluster = dataclasses.replace(
        CLUSTERS["ethernet"], flops={"float32": 1e11}, memory=memory, memory_bandwidth=1e10
    )
    return StepCost(MODELS[name], cluster, Job(ranks, 256, 8 * ranks, "float32"))


def seconds_of(cost, c, *divisions):
    """For each division the sum of its stages and, a micro-batch but one, the slowest."""
    every = [stage_columns(cost, c, stages) for stages in divisions]
    each = {name: torch.cat([columns[name] for columns in every]) for name in every[0]}
    spent = sum(cost.passes.terms(each).values()) + 3 * cost.compute.output(each) * each["loss"]
    spent = spent.masked_fill(cost.memory.fullest(each) > cost.cluster.memory, torch.inf)
    spent = spent.view(len(divisions), -1)
    return (spent.sum(1) + (cost.sizes.num_micro_batches(c)[0] - 1) * spent.amax(1)).tolist()


def every_division(cost, pp, recompute):
    parts, size = cost.model.parts, cost.model.num_layers
    for cuts in itertools.combinations(range(1, size), pp - 1):
        spans = list(itertools.pairwise((0, *cuts, size)))
        kinds = [
            [[i for i in range(*s) if parts[i] == kind] for kind in cost.model.kinds] for s in spans
        ]
        numbers = [
            itertools.product(*(range(len(kind) * recompute + 1) for kind in each))
            for each in kinds
        ]
        for again in itertools.product(*numbers):
            yield [
                StageLayers(
                    *s, tuple(sorted(i for k, n in zip(each, some, strict=True) for i in k[:n]))
                )
                for s, each, some in zip(spans, kinds, again, strict=True)
            ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 1.0), ("1f1b", 0.6), ("gpipe", 0.3)])
def test_no_division_is_quicker(name, schedule, share):
    c = columns(pp=3, schedule=schedule, recompute=1)
    most = cost_of(name)
    even = [StageLayers(*s) for s in split_evenly(most.model.num_layers, 3)]
    none = float(most.memory.fullest(stage_columns(most, c, even)).max())
    full = [dataclasses.replace(s, again=tuple(range(s.start, s.end))) for s in even]
    all_again = float(most.memory.fullest(stage_columns(most, c, full)).max())
    cost = cost_of(name, all_again + share * (none - all_again))
    found = divide(cost, c)
    least = min(seconds_of(cost, c, *every_division(cost, 3, 1)))
    taken, again = seconds_of(cost, c, found, full)
    assert taken == pytest.approx(least, rel=1e-12)
    assert again >= least
    assert divide(cost, c, all_again=True) is not None
    small = dataclasses.replace(cost.cluster, memory=0.5 * all_again)
    assert divide(StepCost(cost.model, small, cost.job), c) is None


def test_ranks_of_interleaved_stages():
    cost = cost_of("alike", ranks=2)
    cost = StepCost(dataclasses.replace(cost.model, num_layers=8, num_moe_layers=8), *(
        cost.cluster, cost.job,
    ))  # fmt: skip
    c = columns(pp=2, schedule="interleaved", recompute=1)
    free = divide(cost, c)
    assert [(s.start, s.end) for s in free] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert not any(s.again for s in free)
    own = rank_columns(cost, c, free)
    assert own["layers"].tolist() == [4, 4] and own["loss"].tolist() == [0, 1]
    assert own["ends"].tolist() == [1, 1]
    least = float(cost.memory.fullest(own).max()) - 1
    tight = StepCost(cost.model, dataclasses.replace(cost.cluster, memory=least), cost.job)
    found = divide(tight, c)
    assert 0 < sum(len(s.again) for s in found) < 8
    assert float(cost.memory.fullest(rank_columns(cost, c, found)).max()) <= least
    assert simulated(cost, c, found) > simulated(cost, c, free)


def test_even_stages_take_the_time_of_the_closed_form():
    cost = cost_of("alike", ranks=5)
    alike = dataclasses.replace(cost.model, vocab_size=1)
    cost = StepCost(alike, cost.cluster, cost.job)
    for axes in ({"recompute": 0}, {"recompute": 1}):
        c = columns(pp=5, **axes)
        stages = divide(cost, c, all_again=True)
        assert [s.end - s.start for s in stages] == [1] * 5
        assert simulated(cost, c, stages) == pytest.approx(simulated(cost, c), rel=1e-6)
        assert float(cost.least(c)) <= simulated(cost, c, stages)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
@pytest.mark.parametrize("name", MODELS)
def test_no_step_is_quicker_than_the_bound(name, schedule):
    for micro in (2, 4, 16):
        cost = cost_of(name, ranks=2)
        cost = StepCost(cost.model, cost.cluster, Job(2, 256, micro, "float32"))
        c = columns(pp=2, schedule=schedule, recompute=0)
        if schedule == "interleaved":
            divisions = [divide(cost, c)]
        else:
            divisions = list(every_division(cost, 2, 0))
        best = min(simulated(cost, c, stages) for stages in divisions)
        assert float(cost.least(c)) <= best * (1 + 1e-6)


def test_plans_name_layers(tmp_path):
    model = dataclasses.replace(preset("deepseek-v3"))
    assert model.has_experts == (False,) * 3 + (True,) * 58
    fixed = {"pp": 8, "tp": 1, "cp": 1, "recompute": 1, "turns": 0, "schedule": "1f1b"}
    fixed |= {"micro_batch": 1, "dispatcher": "dedup", "combine": "exact", "zero": 1}
    made = plan(model, "h100", num_ranks=256, global_batch=1024, fixed=fixed)
    assert sum(len(s.again) for s in made.stages) == 61
    lengths = [s.end - s.start for s in made.stages]
    # The last stage has the output, the first one dense layers.
    assert lengths[-1] < max(lengths) and "stage 7: " in str(made)
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    assert sum(made.time_terms().values()) == pytest.approx(made.seconds)
    total = torch.tensor(list(made.memory_terms().values())).sum()
    assert 1.1 * float(total) == pytest.approx(made.memory)
    with pytest.raises(ValueError, match="expected moe_layers to be 58 of the 61 layers"):
        dataclasses.replace(model, moe_layers=(1, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_stages_hold_what_the_table_leaves_open(schedule):
    cost = cost_of("alike", ranks=4)
    model = dataclasses.replace(cost.model, num_layers=8, num_moe_layers=8)
    cost = StepCost(model, cost.cluster, Job(4, 256, 8, "float32"))
    c = columns(pp=4, schedule=schedule, recompute=0)
    stages = [StageLayers(*s) for s in split_evenly(8, 8 if schedule == "interleaved" else 4)]
    found = rank_columns(cost, c, stages)
    for rank, row in enumerate(make_table(schedule, 4, 8).rows):
        kinds = [action.kind for action in row]

        def most(steps, kinds=kinds):
            return max(itertools.accumulate(steps.get(kind, 0) for kind in kinds))

        held = most({"F": 1, "B": -1, "W": -1})
        assert float(found["in_flight"][rank]) == held / (len(stages) // 4), rank
        # A first stage does all in W.
        late = most({"I": 1, "W": -1}) if schedule == "zb-h1" and rank else 0
        assert float(found["late"][rank]) == late, rank


def test_the_smallest_that_does_not_fit_takes_more_than_there_is():
    sizes = {**EXPERTS, "num_moe_layers": 3, "dense_ffn_dim": 16}
    model = ModelSpec(7, 64, 4, 4096, 128, num_kv_heads=4, **sizes)
    fixed = {"pp": 4, "micro_batch": 1, "zero": 0, "offload": "none"}
    cluster = dataclasses.replace(
        CLUSTERS["ethernet"], flops={"float32": 1e11}, memory_bandwidth=1e10
    )
    # Layers of the mean fit into some of these, and no layers of the model do.
    told = []
    for memory in (1.55e8, 1.5e8, 1.4e8, 1.3e8, 1e7):
        small, job = dataclasses.replace(cluster, memory=memory), Job(4, 256, 16, "float32")
        found = search(StepCost(model, small, job), fixed=fixed)
        assert found.best is None and found.least.memory > memory
        told.append(bool(found.least.stages))
        text = "smallest, of stages of even lengths, takes" if told[-1] else "smallest takes"
        with pytest.raises(ValueError, match=f"fits into memory, got none: the {text}"):
            plan(model, small, **vars(job) | {"fixed": fixed})
    assert told[0] and not told[-1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
@pytest.mark.parametrize("name", MODELS)
def test_a_search_finds_what_fits_by_some_division(name, schedule):
    found = set()
    for again, share in itertools.product(((0,), (0, 1)), (0.6, 0.8, 0.9, 1.0)):
        given = [columns(pp=2, schedule=schedule, recompute=number) for number in again]
        plain = cost_of(name, 1e12, 2)
        most = plain.memory.fullest(rank_columns(plain, given[-1], divide(plain, given[-1]))).max()
        cost = cost_of(name, float(most) * share, 2)
        fit = [divide(cost, c) is not None for c in given]
        assert [bool(divisible(cost, c)) for c in given] == fit
        assert all(bool(cost.memory.may_fit(c)) for c, fits in zip(given, fit, strict=True) if fits)
        fixed = choice_of(given[0], 0)
        if len(again) > 1:
            fixed.pop("recompute")
        best = search(cost, fixed=fixed)
        assert (best.best is not None) == any(fit) and (best.proven or not any(fit))
        found.add(any(fit))
    assert found == {True, False}
