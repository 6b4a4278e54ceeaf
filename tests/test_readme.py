"""The README's script and figures, and the first lines of three guides."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "examples"))

from example_jobs import Ranks  # noqa: E402 - lies in another folder


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / f"{page}.md").read_text(), re.DOTALL)


# Runs the script as it stands, and writes down the last batch of the rank: what two ranks print at
# once is mixed.
RUNNER = """
import os, pathlib, runpy
batch = runpy.run_path({script!r}, run_name="__main__")["tokens"][:, 0].tolist()
pathlib.Path({folder!r}, "batch" + os.environ["RANK"]).write_text(str(batch))
"""


@pytest.mark.slow
def test_training_script_runs_on_two_ranks(tmp_path):
    # With narrower experts, which learn as quickly.
    (tmp_path / "train.py").write_text(blocks("README")[0].replace("(512, 1792,", "(512, 128,"))
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER.format(script=str(tmp_path / "train.py"), folder=str(tmp_path)))
    output = Ranks([], 2, tmp_path, script=runner).finish(240)
    steps = re.findall(r"^(\d+) (\d+\.\d+) \[\d+", output, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(10))
    # From that of a blind guess to less than half of it.
    losses = [float(loss) for _, loss in steps]
    assert abs(losses[0] - math.log(256)) < 0.5 and losses[-1] < losses[0] / 2
    batches = [(tmp_path / f"batch{rank}").read_text() for rank in range(2)]
    assert batches[0] != batches[1]


def test_options_of_the_page_about_routers_run():
    names = {}
    exec(next(block for block in blocks("docs/routers") if "presets" in block), names)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 512, dtype=dtype)
        y = names["layer"].to(dtype)(x)
        assert y.shape == x.shape and y.dtype == dtype


def test_the_page_about_pipelines_prints_the_idle_share(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("docs/pipelines")[0], {})
    # 1F1B idles for three micro-batches of 3 units each, beside the work of eight.
    assert float(capsys.readouterr().out.split()[1]) == pytest.approx(3 * 3 / (8 * 3 + 3 * 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drop_in_snippet_runs(dtype, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        dtype=dtype,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    snippet = next(block for block in blocks("docs/hugging_face") if "moe_ext.replace" in block)
    ids = torch.randint(0, 32, (2, 8))
    names = {"path": str(tmp_path), "batch": {"input_ids": ids, "labels": ids}}
    exec(snippet, names)
    assert names["model"].config._experts_implementation == "moe_ext"
    assert names["model"].dtype == dtype


# A row of the README's comparison, and how the rows of the benchmarks begin that have its figures.
COMPARED = {
    "8 wide experts, top 2, float32": "| A (few wide experts) | 1024 | float32 | even |",
    "the same, bfloat16": " experts) | 1024 | bfloat16 | even |",
    "64 narrow experts, top 8, float32": "| B (many narrow experts) | 1024 | float32 | even |",
    "a model like Qwen3-MoE, relative speed": "| Qwen3-MoE |",
    "2 nodes × 2 ranks × 512 tokens, 1 Gbit/s, narrow experts": (
        "| 2 x 2 | T=512 D=512 F=192 E=64 K=8 | 1 Gbit/s |"
    ),
    "ring attention, float32, relative CPU time": "| float32 | ours |",
    "gradients of 25 MB, 1 Gbit/s": "| 2 | 1 Gbit/s |",
}


def assert_measured(figures, lines):
    """Each number of a text is one of these lines, as it rounds."""
    measured = {float(number) for line in lines for number in re.findall(r"\d+\.?\d*", line)}
    for figure in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", figures):
        digits = len(figure.partition(".")[2])
        assert any(float(figure) == round(value, digits) for value in measured), figure


def test_figures_are_those_of_the_benchmarks():
    section = (ROOT / "README.md").read_text().split("## How it compares")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*?) \| ([^|]*) \| ([^|]*) \|$", section, re.MULTILINE)[1:]
    assert {name for name, _, _ in rows} == set(COMPARED)
    lines = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    for name, ours, others in rows:
        assert_measured(f"{ours} {others}", [line for line in lines if COMPARED[name] in line])


def test_families_of_transformers_are_counted():
    page = (ROOT / "docs" / "hugging_face.md").read_text()
    lists = page.split("<!-- families -->")[1].split("**Refused**")[0]
    served = re.findall(r"\w+\*?(?=[,.]\s)", lists.replace("**Served, but", ""))
    assert f"for {len(served)} families of transformers" in (ROOT / "README.md").read_text()


# A figure that a page links to the benchmarks, and what the lines that hold it have in them.
QUOTED = {
    ("collectives", "1.49"): "| exact top-k 1 %, error feedback, checked |",
    ("collectives", "1.25"): "| carried threshold 1 %, error feedback, checked |",
    ("collectives", "0.65"): "| int8 blocks |",
    ("compression", "0.4 %"): "| int4 |",
    ("compression", "0.8 %"): "| 1-bit Adam |",
    ("compression", "10.2 %"): "| top 1 % |",
    ("dispatchers", "1.5 times"): "| lossless bf16 |",
    ("dispatchers", "1.2 times"): "| lossless fp32 |",
    ("local_steps", "0.4 to 1.2 %"): "SGD 1",
    ("pipelines", "1.00 to 1.02"): "| ",
    ("planner", "16 %"): "Mean error",
    ("weight_sync", "30 times"): "| 2.2 % |",
}


def test_figures_on_pages_are_those_of_the_benchmarks():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    sections = {
        re.sub(r"[^\w\- ]", "", section.split("\n")[0].lower()).replace(" ", "-"): section
        for section in text.split("\n## ")
    }
    found = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        links = re.findall(
            r"\[([\d. to]+(?:%|times)?)\]\(benchmarks\.md#([\w-]+)\)", path.read_text()
        )
        assert len(links) <= 3, path.name
        found.update({(path.stem, figure): anchor for figure, anchor in links})
    assert set(found) == set(QUOTED)
    for (page, figure), anchor in found.items():
        lines = [line for line in sections[anchor].splitlines() if QUOTED[page, figure] in line]
        assert_measured(figure, lines)
