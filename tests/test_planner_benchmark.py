"""Published runs: that the file says what the sources say, and how round numbers are chosen."""

import collections
import dataclasses
import math

import pytest
from benchmark_parts import benchmarks_on_path  # noqa: F401

from moe_ext.planner import CLUSTERS


def test_runs_are_plans_of_their_ranks():
    from bench_planner import FORMATS, SOURCES, SYSTEMS, model_of, read_runs

    runs = read_runs()
    counts = collections.Counter(run.source for run in runs)
    assert counts.keys() == SOURCES.keys()
    assert all(url.startswith("https://") for url in SOURCES.values())
    assert counts["vtrain"] == 1549 and counts["megatron-2021"] == 10
    for run in runs:
        spec = model_of(run.model)
        assert run.system in SYSTEMS and run.precision in FORMATS and run.seconds > 0
        data, rest = divmod(run.gpus, run.tp * run.cp * run.pp)
        assert rest == 0 and run.global_batch % (data * run.micro_batch) == 0, run
        assert run.gpus // run.pp % run.ep == 0 and spec.num_heads % run.tp == 0, run
        assert run.ep == 1 or spec.num_experts % run.ep == 0, run
        assert run.dispatcher in (("alltoall", "flex") if spec.num_experts else ("",)), run


def test_every_run_has_its_rates():
    from bench_planner import LAYERS, PRESETS, SYSTEMS, cost_of, read_runs

    runs, made = read_runs(), dataclasses.replace(PRESETS, links=0.5)
    for run in runs[::7] + [run for run in runs if run.precision == "NVFP4"]:
        cost, columns = cost_of(run, made)
        system, cluster = SYSTEMS[run.system], cost.cluster
        assert cluster.levels[0].bandwidth == 0.5 * system.link
        assert cluster.levels[1].bandwidth == 0.5 * system.network
        narrow = run.precision in ("FP8", "MXFP8", "NVFP4")
        assert cost.job.layer_dtype == (LAYERS if narrow else None)
        times = {"NVFP4": 6 if run.system == "GB300" else 4, "FP8": 2, "MXFP8": 2}
        peak = cluster.flops["bfloat16"] * times.get(run.precision, 1)
        assert cluster.flops[LAYERS] == pytest.approx(peak)
        old = run.source in ("vtrain", "megatron-2021")
        assert cost.job.hidden_gradients is not old
        assert cost.job.eager_attention is old
        assert int(columns["dispatcher"]) == 0 or run.dispatcher == "flex"
        assert (int(columns["wire"]) > 0) is (run.source == "deepseek-v3")


@pytest.mark.parametrize(
    ("name", "system"), [("a100", "A100"), ("h100", "H100"), ("h200", "H200"), ("gb200", "GB200")]
)
def test_runs_are_foretold_by_what_the_presets_have(name, system):
    from bench_planner import PRESETS, SYSTEMS

    found, nominal = CLUSTERS[name], SYSTEMS[system]
    for field in ("efficiency", "score_efficiency", "layer_seconds", "node_launches"):
        assert getattr(found, field) == getattr(PRESETS, field)
    assert found.multiprocessors == nominal.multiprocessors
    assert found.memory_bandwidth == pytest.approx(PRESETS.memory * nominal.memory)
    links = [level.bandwidth for level in found.levels]
    assert links == pytest.approx([PRESETS.links * r for r in (nominal.link, nominal.network)])
    assert found.flops == {"bfloat16": nominal.flops}


def test_operations_are_those_that_are_published():
    from bench_planner import model_tflop, read_runs

    checked = collections.Counter()
    for run in read_runs():
        if run.source != "megatron-bridge":
            continue
        # Before 26.06 the source counted a fifth less of GPT-OSS than it does now.
        if run.model == "gpt-oss-120b" and run.release < "26.06":
            continue
        found = model_tflop(run) / run.gpus / run.seconds
        tokens = run.global_batch * run.seq_len / run.gpus / run.seconds
        # Half of the last digit; three releases round sequences a second to whole ones. Norms, and
        # the projection of multi-token prediction, are not in the formula.
        whole = run.release in ("26.04.01", "26.06.01", "26.08")
        step = run.seq_len / run.gpus if whole else 1
        assert run.tflops is not None
        tolerance = (0.5 / run.tflops + 0.5 * step / tokens) + 0.007
        assert found == pytest.approx(run.tflops, rel=tolerance), run
        checked[run.model] += 1
    assert len(checked) == 9 and min(checked.values()) >= 4


def test_errors_are_of_the_presets_and_without_the_source():
    from bench_planner import SOURCES, Validation, error_table, kind_of, read_runs

    runs = read_runs()
    twice, right = [2 * run.seconds for run in runs], [run.seconds for run in runs]
    made = error_table(Validation(runs, twice, {}, right))
    assert {row[0] for row in made.rows} == set(SOURCES)
    assert len(made.rows) == len({kind_of(run) for run in runs})
    for row in made.rows:
        named = dict(zip(made.header, row, strict=True))
        assert (named["error %"], named["bias %"]) == ("100.0", "+100.0")
        assert named["error without the source %"] == "0.0"


def test_numbers_of_a_source_are_chosen_without_it(monkeypatch):
    import bench_planner

    seen = []

    def nearest(runs):
        seen.append({run.source for run in runs})
        return bench_planner.PRESETS

    monkeypatch.setattr(bench_planner, "nearest", nearest)
    monkeypatch.setattr(bench_planner, "predict", lambda run, rates, closed=False: 1.0)
    found = bench_planner.validate()
    every = set(bench_planner.SOURCES)
    assert seen == [*(every - {source} for source in bench_planner.SOURCES), every]
    assert set(found.chosen) == {*every, "none"}


def test_the_nearest_round_numbers_of_runs_are_found():
    from bench_planner import PRESETS, nearest, predict, read_runs

    truth = dataclasses.replace(PRESETS, efficiency=0.8, layer_seconds=4e-4)
    runs = [run for run in read_runs() if run.source == "vtrain"][::80]
    runs = [dataclasses.replace(run, seconds=predict(run, truth, closed=True)) for run in runs]
    found = nearest(runs)
    assert (found.efficiency, found.layer_seconds) == (0.8, 4e-4)
    errors = [math.log(predict(run, found, closed=True) / run.seconds) for run in runs]
    assert max(map(abs, errors)) < 0.05


def test_regret_is_of_the_chosen_plan():
    from bench_planner import read_runs, regrets

    runs = [run for run in read_runs() if run.source == "vtrain"]
    right = regrets(runs, [run.seconds for run in runs])
    assert len(right) == 148 and all(loss == 0 for _, _, loss in right)
    worst = regrets(runs, [-run.seconds for run in runs])
    assert all(loss > 0 for _, _, loss in worst)
    first = worst[0][0]
    same = [run.seconds for run in runs if run.job == first.job]
    assert worst[0][2] == pytest.approx(100 * (max(same) / min(same) - 1))
