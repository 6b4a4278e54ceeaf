"""The Python in docs/ runs as it stands, given the names that a reader would have."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_ext

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Those need other libraries, ranks or sequences: tests of their own look at them.
ELSEWHERE = {
    "attention.md",
    "checkpoints.md",
    "collectives.md",
    "compression.md",
    "dispatchers.md",
    "distributed.md",
    "fsdp.md",
    "in_your_stack.md",
    "long_models.md",
    "hugging_face.md",
    "migrate.md",
    "optimizers.md",
    "parallelism.md",
    "tour.md",
}


# Words of a guide before its first program; of the README and the answers to which it leads.
OPENING_WORDS, ANSWER_WORDS = 100, 3_000


def blocks(elsewhere=False):
    for page in sorted(DOCS.glob("*.md")):
        found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for index, code in enumerate(found):
            if (page.name in ELSEWHERE) == elsewhere:
                yield pytest.param(code, id=f"{page.stem}-{index}")


def names():
    """A model with every kind of layer that the pages speak of, and what goes with it."""
    router = moe_ext.nn.TopKRouter(8, 4, selection_bias=True)
    balance = moe_ext.nn.Balance("global_batch")
    model = nn.Sequential(
        nn.Linear(8, 8),
        moe_ext.MoELayer(8, 8, 4, router=router, balance=balance),
        moe_ext.MoELayer(8, 8, 4, router=moe_ext.nn.SwitchRouter(8, 4)),
    )
    return {
        "moe_ext": moe_ext,
        "torch": torch,
        "model": model,
        "rollout_model": model,
        "training_model": model,
        "block": model,
        "criterion": torch.mean,
        "loss": torch.mean,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "tokens": torch.randn(6, 8),
        "x": torch.randn(6, 8),
        "micro_batches": torch.randn(3, 6, 8),
        "step": 7,
        "index_of_first": 6,
        "checkpoint": torch.utils.checkpoint.checkpoint,
    }


@pytest.mark.parametrize("code", list(blocks()))
def test_a_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # An update wants choices that were counted.
    given = names()
    given["model"](given["x"])
    # The plan of the page for one node, which takes seconds less to find.
    exec(code.replace("num_ranks=64, global_batch=256", "num_ranks=8, global_batch=8"), given)


@pytest.mark.parametrize("code", list(blocks(elsewhere=True)))
def test_a_block_parses_and_imports_what_is_there(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("moe_ext"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text()
    linked = re.findall(r"\]\((\w+\.md)\)", index)
    pages = {p.name for p in DOCS.glob("*.md")} - {"README.md", "index.md"}
    assert sorted(linked) == sorted(pages)


def test_pages_open_with_their_purpose_and_guides_with_a_program():
    guides = (DOCS / "README.md").read_text().split("## Guides")[1].split("\n## ")[0]
    for page in sorted(set(DOCS.glob("*.md")) - {DOCS / "index.md"}):
        text = page.read_text()
        title, opening, *_ = text.split("\n\n")
        assert title.startswith("# ") and re.match(r"[A-Z`]", opening), page.name
        if f"]({page.name})" in guides:
            before, *programs = re.split(r"^```(?:python|sh|bash)$", text, flags=re.MULTILINE)
            assert programs and len(before.split()) <= OPENING_WORDS, page.name


def sections(page):
    """Anchor, as GitHub and MyST make it, and text of each heading up to the next one."""
    text = re.sub(
        r"```.*?```", lambda code: code[0].replace("\n#", "\n #"), page.read_text(), flags=re.DOTALL
    )
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE)[1:]:
        heading = re.match(r"#+ (.*)", section)[1]
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"), section


def own_pages():
    globs = "docs/**/*.md", "*.md", "csrc/**/*.md", "examples/**/*.md"
    return [page for pattern in globs for page in DOCS.parent.glob(pattern)]


def test_links_lead_somewhere():
    for page in own_pages():
        for target, anchor in re.findall(r"\]\(([^):#\s]*)(?:#([^)]*))?\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in dict(sections(found)), f"{page.name}: {target}#{anchor}"


def test_files_that_pages_name_are_there():
    folders = "tests|tools|benchmarks|moe_ext|docs|csrc|examples|cmake"
    named = 0
    for page in own_pages():
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            named += 1
            assert (DOCS.parent / path).exists(), f"{page.name}: {path}"
    assert named > 30


def test_the_readme_leads_to_short_answers():
    """It says itself what this is for and how to install it; a link answers each question more."""
    readme = DOCS.parent / "README.md"
    answers = {readme: readme.read_text()}
    questions = re.findall(r"^- (.*\?) \[.*\]\((.*)#(.*)\)\.$", answers[readme], re.MULTILINE)
    for question, page, anchor in questions:
        answers[question] = dict(sections(DOCS.parent / page))[anchor]
    words = {question: len(answer.split()) for question, answer in answers.items()}
    assert len(questions) == 10 and sum(words.values()) <= ANSWER_WORDS, words


STACK = (DOCS / "in_your_stack.md").read_text()


@pytest.mark.parametrize("script", re.findall(r"```bash\n(.*?)```", STACK, re.DOTALL))
def test_launch_lines_are_lines_of_bash_and_torchrun(script):
    subprocess.run(["bash", "-n", "-c", script], check=True)
    for line in re.findall(r"torchrun (.*)", script.replace("\\\n", " ")):
        words = shlex.split(re.sub(r"\$\w+", "1", line))
        given = get_args_parser().parse_args(words)
        assert given.training_script.endswith(".py")


@pytest.fixture(scope="module")
def pods():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(re.search(r"```yaml\n(.*?)```", STACK, re.DOTALL)[1])
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    assert sum(replica["replicas"] for replica in replicas) == 4
    return [replica["template"]["spec"] for replica in replicas]


def test_the_kubernetes_job_is_one(pods):
    for spec in pods:
        (container,) = spec["containers"]
        assert container["name"] == "pytorch"
        assert get_args_parser().parse_args(container["command"][1:])


def test_kubernetes_takes_its_pods(pods):
    """By the schemas of the API, where a package that holds them is installed."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for spec in pods:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "moe"}, "spec": spec}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray[train] is not installed")
def test_the_loop_of_ray_runs(tmp_path):
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", STACK, re.DOTALL) if "ray.train" in c)
    script = tmp_path / "train.py"
    script.write_text(code)
    path = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    # Where one writes results is no part of the page.
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_runs_on_as_many_ranks_as_the_page_starts():
    """Eight, in a group of processes that send nothing."""
    code = (DOCS.parent / "README.md").read_text()
    line = re.search(r"^mesh = (.*)$", code, re.MULTILINE)[1]
    nodes, ranks = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", STACK).groups()
    size = int(nodes) * int(ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = eval(line, {"moe_ext": moe_ext, "dist": dist})
        assert mesh.dp_size * mesh.ep_size == size
    finally:
        dist.destroy_process_group()


def texts():
    """(class raised or None, text) of each string in the package, with ... for what is put in."""

    def text_of(node):
        match node:
            case ast.Constant(value=str()):
                return node.value
            case ast.JoinedStr():
                return "".join(map(text_of, node.values))
            case ast.BinOp():
                return text_of(node.left) + text_of(node.right)
        return "..."

    for path in sorted((DOCS.parent / "moe_ext").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                yield getattr(node.exc.func, "id", ""), text_of(node.exc.args[0])
            elif isinstance(node, ast.JoinedStr | ast.Constant):
                yield None, text_of(node)


def test_troubleshooting_quotes_texts_that_are_raised():
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)
    assert len(quoted) > 30
    pieces = {fragment: re.split(r" ?\.\.\. ?|`", fragment) for fragment in quoted}
    found = list(texts())
    others = "setuptools.command", "no GoogleTest"  # of setuptools and of tests/cpp/CMakeLists.txt

    def known(fragment, text):
        """Whether its pieces stand in the text one after the other."""
        end = 0
        for piece in pieces[fragment]:
            at = text.find(piece, end)
            if at < 0:
                return False
            end = at + len(piece)
        return True

    for fragment in quoted:
        if not any(other in fragment for other in others):
            assert any(known(fragment, text) for _, text in found), fragment
    for raised, text in found:
        if raised in ("RuntimeError", "ImportError") and text != "...":
            assert any(known(fragment, text) for fragment in quoted), text


def test_the_version_is_that_of_the_last_release():
    root = DOCS.parent
    released = re.findall(
        r"^## \[(\d.*)\] - (\S+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    cited = (root / "CITATION.cff").read_text()
    assert released[0][0] == moe_ext.__version__
    assert f"version: {released[0][0]}\ndate-released: {released[0][1]}\n" in cited
