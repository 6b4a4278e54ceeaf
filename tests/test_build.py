"""What the build must not do: share code between instruction sets."""

import re
import shutil
import subprocess
from pathlib import Path

import emulation
import pytest
import torch

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
