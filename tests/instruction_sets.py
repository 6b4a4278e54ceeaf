"""Instruction sets of this processor, and a context that has operators use one."""

import contextlib

import torch

import moe_ext  # noqa: F401  (registers the operators)

ISAS = [
    name for name in ("portable", "avx2", "avx512") if torch.ops.moe_ext._cpu_isa_supported(name)
]


@contextlib.contextmanager
def forced_isa(name):
    before = torch.ops.moe_ext._cpu_isa()
    torch.ops.moe_ext._set_cpu_isa(name)
    yield
    torch.ops.moe_ext._set_cpu_isa(before)
