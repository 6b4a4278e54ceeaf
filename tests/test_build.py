"""What the build must not do: share code between instruction sets."""

import shutil
import subprocess
from pathlib import Path

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
