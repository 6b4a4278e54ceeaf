"""The benchmarks' own parts: what they count, and that their contenders compute the same."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from benchmark_parts import BENCHMARKS, benchmarks_on_path  # noqa: F401
from torch import nn

import moe_ext
from moe_ext.testing import spawn_ranks

pytest.importorskip("transformers")


def tiny_case(dtype, routing):
    from shapes import Case, LayerShape

    return Case(LayerShape("tiny", 32, 16, 8, 2), 64, dtype, routing)


def test_interleaved_runs_each_contender_and_keeps_slow_ones_to_the_least(monkeypatch):
    import _harness
    from _harness import interleaved

    calls, now = {"fast": 0, "slow": 0}, 0.0

    def run(name, duration):
        nonlocal now
        calls[name] += 1
        now += duration

    monkeypatch.setattr(_harness, "time", types.SimpleNamespace(perf_counter=lambda: now))

    interleaved(
        {"fast": lambda: run("fast", 0.001), "slow": lambda: run("slow", 0.02)},
        seconds=0.02,
        warmup=1,
        least=3,
    )
    assert calls["slow"] == 4  # one to warm up
    assert calls["fast"] > 2 * calls["slow"]


def test_figures_are_compared_by_row_and_column():
    from _harness import Table, compare

    header = ("shape", "T", "ms", "eager / ours", "eager ms")
    rows = [("A", "64", "2.0", "3", "-"), ("B", "64", "1.0", "5", "5.0")]
    figures = Table("Layer", "", header, rows).figures()
    assert figures == {
        "A, 64": {"ms": 2.0, "eager / ours": 3.0},
        "B, 64": {"ms": 1.0, "eager / ours": 5.0, "eager ms": 5.0},
    }
    last = {"A, 64": {"ms": 8.0}, "C, 64": {"ms": 1.0}}
    assert compare("Layer", figures, last).splitlines() == [
        "Layer, new over last run (geometric mean 0.25):",
        "  A, 64: ms 0.25",
    ]
    assert compare("Layer", figures, {}) == "Layer: nothing to compare with"


def test_aims_stand_first_and_are_those_of_the_tables():
    import aims
    from _harness import Table
    from run import merged

    header = ("parts", "ms", "hidden")
    hidden = Table("Transfer behind experts", "", header, [("2", "9", "70 %"), ("6", "8", "79 %")])
    page = merged("# Benchmarks\n", [hidden])
    assert page.index("## Aims") < page.index("## Transfer")
    what = "exchanges of a layer that are hidden"
    line = next(line for line in page.splitlines() if what in line)
    assert "| 80 % | 79.0 % | no | " in line and "(#transfer-behind-experts)" in line
    met = Table(hidden.title, "", header, [("6", "8", "80 %")])
    page = merged(page, [met])
    assert page.count("## Aims") == 1 and "| 80 % | 80.0 % | yes |  |" in page
    # A table that lacks the column gives no line.
    bare = Table(hidden.title, "", ("parts", "ms"), [("6", "8")])
    assert not aims.table({bare.title: bare.markdown()}).rows
    assert "## Aims" not in merged(page, [bare])
    # Each aim is of a table that a benchmark writes.
    text = "".join(path.read_text() for path in Path(BENCHMARKS).glob("bench_*.py"))
    assert all(f'"{aim.table}"' in text for aim in aims.AIMS)


def test_auto_is_behind_the_best_codec_of_the_link_where_it_is_most():
    from aims import BEST, behind_best

    def rows(link, auto, *others):
        cells = {"ours, auto": auto, **dict(zip(BEST, others, strict=True))}
        return [{"link": link, "contender": n, "ms": f"{ms}"} for n, ms in cells.items()]

    found = behind_best("ms")(
        rows("slow", 10, 40, 20, 20, 9, 8) + rows("fast", 11, 10, 12, 12, 14, 16)
    )
    assert found == pytest.approx(25.0)


def test_looks_are_apart_from_the_steps_of_auto():
    from bench_auto_dispatch import HEADER, LOOKS, Turns, row
    from expert_parallel_rank import EXACT, REDUCED

    turns = max(LOOKS) + 2
    seconds = {name: [0.2] * turns for name in (*EXACT, *REDUCED)}
    seconds |= {"dedup, exact": [0.1] * turns, "auto, exact": [0.11] * turns}
    for number in LOOKS:
        seconds["auto, exact"][number - 2] = 0.33
    found = row(
        Turns(seconds, {"auto, exact": "alltoall"}, {"auto, exact": "dedup"}), "auto, exact"
    )
    cells = dict(zip(HEADER[2:], found, strict=True))
    assert cells["combine"] == "exact" and cells["best"] == "dedup"
    assert (cells["auto ms"], cells["best ms"], cells["over the best"]) == ("110", "100", "+10.0 %")
    assert (
        cells["error"] == "0.0 %" and cells["over alltoall"] == "-45 %" and cells["looks"] == "4.0"
    )


def test_each_processor_has_a_report_of_its_own(tmp_path):
    from run import report_of

    first = tmp_path / "benchmarks.md"
    assert report_of("Intel(R) Xeon(R) Processor", first) == first
    machine = ["CPU figures: Intel(R) Xeon(R) Processor (x86_64, AVX512), 2 threads"]
    first.with_suffix(".json").write_text(json.dumps({"machine": machine, "tables": {}}))
    assert report_of("Intel(R) Xeon(R) Processor", first) == first
    assert report_of("AMD EPYC", first) == tmp_path / "benchmarks" / "amd-epyc.md"


def test_fresh_memory_is_of_a_process_that_does_not_reuse_it(monkeypatch):
    import _harness

    monkeypatch.setattr(_harness, "keep_memory", lambda: moe_ext.reuse_memory())
    said = []
    _harness.interleaved_fresh({"": lambda: said.append(moe_ext.info()["memory"])}, seconds=0)
    assert all("fresh" in text for text in said) and "reused" in moe_ext.info()["memory"]
    moe_ext.reuse_memory(False)


def test_a_straight_line_is_found():
    from bench_growth import line_through

    sizes = (64, 256, 1024)
    assert line_through(sizes, [3.0 + 0.5 * n for n in sizes]) == pytest.approx((3.0, 0.5))


def test_routing_follows_the_popularity():
    from layer_peers import chosen
    from shapes import EVEN, ONE, ZIPF, tokens

    counts = {}
    for routing in (EVEN, ZIPF, ONE):
        case = tiny_case(torch.bfloat16, routing)
        counts[routing.name] = chosen(case, tokens(case)).flatten().bincount(minlength=8).tolist()
    assert min(counts["even"]) > 4
    assert counts["Zipf 1.2"][0] > 3 * counts["Zipf 1.2"][-1]
    assert counts["all to one"] == [64, 64, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ["EVEN", "ZIPF", "ONE"])
def test_contenders_compute_the_same(dtype, routing):
    import shapes
    from bench_moe_layer import TOLERANCE, largest_difference
    from layer_peers import contenders, make
    from shapes import tokens

    case = tiny_case(dtype, getattr(shapes, routing))
    # Without the layers that want a process group, which other tests make for themselves.
    names = [name for name in contenders(case) if name in ("ours", "grouped_mm", "eager")]
    layers = make(case, names)
    x = tokens(case)
    assert largest_difference(case, layers, x) < TOLERANCE[dtype]
    with torch.no_grad():
        layers["ours"].experts.down_proj.mul_(1.2)
    with pytest.raises(RuntimeError, match="expected the output of ours to be within"):
        largest_difference(case, layers, x)


def test_the_dense_gate_of_fairscale_routes_as_the_block():
    from layer_peers import DenseGate, hf_block
    from shapes import EVEN, tokens

    case = tiny_case(torch.float32, EVEN)
    block, x = hf_block(case), tokens(case)
    _, combine_TEC, mask_TEC = DenseGate(block.gate.weight.data, 2)(x[0])
    _, weights_TK, idx_TK = block.gate(x[0])
    expected_TE = torch.zeros(64, 8).scatter(1, idx_TK, weights_TK)
    torch.testing.assert_close(combine_TEC.sum(dim=2), expected_TE)
    assert mask_TEC.sum() == 128
    assert mask_TEC.sum(dim=0).max() == 1  # no two tokens in one place


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    from layer_memory import saved_bytes

    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            y = self.linear(x)
            return y * y

    x = torch.randn(4, 8)
    assert saved_bytes(Squares(), x) == 2 * x.nbytes  # x for the weight's gradient, y once


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_measured_in_a_process_of_its_own():
    from layer_memory import measure
    from shapes import EVEN, Case, LayerShape

    shape = LayerShape("small", 512, 256, 8, 2)
    found = measure(Case(shape, 64, torch.float32, EVEN), ["ours", "grouped_mm"])
    gradients = 3 * shape.num_experts * shape.ffn_dim * shape.model_dim * 4
    for memory in found.values():
        assert 0 < memory.saved_bytes < memory.peak_bytes
        assert gradients < memory.peak_bytes < 6 * gradients


def test_models_of_transformers_agree():
    from bench_huggingface import Case, batch_of, check_losses, contenders, experts_part, step
    from shapes import LayerShape

    for family in ("Mixtral", "Qwen3-MoE"):
        case = Case(family, LayerShape("tiny", 64, 16, 8, 2), 24, torch.float32)
        models, batch = contenders(case), batch_of(case)
        assert list(models) == ["ours", "eager", "grouped_mm", "batched_mm"]
        check_losses(case, models, batch)
        part, products = experts_part(case, models["ours"], batch)
        part()
        products()
        with torch.no_grad():
            models["eager"].lm_head.weight.zero_()
        with pytest.raises(RuntimeError, match="expected the loss of eager to be that of"):
            check_losses(case, models, batch)
        assert step(models["ours"], batch) > 0


def stand_in_row(rank, library):
    """A row of the table, in a process of its own: the originals keep process groups."""
    import bench_compat
    from shapes import LayerShape

    case = bench_compat.Case(library, LayerShape("tiny", 32, 16, 8, 2), 64, 2)
    return bench_compat.row(case, seconds=0.01), bench_compat.HEADER


@pytest.mark.parametrize("library", ["DeepSpeed", "fairscale"])
def test_stand_ins_compute_what_the_originals_compute(library):
    if importlib.util.find_spec(library.lower()) is None:
        pytest.skip(f"{library} is not installed")
    ((row, header),) = spawn_ranks(stand_in_row, 1, library)
    assert row[:4] == (library, "tiny", "64", "k=2")
    assert len(row) == len(header)


def test_contenders_of_selection_choose_the_same():
    import bench_compression as bench

    from moe_ext import ops

    for make in bench.INPUTS.values():
        grad, start = make(5000), torch.randn(5000) / 8
        eager, ours = start.clone(), start.clone()
        _, indices = bench.eager_topk(grad, eager, 50)
        out = ops.topk_compress_(grad, ours, 50)
        # Among equal magnitudes torch takes any.
        assert torch.equal(
            (start + grad)[indices].abs().sort().values, out.values.abs().sort().values
        )
    eager, ours = start.clone(), start.clone()
    values, indices = bench.eager_threshold(grad, eager, torch.tensor(1.0))
    out = ops.threshold_compress_(grad, ours, 1.0, 5000)
    assert torch.equal(indices, out.indices[: out.count]) and torch.equal(eager, ours)
    assert torch.equal(values, out.values[: out.count])


def test_loads_follow_from_their_name_the_seed_and_the_step():
    from expert_loads import routing, tokens_of

    from moe_ext.planner.expert_load import LOADS

    for load in LOADS:
        idx, weights = routing(load, 1234, 3, 128, 8, 2)
        again, others = (routing(load, seed, 3, 128, 8, 2)[0] for seed in (1234, 4321))
        assert torch.equal(idx, again)
        assert load == "W0_balanced" or not torch.equal(idx, others)
        assert bool((idx[:, 0] != idx[:, 1]).all())
        torch.testing.assert_close(weights.sum(1), torch.ones(128))
        assert sum(tokens_of(load, 60, rank, 4) for rank in range(4)) == 240
    counts = {load: torch.bincount(routing(load, 1, 3, 128, 8, 2)[0].view(-1)) for load in LOADS}
    assert counts["W0_balanced"].tolist() == [32] * 8
    # Three of four tokens have both choices among two experts, and the fourth any.
    assert (
        counts["W1_hot_expert_set"][:2].sum() > 192
        and counts["W6_rotating_hotspot"][2:4].sum() > 192
    )
    assert counts["W5_zero_expert_rank"][:4].sum() == 0
    assert counts["W3_spread_hot_experts"][::2].sum() > 192
    assert 128 < counts["W7_burst"][:2].sum() < 192


def test_loads_are_those_that_the_planner_expects():
    from expert_loads import routing

    from moe_ext.planner.expert_load import LOADS, load_of

    for load in LOADS:
        drawn = [routing(load, 7, step, 512, 8, 2)[0].flatten() for step in range(12)]
        counts = torch.stack([torch.bincount(idx, minlength=8) for idx in drawn])
        want = 128 * torch.tensor(load_of(load, num_experts=8, top_k=2))
        assert (want.sum(1) == 1024).all()
        # Six deviations of 512 draws.
        assert ((counts - want).abs() <= 6 * 512**0.5 / 2).all()


def test_peers_that_are_not_installed_are_left_out(monkeypatch, capsys):
    import expert_parallel_peers as peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name == "torch" or None)
    assert peers.installed() == ["torch"]
    assert "DeepSpeed is not installed" in capsys.readouterr().err


def test_codecs_are_rehearsed():
    from bench_codecs import REHEARSALS

    for name, rehearsal in REHEARSALS.items():
        num_bytes, payload_bytes, *calls = rehearsal(2**14)
        for call in calls:
            call()
        assert 0 < payload_bytes < num_bytes, name


def test_pipelines_take_the_time_that_is_simulated():
    from bench_pipeline import step_times

    for found in spawn_ranks(step_times, 4, 2.0, 2, ("1f1b", "zbv"), 0.01, 2):
        for measured, simulated, on_time in found.values():
            # No sleep ends early: less would be work left out. One action after the other takes 1.5
            # times as long; the rest is for a machine that runs other tests.
            assert measured > on_time
            assert measured < 2.5 * simulated


def test_ranks_of_recurrences_send_what_the_chart_draws():
    import bench_recurrent_ranks as bench

    case = bench.Case(64, 4, 8, 1)
    found = bench.measure(case, 2)
    assert set(found) == set(bench.CONTENDERS)
    for name, (seconds, sent) in found.items():
        assert seconds > 0 and sent == case.sent(2, name), name
    assert case.sent(2, "state", 8) == case.sent(2, "state", 80)
