"""The benchmark of experts over two nodes: equal results, and fewer bytes between the nodes."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")
SIZES = {"num_tokens": 32, "model_dim": 512, "ffn_dim": 16, "num_experts": 64, "top_k": 8}


@pytest.fixture(autouse=True)
def benchmarks_on_path():
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


def test_two_nodes(monkeypatch):
    import bench_expert_parallel as bench
    import namespaces

    reason = namespaces.why_not()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(bench, "LINKS", {"unthrottled": (None, 2)})
    monkeypatch.setattr(bench, "SHAPES", (SIZES,))
    monkeypatch.setattr(bench, "NODE_SIZES", (2,))
    (table,) = bench.tables()
    found = {row[3]: row for row in table.rows}
    assert list(found) == list(bench.NAMES)
    assert all(found[name][-2] == "0" for name in found if name.endswith("exact"))
    rounded = [name for name in found if name.endswith(("int8", "mx"))]
    # Of the largest output; rounding is off by 4 % of the norm.
    assert all(float(row[-2]) < (0.1 if n in rounded else 1e-5) for n, row in found.items())
    assert all(float(found[name][-2]) > 1e-5 for name in rounded)
    assert all((row[-1] != "") == name.startswith("auto") for name, row in found.items())
    sent = {name: float(row[-3]) for name, row in found.items()}
    # Of 4 rows a token that go to the other node, 1.8 with a row for each rank, 1 for each node.
    assert sent["dedup, reduced"] < 0.6 * sent["alltoall"]
    # Two of the four exchanges in 0.26 of the bytes.
    assert sent["alltoall, exact, int8"] < 0.67 * sent["alltoall"]
    assert sent["hierarchical, reduced"] < 0.35 * sent["alltoall"]
