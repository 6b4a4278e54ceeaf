"""The parts of gpu-check that need no GPU: the benchmarks' code on the CPU, and the page."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import emulation
import pytest
import torch
from forked import Script

ROOT = Path(__file__).resolve().parent.parent


NAMES = ["name", "compute_capability", "num_sms", "memory_gib", "driver", "torch", "cuda"]
DEVICE = dict.fromkeys([*NAMES, "commit"], "?")


def imported(monkeypatch, folder, name):
    """A script of the repository, new for each test."""
    monkeypatch.syspath_prepend(ROOT / folder)
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_check(monkeypatch):
    return imported(monkeypatch, "tools", "gpu_check")


@pytest.fixture
def gpu_operators(monkeypatch):
    return imported(monkeypatch, "tools", "gpu_operators")


def test_benchmarks_run_and_the_page_shows_them(gpu_check, monkeypatch, capsys):
    kernels = imported(monkeypatch, "benchmarks", "gpu_kernels")
    assert kernels.measure(torch.device("cpu"), kernels.FAMILIES, small=True) == 0
    rows = gpu_check.rows_in(capsys.readouterr().out)
    found = [row["kernel"] for row in rows if "kernel" in row]
    steps = [
        {"name": "operators", "state": "failed", "seconds": 1.5},
        {"name": "tests of test_a", "state": "passed", "seconds": 3.0},
        {"name": "tests of test_b", "state": "failed: 1 failed", "seconds": 4.0},
    ]
    names = {kernel["name"] for kernel in found}
    assert {estimate.name for estimate in gpu_check.gpu_estimates.ESTIMATES} <= names
    # As that of the estimate's shape.
    gate = next(k for k in found if (k["name"], k["dtype"]) == ("topk_gate", "bfloat16"))
    timed = {**gate, "shape": "T=16384 E=64 K=8", "microseconds": 27.0}
    rows += [
        {"kernel": timed},
        {"section": "Ceilings", "name": "copy", "GB/s": 3012.4},
        {"section": "Ceilings", "name": "mm", "TF": 7.914, "why": "no clocks"},
    ]
    page = gpu_check.page({"device": DEVICE, "steps": steps, "rows": rows})
    assert "| name | GB/s | TF | why |" in page
    assert "| copy | 3012 |  |  |" in page and "| mm |  | 7.91 | no clocks |" in page
    assert "| topk_gate | T=16384 E=64 K=8 | bfloat16 | 0.004 | 0.00 | 64 | 50 % | 20 % | " in page
    estimates = page.partition("## Estimates")[2].partition("Of the other figures")[0]
    assert estimates.count("| 27 |") == 1
    assert estimates.count("| never run |\n") == len(gpu_check.gpu_estimates.ESTIMATES) - 1
    assert "| gpu-check | operators | 40 | 2 | failed |" in page
    assert "| gpu-check | tests of test_a |  | 3 | passed |" in page
    assert "| gpu-check | tests of test_b |  | 4 | failed: 1 failed |" in page
    assert "| gpu-check | build | 130 | never run |  |" in page
    for name in ("topk_gate", "permute_tokens backward", "MoELayer forward and backward"):
        assert f"| {name} | T=64 " in page
    for name in ("attention_block backward", "merge_attention"):
        assert f"| {name} | S=64 " in page
    for name in ("topk_compress_ checked", "quantize_blockwise sign"):
        assert f"| {name} | N=4096" in page
    if importlib.util.find_spec("transformers"):
        assert "## Layer (T=64 D=256 F=64 E=8 K=2, bfloat16" in page
        assert "| MoELayer ms | Hugging Face grouped_mm ms |" in page
        assert "forward and backward: not measured: no CUDA device" in page


def test_a_layer_without_a_peer_is_measured(gpu_check, monkeypatch):
    layer = imported(monkeypatch, "benchmarks", "gpu_layer")
    monkeypatch.setattr(layer.importlib.util, "find_spec", lambda name: None)
    kernels = imported(monkeypatch, "benchmarks", "gpu_kernels")
    shape = layer.LayerShape("layer", 64, 32, 8, 2)
    timer = kernels.Timer(torch.device("cpu"), 2)
    found = layer.measure(torch.device("cpu"), shape, 32, torch.bfloat16, timer)
    lines = gpu_check.layer_lines(found)
    assert "Peer: not measured: transformers is not installed." in lines[-1]
    assert "forward and backward: not measured: no CUDA device." in lines[-1]
    assert lines[4].count("|") == lines[2].count("|") == 8
    assert gpu_check.layer_lines({}) == ["Layer: not measured."]


def test_gradients_of_the_timed_layer_are_new(monkeypatch):
    kernels = imported(monkeypatch, "benchmarks", "gpu_kernels")
    runs, layers = [], []
    make = kernels.moe_ext.MoELayer
    monkeypatch.setattr(
        kernels.moe_ext, "MoELayer", lambda *a, **k: layers.append(make(*a, **k)) or layers[0]
    )
    suite = types.SimpleNamespace(device=torch.device("cpu"))
    suite.add = lambda name, label, dtype, run: runs.append(run)
    kernels.layer(suite, kernels.SMALL, torch.float32)
    for run in runs:
        run()
        once = [None if p.grad is None else p.grad.clone() for p in layers[0].parameters()]
        run()
        twice = [p.grad for p in layers[0].parameters()]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_page_says_when_nothing_was_measured(gpu_check):
    assert "Not measured" in gpu_check.page(None)
    assert (ROOT / "tools" / "gpu_notes.md").read_text() in gpu_check.page(None)
    page = gpu_check.page({"device": DEVICE, "steps": [], "rows": []})
    assert "Kernels: not measured." in page and "Layer: not measured." in page


def test_a_figure_that_fails_does_not_cost_the_next(monkeypatch, capsys):
    kernels = imported(monkeypatch, "benchmarks", "gpu_kernels")
    suite = kernels.Suite(torch.device("cpu"), repeats=1, copy_bytes=64)

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    suite.add("bad", "T=1", torch.float32, broken)
    suite.add("good", "T=1", torch.float32, lambda: None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["what"] == "bad T=1 torch.float32" and rows[1]["why"].endswith("memory access")
    assert rows[2]["kernel"]["name"] == "good" and suite.num_failed == 1


def test_every_figure_of_the_parts_is_shown(gpu_check, monkeypatch, capsys):
    cpu, rows = torch.device("cpu"), []
    for name in ("gpu_layer_parts", "gpu_attention"):
        module = imported(monkeypatch, "benchmarks", name)
        assert module.measure(cpu, list(module.FAMILIES), small=True) == 0
        rows += gpu_check.rows_in(capsys.readouterr().out)
        scripts = (*gpu_check.FIRST_FIGURES, *gpu_check.FIGURES)
        assert {family for script, family in scripts if script == name} == set(module.FAMILIES)
    tune = imported(monkeypatch, "benchmarks", "gpu_tune")
    assert {("gpu_tune", family) for family in tune.FAMILIES} == {*gpu_check.TUNED}
    sections = gpu_check.sections(rows)
    for expected in gpu_check.gpu_estimates.EXPECTED:
        assert any(
            expected.column in row and set(expected.labels) <= set(row)
            for row in sections[expected.section]
        ), expected
    # Every way to lose one: nothing is left out in silence.
    missing = {row["why not"] for row in rows if "why not" in row}
    assert missing <= {
        "transformers is not installed",
        "the package kernels is not installed",
        "this transformers has no sonicmoe",
    }
    expected = gpu_check.gpu_estimates.EXPECTED[0]
    measured = {"section": expected.section, **expected.labels, expected.column: 3025.0}
    assert "| GB/s | 2900 | 4300 | 3025 |" in "\n".join(
        gpu_check.gpu_estimates.other_table([{"kernel": {}}, measured])
    )


def test_a_profile_tells_kernels_from_host(monkeypatch):
    harness = imported(monkeypatch, "benchmarks", "gpu_harness")
    kinds = torch.autograd.DeviceType

    def event(key, count, host, device, kind=kinds.CPU, **more):
        times = {"self_cpu_time_total": host, "self_device_time_total": device}
        return types.SimpleNamespace(key=key, count=count, device_type=kind, **times, **more)

    found = harness.summary(
        [
            event("aten::mm", 2, 9.0, 80.0),
            event("cudaStreamSynchronize", 3, 200.0, 0.0),
            event("merge_attention_kernel", 1, 0.0, 30.0, kinds.CUDA),
            event("Memcpy DtoD", 2, 0.0, 4.0, kinds.CUDA),
            event("step", 1, 0.0, 99.0, kinds.CUDA, is_user_annotation=True),
        ]
    )
    assert [name for name, *_ in found.operators] == ["cudaStreamSynchronize", "aten::mm"]
    assert (found.launches, found.waits, found.microseconds()) == (3, 3, 34.0)
    assert found.microseconds("memcpy") == 4.0 and found.microseconds("merge", "copy") == 30.0


def test_clocks_are_read_beside_each_figure(monkeypatch, capsys):
    harness = imported(monkeypatch, "benchmarks", "gpu_harness")
    lines = ("980, 2619, 100.0, 41, 0x0", "1980, 2619, 650.5, 41, 0x0", "1200, 2619, 90.0, 41, 0x0")
    said = f"import time; print(*{lines}, sep=chr(10), flush=True); time.sleep(60)"
    meter = harness.Meter((sys.executable, "-c", said))
    while len(meter.readings) < 3:
        time.sleep(0.01)
    assert meter.since(0.0)["W"] == "650.5" and meter.since(0.0)["SM MHz"] == "1980"
    # Nothing since: the last one.
    assert meter.since(time.monotonic() + 1)["W"] == "90.0"
    meter.process.kill()
    assert "no-such-program" in harness.Meter(("no-such-program",)).since(0.0)["clocks"]
    other = harness.Meter(("echo", "no devices"))
    other.process.wait()
    time.sleep(0.1)
    assert other.since(0.0) == {"clocks": "unknown: no devices"}

    section, cpu = harness.Section("A"), torch.device("cpu")
    section.add({"n": 1}, lambda: {}["lost"])
    card = harness.Card(cpu, harness.Timer(cpu, 2), 2**16)
    card.copy, card.meter = 2000.0, meter
    monkeypatch.setattr(harness.Section, "card", card)
    section.add({"n": 2}, lambda: {"us": 3.0, "GB/s": 1.5})
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["why not"] == "failed: KeyError: 'lost'" and harness.Section.num_failed == 1
    assert rows[2] == {
        **{"section": "A", "n": 2, "us": 3.0, "GB/s": 1.5, "copy GB/s": 2.0},
        **{"share of copy": 0.75, **meter.since(time.monotonic() + 1)},
    }


def test_every_registered_operator_is_called_alone(gpu_operators):
    names = gpu_operators.everything()
    assert names[0] == "grouped_mm" and not {*gpu_operators.WHOLE} & {*names}
    compression = {"topk_compress_", "quantize_blockwise", "_encode_payload"}
    assert compression < set(names[-16:])


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
def test_every_operator_but_those_of_the_cpu_has_a_cuda_kernel(gpu_operators):
    assert set(gpu_operators.registered()) == set(emulation.operators())
    every = {s.name.removeprefix("moe_ext::") for s in torch._C._jit_get_all_schemas()}
    assert every >= gpu_operators.CPU_ONLY


def test_wrong_results_are_told(gpu_operators):
    x, i = torch.ones(4), torch.arange(200)
    same = gpu_operators.difference
    assert same([x, i], [x.clone(), i.clone()], 0.0) == ""
    assert "off by 2" in same([x - 1], [x], 0.5)
    assert "off by nan" in same([x * torch.nan], [x], 0.5)
    # One code of two hundred may lie between two; three may not.
    assert same([(i - 7).relu() + 7], [i], 0.0).endswith("4 % of 200 integers differ")
    assert same([torch.where(i == 9, 8, i)], [i], 0.0) == ""
    assert "not torch.float32 (4,)" in same([x[:2]], [x], 0.0)


def faulty_process(names, device, connection):
    """In place of `_child`: operators that end in each way there is."""
    for name in names:
        connection.send("bfloat16")
        if name == "dies":
            os._exit(7)
        if name == "hangs":
            time.sleep(60)
        failed = name in ("fails", "breaks")
        connection.send((name, "failed", "why") if failed else (name, "passed", ""))
        if name == "breaks":
            break
    os._exit(0)


def test_no_operator_takes_others_with_it(gpu_operators, monkeypatch):
    monkeypatch.setattr(gpu_operators, "_child", faulty_process)
    monkeypatch.setattr(gpu_operators, "SECONDS", 1)
    monkeypatch.setattr(gpu_operators, "START_SECONDS", 9)
    names = ["dies", "good", "breaks", "hangs", "fails", "better"]
    assert list(gpu_operators.run(names, "cpu", "fork")) == [
        ("dies", "died", "exit code 7, in bfloat16"),
        ("good", "passed", ""),
        ("breaks", "failed", "why"),
        ("hangs", "hung", "no end within 1 s, in bfloat16"),
        ("fails", "failed", "why"),
        ("better", "passed", ""),
    ]


def test_a_process_that_ends_at_once_is_not_started_for_ever(gpu_operators, monkeypatch):
    monkeypatch.setattr(gpu_operators, "_child", lambda *_: os._exit(0))
    found = list(gpu_operators.run(["a", "b"], "cpu", "fork"))
    assert [state for _, state, _ in found] == ["died", "died"]


def test_an_operator_without_a_call_is_told(gpu_operators, monkeypatch, tmp_path):
    results = tmp_path / "operators.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "cpu", str(results), "topk_gate", "new"])
    monkeypatch.setattr(
        gpu_operators,
        "run",
        lambda names, device, _: [
            (name, *gpu_operators.check_here(name, device)) for name in names
        ],
    )
    assert gpu_operators.main() == 1
    states = {r["operator"]: r for r in map(json.loads, results.read_text().splitlines())}
    assert states["topk_gate"]["state"] == "passed"
    assert states["new"]["why"].startswith("no call: add one")


def test_the_first_faulty_kernel_is_named(gpu_check, monkeypatch, tmp_path):
    lines = [
        {"operator": "wrong", "state": "failed", "why": "result 0"},
        {"operator": "topk_gate", "state": "died", "why": "exit code 1, in bfloat16"},
        {"operator": "good", "state": "passed", "why": ""},
    ]
    report = (
        "========= COMPUTE-SANITIZER\n"
        "========= Invalid __global__ write of size 4 bytes\n"
        "=========     at void moe_ext::gate_kernel<(int)8>(const float *)+0x90\n"
    )

    def run(name, command, limit, env=None):
        if name == "operators":
            assert command[3] == str(tmp_path / "operators.jsonl")
            (tmp_path / "operators.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
            return gpu_check.Step(name, "failed", 3.0)
        assert command[0] == "sanitizer" and command[-2:] == ["--here", "topk_gate"]
        return gpu_check.Step(name, "failed", 3.0, "", report)

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "find_tool", lambda name: "sanitizer")
    step = gpu_check.operator_step("operators", tmp_path / "operators.jsonl")
    assert step.state == (
        "failed: first topk_gate (exit code 1, in bfloat16), kernel moe_ext::gate_kernel: "
        "Invalid __global__ write of size 4 bytes"
    )
    assert "wrong: failed: result 0" in step.tail and "'passed': 1" in step.tail
    monkeypatch.setattr(gpu_check, "find_tool", lambda name: None)
    assert gpu_check.operator_step("operators", tmp_path / "operators.jsonl").state.endswith(
        "in bfloat16)"
    )


def test_a_step_that_fails_or_hangs_is_recorded(gpu_check):
    python = sys.executable
    assert gpu_check.run("good", [python, "-c", "print(1)"], 60).state == "passed"
    failed = gpu_check.run("bad", [python, "-c", "raise SystemExit('why')"], 60)
    assert failed.state == "failed" and failed.tail == "why"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', '{}'])"
    hung = gpu_check.run("slow", [python, "-c", child.format("import time; time.sleep(60)")], 5)
    assert hung.state == "time over after 5 s (its own)" and hung.seconds < 30


def test_no_step_outlives_the_total(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "TOTAL", 0)
    late = gpu_check.run("late", [sys.executable, "-c", "1"], 60)
    assert late.state == "time over: not reached"
    # Without a build nothing is checked.
    monkeypatch.setattr(gpu_check, "find_tool", str)
    assert gpu_check.build_step("9.0").state == "failed: time over: not reached"


def test_tests_go_on_behind_one_that_ends_its_process(gpu_check, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(gpu_check, "CHOSEN", ())
    sound = tmp_path / "test_sound.py"
    sound.write_text("def test_it(): pass")
    tests = tmp_path / "test_faulty.py"
    tests.write_text("""
import os, sys, pytest
from types import SimpleNamespace
def test_first(): pass
@pytest.mark.parametrize("case", [0, 1, 2])
def test_ends(case): os._exit(1) if case == 1 else None
def test_breaks():
    # Every later call of the process fails.
    def lost(): raise RuntimeError("CUDA error: an illegal memory access")
    cuda = SimpleNamespace(is_available=lambda: True, synchronize=lost)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    lost()
def test_wrong(): assert 1 == 2
def test_last(): pass
""")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(gpu_check, "SUITE", (str(tmp_path),))
    monkeypatch.setattr(gpu_check, "RISKIEST", ("faulty",))
    steps = {step.name: step for step in gpu_check.suite_steps(tmp_path / "results")}
    assert steps["tests of the others"].state == "passed"
    step = steps["tests of faulty"]
    assert step.state == "failed: 1 failed, 2 ended their process"
    outcomes = gpu_check.surviving_tests.ended(tmp_path / "results" / "faulty.jsonl")
    assert {test.partition("::")[2]: outcome for test, outcome in outcomes.items()} == {
        "test_first": "passed",
        "test_ends[0]": "passed",
        "test_ends[1]": "died",
        "test_breaks": "died",
        "test_wrong": "failed",
        "test_last": "passed",
    }
    assert "test_wrong: " in step.tail and "AssertionError" in step.tail


def test_tests_that_the_time_does_not_reach_are_no_failure(gpu_check, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(gpu_check, "CHOSEN", ())
    tests = tmp_path / "test_slow.py"
    tests.write_text(
        "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\ndef test_c(): pass"
    )
    deadline = gpu_check.CLOCK.now() + 12
    step = gpu_check.tests_step("slow", [tests], tmp_path / "slow.jsonl", deadline)
    assert step.state.startswith("time over after ") and step.state.endswith(": 1 of 3 tests ran")


@pytest.fixture
def pretended(gpu_check, monkeypatch, tmp_path):
    """Runs the plan by pretended times, and returns (exit code, result)."""

    def go(**times):
        # Operators on the emulated device: a test of its own.
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=0))
        monkeypatch.setattr(gpu_check, "CLOCK", gpu_check.Clock())
        monkeypatch.setattr(gpu_check, "PRETENDED", {**gpu_check.PRETENDED, **times})
        code = gpu_check.check_pretended(tmp_path / "gpu.json")
        return code, json.loads((tmp_path / "gpu.json").read_text())

    return go


ORDER = (
    *("build", "operators", "layer", "expert parallel, one rank", "gpu_kernels layer"),
    *("gpu_layer_parts layer products", "compute-sanitizer memcheck", "tests of"),
    *("gpu_attention chosen errors rates ring", "gpu_layer_parts ceilings memory peers"),
    "gpu_kernels attention permutation activation router gating compression",
    *("compute-sanitizer racecheck", "compute-sanitizer synccheck"),
)


def test_the_plan_goes_from_the_most_telling_to_the_least(gpu_check, pretended):
    code, result = pretended()
    names = [re.sub("^tests of .*", "tests of", step["name"]) for step in result["steps"]]
    assert tuple(dict.fromkeys(names)) == ORDER and code == 0
    assert names.count("tests of") == 1 + len(gpu_check.RISKIEST) == 6
    # All but the last two is reached in time, and what is not is said.
    assert set(result["not_reached"]) <= set(ORDER[-2:])
    assert gpu_check.CLOCK.now() <= gpu_check.TOTAL + 5
    page = gpu_check.page(result)
    assert len(re.findall(r"\| gpu-check \| tests of .* \| 13 \| \d+ \| passed \|", page)) == 6
    for script, family in (*gpu_check.FIRST_FIGURES, *gpu_check.FIGURES):
        assert f"## {script} {family}\n\n| us | SM MHz | W |" in page


def test_a_slow_machine_fails_nothing(gpu_check, pretended):
    code, result = pretended(operators=60, gpu_layer_parts=40, tests=60)
    states = {step["name"]: step["state"] for step in result["steps"]}
    assert code == 0 and states["operators"] == "passed"
    over = [name for name, state in states.items() if state.startswith("time over")]
    assert result["not_reached"] == over and set(ORDER[-2:]) <= set(over)
    code, result = pretended(build=600)
    assert code == 1 and [step["name"] for step in result["steps"]] == ["build"]


def test_a_fault_of_one_step_costs_no_other(gpu_check, pretended, monkeypatch):
    figures = gpu_check.figure_steps

    def faulty(wanted):
        for found in figures(wanted):
            if "ring" in found[0].name:
                raise ValueError("a fault of this program")
            yield found

    monkeypatch.setattr(gpu_check, "figure_steps", faulty)
    code, result = pretended()
    states = {step["name"]: step["state"] for step in result["steps"]}
    assert states["figures"] == "failed: ValueError: a fault of this program" and code == 1
    assert states["compute-sanitizer racecheck"] == "passed"
    assert "output" not in result["steps"][0] and result["rows"]


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
def test_pretends_from_the_command_line(tmp_path):
    """With each operator on the emulated device, whose kernels are sound."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "tools/gpu_check.py", "--pretend", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (step,) = (s for s in json.loads(out.read_text())["steps"] if s["name"] == "operators")
    assert step["state"] == "passed" and step["tail"].startswith("{'passed': ")


def test_alternatives_are_timed_and_the_winners_told(gpu_check, monkeypatch, capsys, tmp_path):
    tune = imported(monkeypatch, "benchmarks", "gpu_tune")
    assert tune.measure(torch.device("cpu"), list(tune.FAMILIES), small=True) == 0
    rows = gpu_check.rows_in(capsys.readouterr().out)
    won = gpu_check.winners(rows)
    contests = [tuple(row.get(name) for name in ("T", "D", "dtype", "routing")) for row in won]
    assert len(set(contests)) == len(won) == 5 + 6 + 1 and {"next", "times"} <= won[0].keys()
    choices = {row["choice"] for row in rows if "routing" in row}
    assert choices == set(tune.grouped_providers.CHOICES)
    # A choice that was slower, and one that was not timed, win nothing.
    first = next(row for row in rows if "choice" in row and "us" in row)
    slower, lost = {**first, "choice": "slow", "us": 1e9}, {**first, "choice": "lost"}
    del lost["us"]
    assert gpu_check.winners([slower, lost, first])[0]["won"] == first["choice"]
    assert gpu_check.winners([slower, first])[0]["times"] == pytest.approx(1e9 / first["us"])

    command = [sys.executable, "tools/gpu_check.py", "--tune", "--out", str(tmp_path / "gpu.json")]
    subprocess.run([*command, "--pretend"], cwd=ROOT, check=True, capture_output=True)
    report = tmp_path / "gpu.md"
    subprocess.run([*command, "--report", str(report)], cwd=ROOT, check=True)
    assert "| gpu_tune products | fast | 2 | slow | 1.5 |" in report.read_text()
    assert "Not run: `make gpu-tune`" in gpu_check.page(None)
    # No step of it is cut short by its own limit.
    steps = gpu_check.expected_steps(gpu_check.tune_plan)
    assert {step.state for step in steps} == {"passed"} and sum(s.seconds for s in steps) == 310


def test_the_page_is_of_the_plan_at_hand(gpu_check):
    assert (ROOT / "docs" / "gpu.md").read_text() == gpu_check.page(None)


def test_figures_go_on_behind_a_family_that_ends_its_process(gpu_check, monkeypatch):
    calls = []

    def run(name, command, limit, env=None):
        families = command[3:]
        calls.append(families)
        ran = families[: families.index("b") + 1] if "b" in families else families
        rows = [{"family": f} for f in ran] + [{"section": f, "n": 1} for f in ran if f != "b"]
        state = "failed" if "b" in families else "passed"
        return gpu_check.Step(name, state, 1.0, output="\n".join(map(json.dumps, rows)))

    monkeypatch.setattr(gpu_check, "run", run)
    found = list(gpu_check.figure_steps([("x", name) for name in "abcd"] + [("y", "e")]))
    assert calls == [["a", "b", "c", "d"], ["c", "d"], ["e"]]
    assert [row["section"] for _, rows in found for row in rows] == ["a", "c", "d", "e"]


@pytest.mark.skipif(not emulation.is_built(), reason="no emulation of CUDA")
def test_each_sanitized_test_has_a_case(gpu_check, tmp_path):
    """On the emulated device, in the place of the real one."""
    selected = [*gpu_check.SANITIZED_TESTS, "-k", f"simt and ({gpu_check.SMALL})"]
    _, *command = [*gpu_check.PYTEST, "--collect-only", *selected]
    Script(command, os.environ.copy(), tmp_path / "cases", ROOT).wait(120)
    found = (tmp_path / "cases").read_text()
    cases = {line.partition("[")[0] for line in found.splitlines() if "::" in line}
    assert cases == set(gpu_check.SANITIZED_TESTS)


def test_a_missing_sanitizer_is_said(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_tool", lambda name: None)
    assert gpu_check.sanitizer_step("memcheck").state == gpu_check.NO_SANITIZER


def test_figures_are_found_in_other_output(gpu_check):
    output = 'warning\n{"a": 1}\n{broken\n{"b": 2}\nleaked semaphore'
    assert gpu_check.rows_in(output) == [{"a": 1}, {"b": 2}]
    assert gpu_check.rows_in("") == []
    (step, rows), *_ = gpu_check.figure_steps([("no_such_script", "layer")])
    assert step.state == "failed" and rows == []
    assert gpu_check.said("no-such-program") == "unknown"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_refuses_a_machine_without_a_gpu(gpu_check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path / "gpu.json")])
    assert gpu_check.main() == 1
    assert "expected a CUDA device, got none" in capsys.readouterr().err


FAKE_TOOLS = """
import json, pathlib, sys
log = pathlib.Path(sys.argv[0]).with_name("calls")
with log.open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + chr(10))
if "--build" in sys.argv:
    folder = pathlib.Path(sys.argv[2]) / "csrc"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("_C", "_C_cuda", "_runtime"):
        (folder / f"{name}.so").touch()
"""


def test_builds_what_an_install_builds(gpu_check, monkeypatch, tmp_path):
    """The same options and libraries, by a CMake that notes its arguments."""
    (tmp_path / "fake").write_text(f"#!{sys.executable}\n{FAKE_TOOLS}")
    (tmp_path / "fake").chmod(0o755)
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "moe_ext", tree / "moe_ext", ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree)
    monkeypatch.setattr(gpu_check, "ROOT", tree)
    monkeypatch.setattr(gpu_check, "find_tool", lambda name: str(tmp_path / "fake"))
    monkeypatch.setenv("MOE_EXT_WERROR", "1")  # as make does
    wanted = {"MOE_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0", "CUDACXX": "fake"}
    commands = []

    def run(name, command, limit, env):
        commands.append((command[-1], env))
        return gpu_check.Step(name, "passed", 1.0)

    monkeypatch.setattr(gpu_check, "run", run)
    gpu_check.build_step("9.0")
    commands.append(("import setup; sys.argv[1:] = ['build_ext', '--inplace']; setup.main()", {}))
    monkeypatch.delenv("MOE_EXT_WERROR")
    found = []
    for command, given in commands:
        given = {name: given[name] for name in given.keys() & {"MOE_EXT_WERROR"}}
        fake = f"import sys, setup; setup.find_tool = lambda name: {str(tmp_path / 'fake')!r}; "
        subprocess.run(
            [sys.executable, "-c", fake + command],
            cwd=tree,
            env={**os.environ, **wanted, **given},
            check=True,
            capture_output=True,
        )
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        libraries = sorted(file.name for file in (tree / "moe_ext").glob("*.so"))
        found.append((calls[0], libraries))
        (tmp_path / "calls").unlink()
        for name in libraries:
            (tree / "moe_ext" / name).unlink()
    assert found[0] == found[1]
    expected = {"RUNTIME=ON", "WERROR=OFF", "CUDA_ARCHS=9.0"}
    assert {f"-DMOE_EXT_{option}" for option in expected} < set(found[0][0])
    assert len(found[0][1]) == 3
    # Every option of the build is given, and by setup.py alone.
    text = (ROOT / "CMakeLists.txt").read_text()
    names = re.findall(r"^(?:option|set)\((MOE_EXT_\w+).*?(?:CACHE|OFF\))", text, re.MULTILINE)
    assert set(names) <= {option[2:].partition("=")[0] for option in found[0][0]}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    scripts = [ROOT / name for name in tracked.split() if not name.endswith((".md", ".txt"))]
    builders = [s for s in scripts if s.is_file() and '"--build", ' in s.read_text(errors="ignore")]
    assert {s.relative_to(ROOT) for s in builders} - {Path("tests/mutants.py")} == {
        *(Path("setup.py"), Path("tests/test_gpu_check.py"))
    }
