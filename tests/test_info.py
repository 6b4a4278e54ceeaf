"""python -m moe_ext info, and the forced instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ext
from moe_ext import __main__, _info, _library, _runtime_library
from moe_ext.testing import spawn_ranks


def test_info_names_versions_backends_and_operators():
    facts = moe_ext.info()
    assert facts["versions"]["moe_ext"] == moe_ext.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["cpu"]["isa"] in facts["cpu"]["supported"]
    assert {"permute_tokens", "unpermute_tokens"} <= set(facts["operators"])
    assert "cuda" in facts["backends"]
    if not torch.cuda.is_available():
        assert facts["backends"]["attention"] == "flash (CPU) for 16 bits"


def test_command_prints_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["moe_ext", "info", "--brief"])
    __main__.main()
    text = capsys.readouterr().out
    assert moe_ext.__version__ in text
    assert "cuda" in text.lower()
    assert len(text.splitlines()) == 1


def test_every_operator_has_a_public_function_and_a_docstring():
    for name in moe_ext.info()["operators"]:
        assert getattr(moe_ext.ops, name).__doc__, name


def test_the_last_lines_say_what_to_do_next(monkeypatch):
    tour = f"next:      the tour, {Path(moe_ext.__file__).parents[1] / 'docs' / 'tour.md'}"
    *_, last = _info.report().splitlines()
    assert last == tour and Path(last.rpartition(" ")[2]).exists()
    monkeypatch.setattr(_info, "_OPTIONAL", {"nothing-a": "charts", "nothing-b": "progress"})
    monkeypatch.setattr(
        _runtime_library, "state", lambda: "in Python: _runtime is built for torch 2.11, not for 9"
    )
    lines = _info.report().splitlines()
    assert "next:      pip install nothing-a nothing-b" in lines
    assert "next:      make build, in the folder of the sources" in lines and lines[-1] == tour
    monkeypatch.setattr(_library, "PATH", Path("/elsewhere/moe_ext/_C.so"))
    lines = _info.report().splitlines()
    assert "next:      pip install --no-build-isolation ., in the folder of the sources" in lines
    assert lines[-1] == "next:      the tour, docs/tour.md of the sources"


def loads_operators(rank):
    os.environ["MOE_EXT_CPU_ISA"] = "sse9"
    moe_ext.info()


def test_unknown_instruction_set_is_refused():
    text = "expected MOE_EXT_CPU_ISA to be portable, avx2 or avx512, got sse9"
    with pytest.raises(RuntimeError, match=text):
        spawn_ranks(loads_operators, 1)


# Each takes a second, or is of a package that loads when it is asked for.
LATE = (
    *("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"),
    *("compression", "integrations", "optim", "pipeline", "planner", "plot", "sync"),
    "attention.schemes",
)
IMPORTING = f"""
import runpy, sys
import moe_ext
early = [name for name in {LATE} if {{name, f"moe_ext.{{name}}"}} & {{*sys.modules}}]
assert not early, early
for name in dir(moe_ext):
    getattr(moe_ext, name)
assert moe_ext.replace is moe_ext.integrations.replace
for package in (moe_ext.attention, moe_ext.compression, moe_ext.distributed, moe_ext.nn):
    assert [name for name in dir(package) if not hasattr(package, name)] == []
assert {{*moe_ext.compression.__all__}} <= {{*dir(moe_ext.compression)}}
sys.argv = ["moe_ext", "info"]
runpy.run_module("moe_ext", run_name="__main__")
"""


def test_importing_leaves_out_what_takes_a_second_and_the_command_prints_all():
    environment = {**os.environ, "MOE_EXT_CPU_ISA": "portable", "MOE_EXT_RUNTIME": "0"}
    command = [sys.executable, "-c", IMPORTING]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    # The environment forces the instruction set, and the path of autograd.
    assert "portable in use of" in found.stdout
    assert "runtime:   in Python: MOE_EXT_RUNTIME=0" in found.stdout
    assert moe_ext.__version__ in found.stdout and "cuda:" in found.stdout


def test_names_of_packages_are_there_late():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moe_ext.compression.nothing  # noqa: B018
