"""The library of CUDA operators, where one is built: it needs a torch with CUDA, but no GPU."""

import pytest
import torch

from moe_ext import _library

pytestmark = pytest.mark.skipif(
    not _library.has_cuda(), reason="no CUDA operators: build with MOE_EXT_CUDA=1, torch with CUDA"
)


def test_every_operator_has_a_cuda_kernel():
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name for s in schemas if s.name.startswith("moe_ext::")}
    # The control of the CPU's instruction set has no tensors; a backward pass on CPU alone adds
    # to gradients that are there; Adam's step on the CPU is there for memory that a GPU lacks.
    of_cpu = ("cpu_isa", "_grouped_mm_backward_weight_add_", "adam_step_")
    names = {name for name in names if not any(part in name for part in of_cpu)}
    missing = [
        name
        for name in sorted(names)
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    ]
    assert len(names) >= 4 and not missing
