"""The parts of the all-reduce benchmark: slowed networks, counted bytes, equal results."""

import shutil
import subprocess

import pytest
from benchmark_parts import benchmarks_on_path  # noqa: F401

import moe_ext.compression

SHAPE = (64, 64)
DENSE_BYTES = 64 * 64 * 4


@pytest.fixture
def _allowed():
    import namespaces

    reason = namespaces.why_not()
    if reason:
        pytest.skip(reason)


def present():
    """Contenders that this build has."""
    from allreduce_peers import MAKERS

    ours = hasattr(moe_ext.compression, "CompressionState")
    return [name for name in MAKERS if ours or not name.startswith("ours")]


def namespaces_left():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return listed.stdout


def test_what_is_missing_is_named(monkeypatch):
    import namespaces

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda program: None)
        assert namespaces.why_not() == "ip (iproute2) is not installed"
    with monkeypatch.context() as patch:
        patch.setattr(namespaces.sys, "platform", "darwin")
        assert namespaces.why_not() == "network namespaces need Linux"

    def refuse(*words):
        raise RuntimeError("ip netns add: Operation not permitted\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda program: program)
        patch.setattr(namespaces, "command", refuse)
        assert namespaces.why_not() == (
            "network namespaces are not allowed here (ip netns add: Operation not permitted)"
        )


def test_the_benchmark_says_in_a_line_why_it_is_skipped(monkeypatch, capsys):
    import bench_allreduce as bench

    monkeypatch.setattr(bench.namespaces, "why_not", lambda: "ip (iproute2) is not installed")
    assert bench.tables() == []
    expected = "benchmark allreduce: skipped, since ip (iproute2) is not installed\n"
    assert capsys.readouterr().err == expected


def test_costs_are_medians_of_the_slowest_rank_and_of_sums():
    from bench_allreduce import Cost, cost_of

    turns = [[[1.0, 10.0, 5.0], [2.0, 20.0, 4.0]], [[9.0, 1.0, 9.0], [3.0, 1.0, 7.0]]]
    turns.append([[4.0, 5.0, 6.0], [3.0, 5.0, 6.0]])
    assert cost_of(turns) == Cost(wall=4.0, cpu=10.0, sent=6.0)


@pytest.mark.usefixtures("_allowed")
def test_two_ranks_on_a_slow_wire():
    import namespaces
    from allreduce_peers import DENSE, POWERSGD
    from bench_allreduce import SCRIPT

    names = present()
    with namespaces.network(2) as wires, namespaces.ranks_on(wires, SCRIPT) as ranks:
        assert wires.namespace(0) in namespaces_left()
        ranks.ask({"do": "prepare", "names": names, "shape": SHAPE})
        (errors, *others) = ranks.ask({"do": "error", "names": names})
        assert others == [errors]  # every rank has the same result
        assert errors[DENSE] < 1e-6
        assert errors[POWERSGD] < 1e-6  # its first steps are dense
        assert 1e-4 < errors["dense bf16"] < 1e-2
        assert 0.5 < errors["eager top-k"] < 1.0
        if "ours, int8" in names:
            assert 1e-3 < errors["ours, int8"] < 3e-2
            assert errors["ours, top-k"] == pytest.approx(errors["eager top-k"], rel=1e-3)
        found = ranks.ask({"do": "time", "names": names})
        for rank in found:
            wall, cpu, sent = rank[DENSE]
            assert DENSE_BYTES <= sent < 1.1 * DENSE_BYTES + 4000
            assert wall > 0
            assert cpu > 0
            assert rank["eager top-k"][2] < 0.5 * DENSE_BYTES
        # At 1 Mbit/s what is beyond the bucket of tokens takes a millisecond for 125 bytes.
        wires.limit(1e6)
        numel = 2 * namespaces.BURST_BYTES // 4 + 2500
        ranks.ask({"do": "prepare", "names": [DENSE], "shape": [numel]})
        slow = ranks.ask({"do": "time", "names": [DENSE]})
        assert min(rank[DENSE][0] for rank in slow) > 0.08
    assert wires.prefix not in namespaces_left()


@pytest.mark.usefixtures("_allowed")
def test_nothing_is_left_after_an_error(tmp_path):
    import namespaces

    script = tmp_path / "ends.py"
    script.write_text("raise SystemExit(3)")
    with (
        pytest.raises(RuntimeError, match="rank 0 ended with exit status 3"),
        namespaces.network(3) as wires,
        namespaces.ranks_on(wires, script) as ranks,
    ):
        assert len([line for line in namespaces_left().splitlines() if wires.prefix in line]) == 4
        ranks.ask({"do": "anything"})
    assert wires.prefix not in namespaces_left()
    with pytest.raises(RuntimeError, match="no-such-namespace"):
        namespaces.command("ip", "-n", "no-such-namespace", "link")


@pytest.mark.slow
@pytest.mark.usefixtures("_allowed")
def test_the_table(monkeypatch):
    import bench_allreduce as bench

    names = present()
    for name, value in (
        ("SHAPE", SHAPE),
        ("NUM_RANKS", (2,)),
        ("LINKS", {"1 Gbit/s": (1e9, 2), "unthrottled": (None, 2)}),
        ("FIRST_TURNS", 2),
        ("MAKERS", {name: bench.MAKERS[name] for name in names}),
    ):
        monkeypatch.setattr(bench, name, value)
    (table,) = bench.tables()
    assert len(table.rows) == 2 * len(names)
    assert all(len(row) == len(table.header) for row in table.rows)
    figures = table.figures()
    assert set(figures["2, 1 Gbit/s, dense fp32"]) >= {"ms", "CPU ms", "sent MB"}
    assert figures["2, unthrottled, dense fp32"]["dense fp32 / this"] == 1.0
