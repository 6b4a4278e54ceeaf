"""Fixtures that the whole suite shares."""

import contextlib
import importlib.util

import emulation
import pytest
import torch
import without_hypothesis

import moe_ext  # noqa: F401  (registers the operators that the fixtures call)

if importlib.util.find_spec("hypothesis") is None:
    without_hypothesis.install()

ISAS = [
    name for name in ("portable", "avx2", "avx512") if torch.ops.moe_ext._cpu_isa_supported(name)
]


@contextlib.contextmanager
def forced_isa(name):
    before = torch.ops.moe_ext._cpu_isa()
    torch.ops.moe_ext._set_cpu_isa(name)
    yield
    torch.ops.moe_ext._set_cpu_isa(before)


@pytest.fixture(params=ISAS)
def isa(request):
    """Forces one variant of the SIMD loops for the test, and puts the former one back."""
    with forced_isa(request.param):
        yield request.param


@contextlib.contextmanager
def running_on(name):
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if name == "simt" and not emulation.is_built():
        pytest.skip("no emulation of CUDA: build with MOE_EXT_TESTS=1")
    where = torch.device("cuda" if name == "cuda" else "cpu")
    with contextlib.ExitStack() as stack:
        if name == "simt":
            stack.enter_context(emulation.emulated_cuda())
        if name == "cuda":
            # Tensors that a test makes without naming a device live there too.
            stack.enter_context(where)
        yield where


@pytest.fixture(params=["cpu", "simt", "cuda"])
def device(request):
    """Where the tensors live; under "simt" that is the CPU, and CUDA kernels are emulated."""
    with running_on(request.param) as where:
        yield where


@pytest.fixture
def moved(device, request):
    """Moves every tensor of a nested value to `device`, for a case of arguments to refuse.

    Skips a case that only a look at the values can refuse, where CUDA kernels run.
    """
    names = request.node.callspec.params
    looks = any(
        mark in str(names.get("message"))
        for mark in (" at token", " at expert", " at index", "NaN", "or -1")
    )
    if looks and (device.type == "cuda" or emulation.is_active()):
        pytest.skip("CUDA operators do not look at values")

    def move(value):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, dict):
            return {name: move(item) for name, item in value.items()}
        return tuple(map(move, value)) if isinstance(value, tuple) else value

    return move


@pytest.fixture(params=[*ISAS, "simt", "cuda"])
def backend(request):
    """As `device`, with the CPU once for each variant of the SIMD loops."""
    if request.param not in ISAS:
        with running_on(request.param) as where:
            yield where
        return
    with forced_isa(request.param):
        yield torch.device("cpu")


@pytest.fixture
def num_threads():
    """A setter of torch's thread count that is undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
