"""The parts of the attention benchmark: what it counts, and that contenders compute the same."""

import sys
from dataclasses import replace

import pytest
import torch
from benchmark_parts import benchmarks_on_path  # noqa: F401

from moe_ext.testing import spawn_ranks

pytest.importorskip("matplotlib")
SIZES = {"seq_len": 64, "heads": 2, "dim": 8}
OFFSETS = (0, 5, 5, 40, 64)


def jobs_of(case, names):
    from attention_ranks import Job

    return {name: Job(name, case) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contenders_compute_the_same(dtype):
    from attention_peers import CONTENDERS, OTHER_LIBRARY, Case, present, whole_reference
    from attention_ranks import measure

    case = Case(**SIZES, dtype=dtype)
    documents = ("ours, per document", "ours, cost balanced")
    names = [name for name in present(tuple(CONTENDERS)) if name not in documents]
    if dtype == torch.bfloat16:
        names = [name for name in names if name != OTHER_LIBRARY]
    reference = whole_reference(case)
    found = measure(2, jobs_of(case, names), reference=reference)
    # A few roundings of float32; in bfloat16 some of PyTorch's blocks and of the wire's.
    allowed = 2e-6 if dtype == torch.float32 else 2e-2
    rough = 1e-2 if dtype == torch.float32 else 2e-2
    for name in names:
        forward = name.endswith("forward")
        assert len(found[name].errors) == (1 if forward else 4)
        assert max(found[name].errors) < (rough if "bf16" in name else allowed), name
    wrong = [1.1 * x for x in reference]
    found = measure(2, jobs_of(case, names[:1]), reference=wrong)
    assert min(found[names[0]].errors) > 0.08


def test_packed_documents_have_one_result_under_every_layout():
    from attention_peers import ONE_PROCESS, Case, whole_reference
    from attention_ranks import measure

    case = Case(**SIZES, cu_seqlens=OFFSETS)
    names = ["ours", "ours, contiguous", "ours, per document", "ours, cost balanced", ONE_PROCESS]
    found = measure(2, jobs_of(case, names), reference=whole_reference(case))
    assert all(max(found[name].errors) < 2e-6 for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bytes_and_memory_are_counted_and_time_is_summed():
    from attention_peers import ONE_PROCESS, TORCH_RING, Case, present
    from attention_ranks import PRODUCTS, floor_seconds, measure

    case = Case(seq_len=512, heads=4, dim=32)
    rings = present(["ours", TORCH_RING])
    found = measure(2, jobs_of(case, [*rings, ONE_PROCESS]), repeats=2)
    shard = 2 * 256 * 4 * 32 * 4
    # In float32: K and V forward and back, dK and dV home; the peer's go one hop more.
    for name, hops in zip(rings, (3, 4), strict=False):
        assert hops * shard <= found[name].sent < hops * shard + 5000
    assert found[ONE_PROCESS].sent < 1000
    assert all(found[name].peak > 0 for name in rings)
    for name in (*rings, ONE_PROCESS):
        assert 0 < found[name].cpu < 10
        assert 0 < found[name].wall < 10
    product = floor_seconds(found, torch.float32, 2, 10**9)
    assert product == pytest.approx(found[f"{PRODUCTS} float32"].cpu * 10**9 / (32 * 2 * 1024**3))


def test_tiles_are_counted():
    from attention_peers import Case
    from attention_ranks import needed_tiles, score_products

    for case in (Case(**SIZES), Case(**SIZES, cu_seqlens=OFFSETS)):
        pairs = [r * c for rank in spawn_ranks(score_products, 2, case, "zigzag") for r, c in rank]
        # Nothing that the mask leaves is left out, and what is computed is less than all.
        assert case.heads * case.area <= sum(pairs) < case.heads * 64 * 64
    one = Case(**SIZES)
    assert needed_tiles(one, 1, "contiguous", (64, 64)) == 1
    assert needed_tiles(one, 1, "contiguous", (16, 16)) == 10
    assert needed_tiles(one, 1, "contiguous", (1, 1)) == one.area
    packed = replace(one, cu_seqlens=(0, 16, 64))
    assert needed_tiles(packed, 1, "contiguous", (16, 16)) == 1 + 6
    # Stretches 0 and 3 of four on the first rank, 1 and 2 on the second.
    assert needed_tiles(one, 2, "zigzag", (16, 16)) == 10


def test_absent_contenders_are_named(monkeypatch):
    import attention_peers as peers

    names = (peers.OURS, peers.OTHER_LIBRARY, "ours, fast")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.present(names) == [peers.OURS, "ours, fast"]
    assert peers.absences(names) == " Absent: ring-attention-pytorch is not installed."


@pytest.mark.slow
def test_every_table_and_the_chart(monkeypatch, tmp_path):
    import attention_error
    import bench_attention as bench

    tiny = replace(bench.CASE, seq_len=128, heads=2, dim=8)
    for module, name, value in (
        (bench, "CASE", tiny),
        (bench, "RANKS", (2,)),
        (bench, "REPEATS", 1),
        (bench, "SHARD", replace(bench.SHARD, seq_len=32, heads=4, dim=8)),
        (bench, "SHARD_RANKS", (2,)),
        (bench, "PACKED_RANKS", 2),
        (bench, "BALANCE_RANKS", (2,)),
        (bench, "CHART", tmp_path / "attention.png"),
        (attention_error, "CASE", replace(tiny, dtype=torch.bfloat16)),
        (attention_error, "RANKS", (2,)),
    ):
        monkeypatch.setattr(module, name, value)
    tables = bench.tables()
    assert len({table.title for table in tables}) == len(tables) == 5
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows)
        assert table.title in table.markdown()
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_takes_the_place_of_the_last_one():
    from _harness import Table
    from run import merged

    first, second = (Table(t, f"About {t}.", ("what", "ms"), [("x", "1")]) for t in "AB")
    report = merged("# Benchmarks\n\nWritten by hand.\n", [first, second])
    again = merged(report, [Table("A", "Anew.", ("what", "ms"), [("x", "2")])])
    assert again == report.replace("About A.", "Anew.").replace("| x | 1 |", "| x | 2 |", 1)
    assert merged(report, [second]) == report
