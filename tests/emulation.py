"""CUDA kernels on a machine without a GPU: routes the operators of CPU tensors to the emulation.

`build/_C_simt.so` holds the CUDA glue and kernels, compiled as C++ and registered for a dispatch
key that no backend here uses. Within `emulated_cuda()` the CPU key of every such operator leads
there; autograd, fakes and checks stay.
"""

import contextlib
import ctypes
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


def num_launches() -> int:
    """Kernels of ours that were launched so far."""
    count = ctypes.CDLL(str(LIBRARY)).simt_num_launches
    count.restype = ctypes.c_size_t
    return count()


def gradcheck(function, inputs):
    """torch's, by one random direction where kernels are emulated: each call takes milliseconds."""
    return torch.autograd.gradcheck(function, inputs, fast_mode=_active)


def gradgradcheck(function, inputs):
    """As `gradcheck`, of the second derivative."""
    return torch.autograd.gradgradcheck(function, inputs, fast_mode=_active)


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


def library_grouped_mm(a, b, offs, bias=None, out_dtype=None):
    """torch's product over experts, with what its kernel for a GPU alone refuses or traps."""
    assert offs.numel() < 1024 and bias is None and out_dtype is None
    ends = offs.tolist()
    rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 3:
        assert a.stride(1) == 1 and a.stride(0) >= a.shape[1]
        out = a.new_zeros(a.shape[0], b.shape[2])
        for e, of_expert in enumerate(rows):
            out[of_expert] = a[of_expert] @ b[e]
        return out
    assert a.stride(0) == 1 and b.stride(1) == 1
    assert a.stride(1) >= a.shape[0] and b.stride(0) >= b.shape[1]
    return torch.stack([a[:, of_expert] @ b[of_expert] for of_expert in rows])


def library_mm_to_float(a, b, dtype, *, out=None):
    """torch's product of 16-bit matrices with a float32 result, which the CPU lacks."""
    assert a.dtype == b.dtype and a.element_size() == 2 and dtype == torch.float32
    product = a.float() @ b.float()
    return product if out is None else out.copy_(product)


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
    library = torch.library.Library("moe_ext", "IMPL")
    torchs = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in operators():
            op = getattr(torch.ops.moe_ext, name).default
            library.impl(name, functools.partial(op.redispatch, keys), "CPU", allow_override=True)
        torchs.impl("_grouped_mm", library_grouped_mm, "CPU", allow_override=True)
        for overload in ("mm.dtype", "mm.dtype_out"):
            torchs.impl(overload, library_mm_to_float, "CPU", allow_override=True)
    global _active
    _active = True
    try:
        yield
    finally:
        _active = False
        library._destroy()
        torchs._destroy()
