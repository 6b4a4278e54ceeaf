import functools
import re

import pytest

pytest.importorskip("transformers", minversion="5.0")

TINY = ["--steps=3", "--batch=4", "--seq-len=16", "--device=cpu", "--timeout=60"]
CHANGE = re.compile(r"(\d) of 4 networks.* held-out loss ([0-9.]+) before, ([0-9.]+) after")


@pytest.fixture
def upcycle(run_here):
    return functools.partial(run_here, "upcycle", *TINY)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ([], 2),
        (["--every=1", "--num-experts=4", "--top-k=1"], 4),
        (["--method=granular", "--granularity=2", "--top-k=4"], 2),
    ],
)
def test_nothing_is_lost(options, count, upcycle, text_file, tmp_path):
    code, stdout, stderr = upcycle("--data", text_file, "--out", tmp_path, *options)
    assert code == 0
    assert "upcycled: 100%" in stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    replaced, before, after = CHANGE.search(stdout).groups()
    assert int(replaced) == count
    assert float(after) == pytest.approx(float(before), abs=2e-6)
    for name in ("dense", "upcycled"):
        assert re.search(rf"^{name}: held-out loss [0-9.]+$", stdout, re.MULTILINE)


def test_two_ranks(launch, text_file):
    options = [*TINY, "--ep=2", "--data", text_file, "--method=granular", "--granularity=2"]
    output = launch([*options, "--top-k=4"], script="upcycle.py").finish()
    _, before, after = CHANGE.search(output).groups()
    assert float(after) == pytest.approx(float(before), abs=2e-6)
