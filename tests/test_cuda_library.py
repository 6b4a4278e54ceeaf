"""The library of CUDA operators, where one is built: it needs a torch with CUDA, but no GPU."""

import importlib
from pathlib import Path

import pytest
import torch

from moe_ext import _library

pytestmark = pytest.mark.skipif(
    not _library.has_cuda(), reason="no CUDA operators: build with MOE_EXT_CUDA=1, torch with CUDA"
)


def test_every_operator_has_a_cuda_kernel(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "tools")
    names = importlib.import_module("gpu_operators").registered()
    # The control of the CPU's instruction set has no tensors.
    missing = [
        name
        for name in names
        if "cpu_isa" not in name
        and not torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_ext::{name}", "CUDA")
    ]
    assert len(names) >= 4 and not missing
