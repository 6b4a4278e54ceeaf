"""CUDA kernels on a machine without a GPU: routes the operators of CPU tensors to the emulation.

`build/_C_simt.so` holds the CUDA glue and kernels, compiled as C++ and registered for a dispatch
key that no backend here uses. Within `emulated_cuda()` the CPU key of every such operator leads
there; autograd, fakes and checks stay.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parent.parent / "build" / "_C_simt.so"
KEY = "PrivateUse1"
_active = False


def is_built() -> bool:
    return LIBRARY.exists()


def is_active() -> bool:
    return _active


@functools.cache
def operators() -> list[str]:
    """Names of the operators of moe_ext that have an emulated kernel."""
    torch.ops.load_library(str(LIBRARY))
    names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("moe_ext::")]
    return sorted(
        name.removeprefix("moe_ext::")
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY)
    )


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
    library = torch.library.Library("moe_ext", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in operators():
            op = getattr(torch.ops.moe_ext, name).default
            library.impl(name, functools.partial(op.redispatch, keys), "CPU", allow_override=True)
    global _active
    _active = True
    try:
        yield
    finally:
        _active = False
        library._destroy()
