"""python -m moe_ext info, and the forced instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ext
from moe_ext import __main__, _info, _library, _runtime_library


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


def run_with_isa(isa, code):
    environment = {**os.environ, "MOE_EXT_CPU_ISA": isa}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


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


def test_unknown_instruction_set_is_refused():
    result = run_with_isa("sse9", "import moe_ext; moe_ext.info()")
    assert result.returncode != 0
    assert "expected MOE_EXT_CPU_ISA to be portable, avx2 or avx512, got sse9" in result.stderr


HEAVY = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")


def test_importing_leaves_out_what_takes_a_second_and_the_command_prints_all():
    code = f"import sys, moe_ext; print([name for name in {HEAVY} if name in sys.modules])"
    code += "; print(set(moe_ext.compression.__all__) - set(dir(moe_ext.compression)))"
    code += "; from moe_ext.compression import CompressedAllReduce, zero_plus_plus"
    code += "; from moe_ext import __main__; sys.argv = ['moe_ext', 'info']; __main__.main()"
    found = run_with_isa("portable", code)
    assert found.returncode == 0, found.stderr
    heavy, late, *report = found.stdout.splitlines()
    assert (heavy, late) == ("[]", "set()")
    text = "\n".join(report)
    # The environment forces the instruction set.
    assert "portable in use of" in text
    assert moe_ext.__version__ in text and "cuda:" in text


def test_names_of_packages_are_there_late():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moe_ext.compression.nothing  # noqa: B018
