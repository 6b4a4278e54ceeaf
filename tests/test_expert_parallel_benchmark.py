"""The benchmark of experts over two nodes: equal results, and fewer bytes between the nodes."""

import pytest
from benchmark_parts import benchmarks_on_path, fork_ranks  # noqa: F401

SIZES = {"num_tokens": 32, "model_dim": 512, "ffn_dim": 16, "num_experts": 64, "top_k": 8}


def test_two_nodes(monkeypatch, tmp_path):
    import bench_expert_parallel as bench
    import namespaces

    reason = namespaces.why_not()
    if reason:
        pytest.skip(reason)
    fork_ranks(monkeypatch)
    monkeypatch.setattr(bench, "LINKS", {"unthrottled": (None, 2)})
    monkeypatch.setattr(bench, "SHAPES", (SIZES,))
    monkeypatch.setattr(bench, "NODE_SIZES", (2,))
    monkeypatch.setattr(bench, "HOST_SIZES", (2,))
    monkeypatch.setattr(bench, "HOST_TURNS", 2)
    monkeypatch.setattr(bench, "LOADED", SIZES)
    monkeypatch.setattr(bench, "LOADED_TURNS", 2)
    # Loads are even in the first table.
    monkeypatch.setattr(bench, "LOADS", ("W5_zero_expert_rank",))
    monkeypatch.setattr(bench, "CHART", tmp_path / "loads.png")
    table, on_host, loaded = bench.tables()
    assert [row[2] for row in on_host.rows] == 2 * [*bench.peers.installed(), *bench.ON_ONE_HOST]
    assert bench.CHART.stat().st_size > 0
    assert {row[0] for row in loaded.rows} == set(bench.LOADS)
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    found = {row["contender"]: row for row in rows}
    peers = bench.peers.installed()
    assert list(found) == [*peers, *bench.EXACT, *bench.REDUCED, *bench.AUTO, *bench.CODED]
    exact = (*bench.EXACT, "auto, exact")
    assert all(found[name]["difference"] == "0" for name in exact)
    # Of the largest output; rounding is off by 4 % of the norm.
    difference = {name: float(row["difference"]) for name, row in found.items()}
    assert all(d < (0.1 if n in bench.CODED else 1e-5) for n, d in difference.items())
    assert difference["alltoall, exact, lossless"] == 0
    assert all(difference[n] > 1e-5 for n in bench.CODED if "lossless" not in n)
    assert all((row["chosen"] != "") == name.startswith("auto") for name, row in found.items())
    sent = {name: float(row["sent MB"]) for name, row in found.items()}
    # Of 4 rows a token that go to the other node, 1.8 with a row for each rank, 1 for each node.
    assert sent["dedup, reduced"] < 0.6 * sent["alltoall"]
    # Two of the four exchanges in 0.26 of the bytes.
    assert sent["alltoall, exact, int8"] < 0.67 * sent["alltoall"]
    assert sent["hierarchical, reduced"] < 0.35 * sent["alltoall"]
    assert sent["hierarchical, reduced, int8"] < 0.67 * sent["hierarchical, reduced"]
