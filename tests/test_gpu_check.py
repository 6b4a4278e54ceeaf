"""The parts of gpu-check that need no GPU: the benchmarks' code on the CPU, and the page."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_benchmarks_run_and_the_page_shows_them(gpu_check):
    command = [sys.executable, "benchmarks/gpu_kernels.py", "cpu", "--small"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(result.stdout.splitlines()[-1])
    names = ["name", "compute_capability", "num_sms", "memory_gib", "driver", "torch", "cuda"]
    device = dict.fromkeys([*names, "commit"], "?")
    steps = [{"name": "tests", "state": "failed", "seconds": 1.5}]
    names = {kernel["name"] for kernel in figures["kernels"]}
    assert {estimate.name for estimate in gpu_check.gpu_estimates.ESTIMATES} <= names
    # As that of the estimate's shape.
    gate = next(
        k for k in figures["kernels"] if (k["name"], k["dtype"]) == ("topk_gate", "bfloat16")
    )
    figures["kernels"].append({**gate, "shape": "T=16384 E=64 K=8", "microseconds": 27.0})
    page = gpu_check.page({"device": device, "steps": steps, "figures": figures})
    assert "| topk_gate | T=16384 E=64 K=8 | bfloat16 | 0.004 | 0.00 | 64 | 50 % | 20 % | " in page
    assert (
        page.count("| 27 |") == 1
        and page.count("|  |\n") == len(gpu_check.gpu_estimates.ESTIMATES) - 1
    )
    assert "| tests | failed | 2 |" in page
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


def test_page_says_when_there_was_no_peer(gpu_check):
    lines = gpu_check.layer_lines({"peer": "not measured: transformers is not installed"})
    assert "not measured: transformers is not installed" in lines[0]
    assert "not measured" in gpu_check.layer_lines({})[0]


def test_page_says_when_nothing_was_measured(gpu_check):
    assert "Not measured" in gpu_check.page(None)


def test_a_step_that_fails_or_hangs_is_recorded(gpu_check):
    python = sys.executable
    assert gpu_check.run("good", [python, "-c", "print(1)"], 60).state == "passed"
    failed = gpu_check.run("bad", [python, "-c", "raise SystemExit('why')"], 60)
    assert failed.state == "failed" and failed.tail == "why"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', '{}'])"
    hung = gpu_check.run("slow", [python, "-c", child.format("import time; time.sleep(60)")], 5)
    assert hung.state == "timed out after 5 s" and hung.seconds < 30


def test_no_step_outlives_the_total(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "TOTAL", 0)
    late = gpu_check.run("late", [sys.executable, "-c", "1"], 60)
    assert late.state == "not run: the 0 s of all steps are over"


def test_tests_go_on_behind_one_that_ends_its_process(gpu_check, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
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
    results = tmp_path / "results.jsonl"
    step = gpu_check.suite_step([str(tests)], results)
    assert step.state == "failed: 1 failed, 2 ended their process"
    outcomes = gpu_check.surviving_tests.ended(results)
    assert {test.partition("::")[2]: outcome for test, outcome in outcomes.items()} == {
        "test_first": "passed",
        "test_ends[0]": "passed",
        "test_ends[1]": "died",
        "test_breaks": "died",
        "test_wrong": "failed",
        "test_last": "passed",
    }
    assert "test_wrong: " in step.tail and "AssertionError" in step.tail


def test_a_missing_sanitizer_is_said(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_tool", lambda name: None)
    states = {step.state for step in gpu_check.sanitizer_steps()}
    assert states == {"not run: compute-sanitizer is not installed"}


def test_figures_are_found_below_other_output(gpu_check):
    assert gpu_check.figures_in('warning\n{"a": 1}\n{broken\nleaked semaphore') == {"a": 1}
    assert gpu_check.figures_in("") == {}
    assert gpu_check.said("no-such-program") == "unknown"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_refuses_a_machine_without_a_gpu(gpu_check, tmp_path, capsys):
    assert gpu_check.check(tmp_path / "gpu.json") == 1
    assert "expected a CUDA device, got none" in capsys.readouterr().err
