"""Published runs: that the file says what the sources say, and what constants are fitted on."""

import collections
import dataclasses
import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path():
    before = list(sys.path)
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path[:] = before


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


def test_every_run_is_in_one_group_and_has_its_rates():
    from bench_planner import GROUPS, LAYERS, SYSTEMS, Constants, cost_of, read_runs

    runs, made = read_runs(), Constants(links=0.5, alltoall=0.4, gradients=3.0)
    assert all(sum(run in group for group in GROUPS) == 1 for run in runs)
    for run in runs[::7] + [run for run in runs if run.precision == "NVFP4"]:
        cost, columns = cost_of(run, made)
        system, cluster = SYSTEMS[run.system], cost.cluster
        share = 0.5 * (0.4 if run.dispatcher == "alltoall" else 1)
        assert cluster.levels[0].bandwidth == pytest.approx(share * system.link)
        assert cluster.levels[1].bandwidth == 0.5 * system.network
        narrow = run.precision in ("FP8", "MXFP8", "NVFP4")
        assert cost.job.layer_dtype == (LAYERS if narrow else None)
        times = {"NVFP4": 6 if run.system == "GB300" else 4, "FP8": 2, "MXFP8": 2}
        peak = cluster.flops["bfloat16"] * times.get(run.precision, 1)
        assert cluster.flops[LAYERS] == pytest.approx(peak)
        old = run.source in ("vtrain", "megatron-2021")
        assert cost.job.hidden_gradients is not old
        assert cluster.measured.get("all_reduce", 1.0) == (1 if old else 3)
        assert cost.job.eager_attention is old
        assert int(columns["dispatcher"]) == 0 or run.dispatcher == "flex"
        assert (int(columns["wire"]) > 0) is (run.source == "deepseek-v3")


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


def test_constants_are_fitted_on_few_rows_that_no_error_counts():
    from bench_planner import SOURCES, Constants, Validation, error_table, fitted_rows, read_runs

    runs = read_runs()
    chosen = fitted_rows(runs)
    for source in SOURCES:
        for single, share in ((True, 0.05), (False, 0.25)):
            rows = {i for i, r in enumerate(runs) if r.source == source and r.single == single}
            assert len(rows & chosen) <= share * len(rows)
    plans = [(run.job[:1] + run.job[2:], run.plan) for run in runs]
    assert not {plans[i] for i in chosen} & {plans[i] for i in range(len(runs)) if i not in chosen}
    # Twice the seconds of a fitted row, and the seconds of all others.
    wrong = [run.seconds * (2 if i in chosen else 1) for i, run in enumerate(runs)]
    made = error_table(Validation(runs, chosen, [], wrong))
    for row in made.rows:
        named = dict(zip(made.header, row, strict=True))
        assert named["error of unseen %"] == "0.0"
        assert named["error of fitted %"] in ("100.0", "-")
    assert dataclasses.astuple(Constants.of(Constants().vector())) == pytest.approx(
        dataclasses.astuple(Constants())
    )


def test_a_fit_finds_the_constants_of_runs():
    from bench_planner import Constants, fit, predict, read_runs

    truth = Constants(0.7, 0.4, 0.8, 0.5, 0.6, 4e-4)
    runs = [run for run in read_runs() if run.source == "vtrain"][::80]
    runs = [dataclasses.replace(run, seconds=predict(run, truth, closed=True)) for run in runs]
    found = fit(runs, rounds=15)
    errors = [math.log(predict(run, found, closed=True) / run.seconds) for run in runs]
    assert max(map(abs, errors)) < 0.05
    assert found.layer_seconds == pytest.approx(4e-4, rel=0.1)


def test_regret_is_of_the_chosen_plan():
    from bench_planner import Validation, read_runs, regrets

    runs = [run for run in read_runs() if run.source == "vtrain"]
    right = regrets(Validation(runs, set(), [], [run.seconds for run in runs]))
    assert len(right) == 148 and all(loss == 0 for _, _, loss in right)
    worst = regrets(Validation(runs, set(), [], [-run.seconds for run in runs]))
    assert all(loss > 0 for _, _, loss in worst)
    first = worst[0][0]
    same = [run.seconds for run in runs if run.job == first.job]
    assert worst[0][2] == pytest.approx(100 * (max(same) / min(same) - 1))
