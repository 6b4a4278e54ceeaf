"""Settings of malloc that keep freed memory for the next tensors."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings

import torch

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
# A pad above two heaps of a thread (64 MiB each) also keeps malloc from unmapping such heaps.
_REUSE = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 2**28}
# glibc's defaults. Malloc stops adjusting the thresholds once they are set, so these are the values
# that its adjustment reaches in a process with tensors.
_DEFAULT = {
    _M_MMAP_MAX: 65536,
    _M_MMAP_THRESHOLD: 2**25,
    _M_TRIM_THRESHOLD: 2**26,
    _M_TOP_PAD: 2**17,
}
_reuses = False


def reuse_memory(enabled: bool = True) -> bool:
    """Make malloc keep the memory of freed tensors for the next ones; call it first in a script.

    By default glibc gives a large tensor's memory back to the system when it is freed. The memory
    of the next tensor must then be mapped and zeroed page by page. Mapping takes longer than
    filling the tensor, up to ten times as long as a copy. Training steps allocate the same sizes
    over and over, and pay that in each step.

    The cost is that memory stays with the process. The resident size does not fall below the peak.
    The peak grows by 3 to 32 % in a layer's training step, because tensors of other sizes do not
    always fit into the gaps. Before glibc 2.39, tensors of the same size do not always fit, either.
    The 96 bytes that are left over around an aligned tensor go to small objects, so that the gap is
    too small and a step sometimes takes fresh memory. In one of three runs of 300 steps the heap
    grew to six times the memory in use. `GLIBC_TUNABLES=glibc.malloc.tcache_count=0` in the
    environment prevents that growth.

    The call acts on tensors in CPU memory, of this process and of processes that it forks. Other
    processes call it themselves. The forward pass, and the backward pass of a graph on CPU, run on
    the thread that called them. A training loop on another thread than the first (Ray Train's)
    reuses tensors below 64 MB. `MALLOC_ARENA_MAX=1` in the environment is for larger ones.

    Args:
        enabled: False sets glibc's defaults again and gives all free memory back.

    Returns:
        True if torch's memory comes from glibc, so that the call had an effect. Elsewhere (macOS,
        musl, a preloaded jemalloc or tcmalloc, which keep memory in their own way) the call changes
        nothing, and warns.

    The function can be called any number of times. `moe_ext.info()["memory"]` tells the state.
    """
    global _reuses
    libc = _glibc()
    if libc is None:
        warnings.warn(
            "reuse_memory: expected torch's memory to come from glibc's malloc, got another "
            "allocator: nothing was changed",
            stacklevel=2,
        )
        return False
    for parameter, value in (_REUSE if enabled else _DEFAULT).items():
        libc.mallopt(parameter, value)
    if not enabled:
        libc.malloc_trim(0)
    torch.ops.moe_ext._set_reuses_memory(enabled)
    _reuses = enabled
    return True


def state() -> str:
    """Return a description of the settings of malloc in this process."""
    if _glibc() is None:
        return (
            "torch's memory does not come from glibc's malloc: moe_ext.reuse_memory has no effect"
        )
    if _reuses and _loses_gaps():
        return (
            "freed memory is reused: moe_ext.reuse_memory, and in every step with "
            "GLIBC_TUNABLES=glibc.malloc.tcache_count=0 in the environment"
        )
    if _reuses:
        return "freed memory is reused: moe_ext.reuse_memory"
    return "large tensors take fresh memory; moe_ext.reuse_memory() reuses it"


def _loses_gaps() -> bool:
    """Return True if memalign's remainders go to other objects, and gaps shrink (bug 30723)."""
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
    numbers = version.rpartition(" ")[2].split(".")
    old = numbers[0].isdigit() and tuple(int(number) for number in numbers) < (2, 39)
    return old and "glibc.malloc.tcache_count=0" not in tunables


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return glibc, or None if its malloc does not count the memory of a new tensor."""
    try:
        # glibc is loaded by its name. A search of the process would find the functions of a
        # preloaded allocator first.
        libc = ctypes.CDLL("libc.so.6")
        count = libc.mallinfo2 if hasattr(libc, "mallinfo2") else libc.mallinfo
    except (OSError, AttributeError):
        return None
    # `mallinfo`, which glibc before 2.33 has instead, counts in ints, which wrap around.
    bits = 64 if count is getattr(libc, "mallinfo2", None) else 32
    field = ctypes.c_size_t if bits == 64 else ctypes.c_uint

    class Counts(ctypes.Structure):
        _fields_ = [(f"field{i}", field) for i in range(10)]

    count.restype = Counts

    def used() -> int:
        counts = count()
        # Bytes that are mapped (hblkhd), and bytes in use in the heaps (uordblks).
        return int(counts.field4 + counts.field7)

    before = used()
    tensor = torch.empty(2**26, dtype=torch.uint8)
    seen = (used() - before) % 2**bits >= tensor.nbytes
    return libc if seen else None
