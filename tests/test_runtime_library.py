"""Which `_runtime` is loaded, and what is said where none is."""

import filecmp
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import moe_ext
from moe_ext import _library, _runtime_library

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder in the place of the package's, and nothing loaded yet."""
    monkeypatch.setattr(_runtime_library, "FOLDER", tmp_path)
    monkeypatch.delenv("MOE_EXT_RUNTIME", raising=False)
    before = sys.modules.pop("moe_ext._runtime", None)
    _runtime_library._load.cache_clear()
    yield tmp_path
    _runtime_library._load.cache_clear()
    if before is not None:
        sys.modules["moe_ext._runtime"] = before


def test_this_build_has_it():
    built = ROOT / "build" / f"cmake-{torch.__version__}" / "csrc"
    installed = _library.PATH
    if not (built / "_C.so").exists() or not filecmp.cmp(built / "_C.so", installed, shallow=False):
        pytest.skip("the operators in use are not those of an in-tree build for this torch")
    if not (built / "_runtime.so").exists():
        pytest.skip("built without _runtime: no Python.h, or MOE_EXT_RUNTIME=0")
    assert _runtime_library.path().exists()
    module = _runtime_library.load()
    assert module.torch_version == torch.__version__
    assert sys.modules["moe_ext._runtime"] is module
    assert _runtime_library.state() == f"compiled for torch {torch.__version__}"


@pytest.mark.slow
def test_its_sources_compile_for_a_torch_that_it_is_not_built_for(tmp_path):
    """Classes of autograd and c10d change with torch; `make compat` asks the oldest and newest."""
    headers, python = Path(torch.__file__).parent / "include", Path(sysconfig.get_path("include"))
    compiler = shutil.which("c++")
    if _runtime_library.path().exists():
        pytest.skip("it is built for this torch")
    if compiler is None or not (python / "Python.h").exists():
        pytest.skip("no compiler, or no Python.h")
    sources = sorted((ROOT / "csrc" / "runtime").glob("*.cpp"))
    (tmp_path / "all.cpp").write_text("".join(f'#include "{path}"\n' for path in sources))
    options = ["-std=c++20", "-fsyntax-only", '-DMOE_EXT_TORCH_VERSION=""', f"-I{ROOT / 'csrc'}"]
    options += [f"-isystem{folder}" for folder in (headers, python)]
    done = subprocess.run(
        [compiler, *options, tmp_path / "all.cpp"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_without_it_the_twin_is_used_and_the_reason_given(folder):
    assert _runtime_library.load() is None
    state = _runtime_library.state()
    assert state.startswith("in Python: _runtime is not built: `pip install .` in its source")
    assert moe_ext.info()["backends"]["runtime"] == state


@pytest.mark.parametrize(
    ("version", "suffix"),
    [("9.9.0", sysconfig.get_config_var("EXT_SUFFIX")), (torch.__version__, ".cpython-20.so")],
)
def test_another_torch_or_python_is_not_loaded(folder, version, suffix):
    name = f"_runtime.torch-{version}{suffix}"
    (folder / name).write_bytes(b"loading this would fail")
    assert _runtime_library.load() is None
    state = _runtime_library.state()
    target = name.removeprefix("_runtime.").removesuffix(".so")
    assert state.startswith(f"in Python: _runtime is built for {target}, not for torch-")
    assert f"torch-{torch.__version__}." in state.partition("not for ")[2]


def test_a_file_that_does_not_load_is_reported(folder):
    _runtime_library.path().write_bytes(b"no library")
    assert _runtime_library.load() is None
    assert "does not load:" in _runtime_library.state()


def test_a_renamed_file_is_not_trusted(folder, monkeypatch):
    real = Path(_runtime_library.__file__).parent / _runtime_library.path().name
    if not real.exists():
        pytest.skip("_runtime is not built for this torch")
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    shutil.copy(real, _runtime_library.path())
    assert _runtime_library.load() is None
    assert "is built for torch" in _runtime_library.state()


def test_environment_decides(folder, monkeypatch):
    monkeypatch.setenv("MOE_EXT_RUNTIME", "1")
    with pytest.raises(ImportError, match="expected moe_ext._runtime to load, got: "):
        _runtime_library.load()
    monkeypatch.setenv("MOE_EXT_RUNTIME", "0")
    assert _runtime_library.load() is None
    assert _runtime_library.state() == "in Python: MOE_EXT_RUNTIME=0"
    monkeypatch.setenv("MOE_EXT_RUNTIME", "yes")
    with pytest.raises(ValueError, match="expected MOE_EXT_RUNTIME to be 0 or 1, got yes"):
        _runtime_library.load()
