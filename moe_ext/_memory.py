"""Settings of malloc that keep freed memory for the next tensors."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings

import torch

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
# A pad above two heaps of a thread (64 MiB each) also keeps those from being unmapped.
_REUSE = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 2**28}
# glibc's defaults, the thresholds where its own adjustment ends up in a process with tensors:
# malloc stops adjusting them once they are set.
_DEFAULT = {
    _M_MMAP_MAX: 65536,
    _M_MMAP_THRESHOLD: 2**25,
    _M_TRIM_THRESHOLD: 2**26,
    _M_TOP_PAD: 2**17,
}
_reuses = False


def reuse_memory(enabled: bool = True) -> bool:
    """Make malloc keep the memory of freed tensors for the next ones; call it first in a script.

    By default glibc gives a large tensor's memory back to the system when it is freed, and the
    next one's has to be mapped and zeroed page by page, which takes longer than to fill it: up to
    ten times a copy. Training steps allocate the same sizes over and over, and pay that in each.

    What it costs: memory stays with the process. Its resident size does not fall below the peak,
    and the peak grows, in a layer's training step by 3 to 32 %, since tensors of other sizes do not
    always fit into the gaps. Before glibc 2.39, nor do tensors of the same size: what is left over
    around an aligned tensor (96 bytes) goes to small objects, the gap lacks them, and now and then
    a step takes fresh memory; in one of three runs of 300 steps the heap grew to six times what was
    in use. `GLIBC_TUNABLES=glibc.malloc.tcache_count=0` in the environment ends that.

    It acts on tensors in CPU memory, of this process and of those that it forks; processes that are
    started anew call it themselves. The forward pass, and the backward pass of a graph on CPU, run
    on the thread that called them. A training loop on another thread than the first (Ray Train's)
    reuses tensors below 64 MB; `MALLOC_ARENA_MAX=1` in the environment is for larger ones.

    Args:
        enabled: False sets glibc's defaults again and gives all free memory back.

    Returns:
        Whether torch's memory is glibc's, and so the call did something. Elsewhere (macOS, musl, a
        preloaded jemalloc or tcmalloc, which keep memory in their own way) it changes nothing, and
        warns.

    It can be called any number of times. `moe_ext.info()["memory"]` says what holds.
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
    """Description of what malloc does in this process."""
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
    """True if memalign hands out its remainders, so that gaps do not serve again (bug 30723)."""
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
    numbers = version.rpartition(" ")[2].split(".")
    old = numbers[0].isdigit() and tuple(int(number) for number in numbers) < (2, 39)
    return old and "glibc.malloc.tcache_count=0" not in tunables


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """glibc, if a tensor shows up in the counts of its malloc."""
    try:
        # By name: the same functions of a preloaded allocator come first in the process.
        libc = ctypes.CDLL("libc.so.6")
        count = libc.mallinfo2 if hasattr(libc, "mallinfo2") else libc.mallinfo
    except (OSError, AttributeError):
        return None
    # mallinfo (glibc before 2.33) has ints, which wrap around.
    bits = 64 if count is getattr(libc, "mallinfo2", None) else 32
    field = ctypes.c_size_t if bits == 64 else ctypes.c_uint

    class Counts(ctypes.Structure):
        _fields_ = [(f"field{i}", field) for i in range(10)]

    count.restype = Counts

    def used() -> int:
        counts = count()
        return int(counts.field4 + counts.field7)  # mapped, and in use in the heaps

    before = used()
    tensor = torch.empty(2**26, dtype=torch.uint8)
    seen = (used() - before) % 2**bits >= tensor.nbytes
    return libc if seen else None
