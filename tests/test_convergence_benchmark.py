"""The parts of the convergence benchmark: what a run finds, and what the table says of it."""

import functools
import math

from benchmark_parts import BENCHMARKS, benchmarks_on_path  # noqa: F401


def with_little_text(rank, names, seed, steps):
    """The settings on the sources of the benchmarks, and the first of top-k again."""
    import bench_convergence as bench

    load = bench.load_text
    bench.load_text = functools.cache(lambda _, seq_len: load(str(BENCHMARKS), seq_len))
    again = bench.settings_here(rank, ("top 1 %",), seed, steps)
    return {**bench.settings_here(rank, names, seed, steps), "again": again["top 1 %"]}


def test_settings_train_and_send_what_they_say(monkeypatch):
    import bench_convergence as bench

    monkeypatch.setattr(bench, "settings_here", with_little_text)
    names = ("dense", "int8", "1-bit Adam", "top 1 %", "top 1 %, rest forgotten")
    names = (*names, "top 1 % of Adam's steps")
    found = bench.measure(names, seed=0, steps=4, ranks=2)
    assert tuple(found) == (*names, "again")
    assert all(math.isfinite(one.loss) and one.seconds > 0 for one in found.values())
    assert found["dense"].loss < math.log(256)
    sent = {name: one.sent_bytes for name, one in found.items()}
    assert sent["int8"] < 0.3 * sent["dense"]
    assert sent["1-bit Adam"] < 0.05 * sent["dense"]
    assert sent["top 1 %"] < 0.1 * sent["dense"]
    assert sent["top 1 %, rest forgotten"] == sent["top 1 %"]
    # Nothing differs but what is kept from step to step.
    assert found["top 1 %, rest forgotten"].loss != found["top 1 %"].loss
    # Four steps: a dense one, two that send an eighth and a twentieth, and one of 1 %.
    assert sent["top 1 %"] < sent["top 1 % of Adam's steps"] < 0.6 * sent["dense"]
    assert found["again"].loss == found["top 1 %"].loss


def test_the_table_says_what_is_met():
    from bench_convergence import SETTINGS, Found, table

    losses = {"dense": (1.0, 2.0), "int8": (1.01, 2.02), "int4": (1.01, 2.06), "bf16": (1.0, 2.0)}
    found = [{n: Found(of[seed], 1e6, 0.002) for n, of in losses.items()} for seed in range(2)]
    made = table(found)
    rows = {row[0]: dict(zip(made.header, row, strict=True)) for row in made.rows}
    assert rows["int8"]["above dense"] == "+1.0 %"
    assert rows["int8"]["target"] == "+1.5 %: met"
    assert rows["int8"]["range"] == "1.010 to 2.020"
    assert rows["int4"]["above dense"] == "+2.0 %"
    assert rows["int4"]["target"] == "+1.5 %: missed"
    assert rows["bf16"]["target"] == "-"
    figures = made.figures()["int8"]
    assert figures["step ms"] == 2.0 and figures["sent MB"] == 1.0
    assert {s.limit for s in SETTINGS.values()} == {None, 1.005, 1.015, 1.04, 1.07}
    assert sum(setting.control for setting in SETTINGS.values()) == 2
