"""The library of CUDA operators, where one is built: it needs a torch with CUDA, but no GPU."""

import pytest
import torch

from moe_ext import _library

pytestmark = pytest.mark.skipif(
    not _library.has_cuda(), reason="no CUDA operators: build with MOE_EXT_CUDA=1, torch with CUDA"
)


OF_CPU = (
    "cpu_isa",  # no tensors
    "_grouped_mm_backward_weight_add_",  # a backward pass on CPU alone adds to gradients
    "adam_step_",  # for memory that a GPU lacks
    "plan_balance",  # of counts, which the host has read
    "split_rows",
    "moe_ext::delta_",  # and masks: moe_ext.ops serves CUDA with torch's operators
    "pack_bits",
    "pack_masked_",
    "quantized_mm",  # weights too large for the CPU's memory bandwidth
    "masked_mm",
    "_exponents",  # refused on CUDA, where the codec sends plain messages
)


def test_every_operator_has_a_cuda_kernel():
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name for s in schemas if s.name.startswith("moe_ext::")}
    names = {name for name in names if not any(part in name for part in OF_CPU)}
    missing = [
        name
        for name in sorted(names)
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    ]
    assert len(names) >= 4 and not missing
