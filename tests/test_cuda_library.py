"""The library of CUDA operators, where one is built: it needs a torch with CUDA, but no GPU."""

import importlib
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_ext import _info, _library

# `make cuda` asks for it: an install without the operators fails then.
ASKED = os.environ.get("MOE_EXT_CUDA") == "1" and torch.backends.cuda.is_built()
pytestmark = pytest.mark.skipif(
    not (ASKED or _library.has_cuda()),
    reason="no CUDA operators: build with MOE_EXT_CUDA=1, torch with CUDA",
)


# Their results are numbers, of bytes that a fake tensor has not.
WITHOUT_A_FAKE = {"delta_hash", "delta_hash_change"}
# Sizes of their results are in the data, which meta tensors have not.
OF_ANY_SIZE = {
    *("_decode_payload", "delta_encode", "delta_pack", "delta_unpack", "encode_exponents"),
    "sum_rows",
}
# Their results are for the host.
READ_BACK = {"_payload_header"}


@pytest.fixture
def gpu_operators(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "tools")
    return importlib.import_module("gpu_operators")


def test_every_operator_has_a_cuda_kernel(gpu_operators):
    names = gpu_operators.registered()
    # The control of the CPU's instruction set has no tensors.
    missing = [
        name
        for name in names
        if "cpu_isa" not in name
        and not torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_ext::{name}", "CUDA")
    ]
    assert len(names) >= 4 and not missing


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_operator_tells_its_results_on_cuda(gpu_operators, dynamic):
    """Fakes of sizes that are known, and of sizes that torch.compile leaves open."""
    failed = {}
    for name in sorted({*gpu_operators.CALLS} - WITHOUT_A_FAKE):
        for arguments in gpu_operators.calls(name, gpu_operators.Inputs(torch.bfloat16)):
            mode = FakeTensorMode(shape_env=ShapeEnv())
            try:
                with mode:
                    fake = [
                        mode.from_tensor(x, static_shapes=not dynamic).to("cuda")
                        if isinstance(x, torch.Tensor)
                        else x
                        for x in arguments
                    ]
                    results = gpu_operators.result(name, tuple(fake))
                elsewhere = {x.device.type for x in results} - {"cuda"}
                if elsewhere and name not in READ_BACK:
                    failed[name] = f"results on {elsewhere}"
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    assert not failed


def test_every_operator_runs_on_meta(gpu_operators):
    failed = {}
    for name in sorted({*gpu_operators.CALLS} - WITHOUT_A_FAKE - OF_ANY_SIZE - READ_BACK):
        for arguments in gpu_operators.calls(name, gpu_operators.Inputs(torch.bfloat16)):
            try:
                results = gpu_operators.result(name, gpu_operators.moved(arguments, "meta"))
                if elsewhere := {x.device.type for x in results} - {"meta"}:
                    failed[name] = f"results on {elsewhere}"
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    assert not failed


def test_the_report_counts_the_operators_of_cuda():
    told = _info.info()["backends"]["cuda"]
    assert told.endswith(f": {_info._num_cuda_operators()} operators")
