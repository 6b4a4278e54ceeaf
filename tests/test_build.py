"""Libraries share no code between instruction sets; wheel and sdist hold what they should."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import emulation
import pytest
import setuptools
import torch

import moe_ext

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_vector_objects_share_no_symbol(isa):
    objects = sorted(
        (ROOT / "build" / f"cmake-{torch.__version__}").glob(f"csrc/**/*_{isa}.dir/**/*.o")
    )
    if not objects or shutil.which("nm") is None:
        pytest.skip("no objects of an in-tree build for this torch, or no nm")
    for path in objects:
        symbols = subprocess.run(
            ["nm", "-C", path], capture_output=True, text=True, check=True
        ).stdout
        # W, V, u: symbols of which the linker keeps one copy for the whole library.
        shared = [line for line in symbols.splitlines() if line[17:18] in "WVu" and line[17:18]]
        assert not shared, f"{path.name} may lend this code to processors without {isa}: {shared}"


@pytest.mark.parametrize("family", ["activation", "gating", "permutation"])
def test_portable_loops_compile_for_another_processor(family, tmp_path):
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no cross compiler: apt-get install g++-aarch64-linux-gnu")
    options = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror", "-DMOE_ISA=portable", "-Icsrc"]
    source = f"csrc/{family}/{family}_simd.cpp"
    # A compiler that fails removes its output: as root, a device too.
    made = tmp_path / "loops.o"
    subprocess.run([compiler, *options, "-c", source, "-o", made], cwd=ROOT, check=True)


def test_every_cuda_operator_is_emulated():
    if not emulation.is_built():
        pytest.skip("no emulation of CUDA: build with MOE_EXT_TESTS=1")
    sources = (ROOT / "csrc").glob("*/*_cuda.cu")
    names = {name for path in sources for name in re.findall(r'm\.impl\("(\w+)"', path.read_text())}
    assert set(emulation.operators()) == names


# In the place of CMake and Ninja: leaves an empty library.
FAKE_TOOL = """
import pathlib, sys
if "--build" in sys.argv:
    (pathlib.Path(sys.argv[2]) / "csrc").mkdir(parents=True, exist_ok=True)
    (pathlib.Path(sys.argv[2]) / "csrc" / "_C.so").touch()
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the files that metadata, an sdist and a wheel are made from."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "moe_ext", tmp_path / "tree" / "moe_ext", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path / "tree")
    return tmp_path / "tree"


def in_tree(tree, code, **environment):
    """Output of Python in the tree; neither the repository nor packages are on its path."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_isolated_build_takes_the_torch_that_is_installed(tree, tmp_path):
    """pip hides the packages of the environment, but for those that the build requires."""
    for name in ("setuptools", "_distutils_hack"):
        home = Path(setuptools.__file__).parent.parent / name
        (tmp_path / "required" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "required" / name).symlink_to(home)
    hidden = f"import sys; sys.path.insert(0, {str(tmp_path / 'required')!r})\n"
    ask = "import setup; print(setup.get_requires_for_build_wheel(), flush=True)\n"
    fake = tmp_path / "tool"
    fake.write_text(f"#!{sys.executable}\n{FAKE_TOOL}")
    fake.chmod(0o755)
    wheel = f"""
import torch
print(torch.__version__, flush=True)
setup.find_tool = lambda name: {str(fake)!r}
sys.argv[1:] = ["build", "--build-lib=lib", "bdist_wheel", "--dist-dir=dist"]
setup.main()
"""
    # Left behind by a former build for another torch.
    (tree / "lib" / "moe_ext").mkdir(parents=True)
    for former in ("_C_cuda.so", "_runtime.torch-1.0.so"):
        (tree / "lib" / "moe_ext" / former).touch()
    found = in_tree(tree, hidden + ask + wheel, MOE_EXT_CUDA="0", MOE_EXT_RUNTIME="0")
    assert found.split()[:2] == ["[]", torch.__version__]
    assert_wheel_is_for_every_python_and_holds_the_package(tree)
    # An environment without torch: it is fetched for a wheel, and an sdist does without.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    hidden += f"sys.executable = {str(bare)!r}\n"
    code = f"{hidden}{ask}assert 'torch' not in sys.modules; setup.build_sdist('dist')"
    assert in_tree(tree, code).splitlines()[0] == "['torch>=2.11']"
    assert list((tree / "dist").glob(f"moe_ext-{moe_ext.__version__}.tar.gz"))


def assert_wheel_is_for_every_python_and_holds_the_package(tree):
    (path,) = (tree / "dist").glob("*.whl")
    assert path.name.startswith(f"moe_ext-{moe_ext.__version__}-py3-none-linux_")
    sources = {str(p.relative_to(tree)) for p in (tree / "moe_ext").rglob("*.py")}
    with zipfile.ZipFile(path) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = f"moe_ext-{moe_ext.__version__}.dist-info"
        assert wheel.read(f"{info}/METADATA").count(b"\nRequires-Dist: torch>=2.11\n") == 1
        assert b"Root-Is-Purelib: false" in wheel.read(f"{info}/WHEEL")
    assert held == {*sources, "moe_ext/py.typed", "moe_ext/_C.so"}
