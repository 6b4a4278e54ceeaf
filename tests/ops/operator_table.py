"""The table of arguments of every operator, of `tools/gpu_operators.py`, with fewer numbers."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load():
    """A module of its own: a tile of 64 tokens and one more, as emulated kernels take long."""
    path = ROOT / "tools" / "gpu_operators.py"
    spec = importlib.util.spec_from_file_location("operators_of_few_tokens", path)
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    table.T, table.WEIGHTS = 65, 20_000
    return table
