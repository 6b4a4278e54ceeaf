"""`reuse_memory`: page faults counted in processes of their own, with it and without."""

import os
import subprocess
import sys

import pytest

import moe_ext

PRELUDE = """
import resource, threading, torch, moe_ext
torch.set_num_threads(1)

def faults(run, times=6, warmup=8):
    for _ in range(warmup):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

layer = moe_ext.MoELayer(512, 1088, 8)  # gradients of 35.7 and 17.8 MB
x = torch.randn(32, 512)

def step():
    layer.zero_grad()
    layer(x).sum().backward()
"""


def run(code, **environment):
    command = [sys.executable, "-c", PRELUDE + code]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return [float(line) for line in result.stdout.splitlines()]


needs_glibc = pytest.mark.skipif(
    "no effect" in moe_ext.info()["memory"], reason="torch's memory is not of glibc's malloc"
)


@needs_glibc
def test_reused_memory_saves_the_page_faults_of_forward_and_backward():
    fresh, reused, in_thread, undone = run(
        """
print(faults(step))
assert moe_ext.reuse_memory() and moe_ext.reuse_memory()
assert "reused" in moe_ext.info()["memory"]
print(faults(step))
found = []
thread = threading.Thread(target=lambda: found.append(faults(step, warmup=12)))
thread.start(); thread.join()
print(found[0])
assert moe_ext.reuse_memory(False)
assert "fresh" in moe_ext.info()["memory"]
print(faults(step))
"""
    )
    assert fresh > 200 and undone > 200
    # A gap that does not fit makes the heap grow now and then. A thread's heap holds 64 MiB, one
    # of the larger gradients.
    assert reused < fresh / 10 and in_thread < fresh / 2


@needs_glibc
def test_undoing_gives_the_memory_back():
    held, given_back = run(
        """
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024

moe_ext.reuse_memory()
start = resident()
torch.zeros(2**27, dtype=torch.uint8)
print(resident() - start)
moe_ext.reuse_memory(False)
print(resident() - start)
"""
    )
    assert held > 2**27 * 0.9 and given_back < 2**27 * 0.1


def test_other_allocators_are_told_apart(monkeypatch):
    def missing(name):
        raise OSError(name)

    from moe_ext import _memory

    monkeypatch.setattr(_memory.ctypes, "CDLL", missing)
    _memory._glibc.cache_clear()
    try:
        with pytest.warns(UserWarning, match="reuse_memory: expected torch's memory to come from"):
            assert moe_ext.reuse_memory() is False
        assert "no effect" in moe_ext.info()["memory"]
    finally:
        _memory._glibc.cache_clear()
