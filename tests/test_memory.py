"""`reuse_memory`: page faults counted in processes of their own, with it and without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ext
from moe_ext.dispatch import DispatchMetadata, LocalDispatcher

PRELUDE = """
import ctypes, os, resource, sys, threading, torch, moe_ext
torch.set_num_threads(1)

def faults(run, times=6, warmup=8):
    for _ in range(warmup):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

def step():
    layer.zero_grad()
    layer(x).sum().backward()

for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        layer = moe_ext.MoELayer(512, 1088, 8)  # gradients of 35.7 and 17.8 MB
        x = torch.randn(32, 512)
        exec(code)
        print(flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
REUSED = """
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault is a page of 4 KiB
print(faults(step, times=4, warmup=2))
assert moe_ext.reuse_memory() and moe_ext.reuse_memory()
assert "reused" in moe_ext.info()["memory"]
faults(step, times=1, warmup=8)
found = [faults(step, times=1, warmup=0) for _ in range(16)]
print(min(found))
print(max(found))
found = []
thread = threading.Thread(target=lambda: found.append(faults(step, times=4)))
thread.start(); thread.join()
print(found[0])
assert moe_ext.reuse_memory(False)
assert "fresh" in moe_ext.info()["memory"]
# Later ones may find a gap below what is in use, which malloc does not give back again.
print(faults(step, warmup=0, times=1))
"""
PLAIN = """
x, idx = torch.randn(8192, 1024), torch.rand(8192, 8).topk(2).indices
weights, up, grad = torch.rand(8192, 2), torch.randn(4096, 8192), torch.randn(4096, 4096)
rows, tables = moe_ext.ops.permute_tokens(x, idx, 8)
offsets, weight = torch.tensor([0, 64]), torch.randn(1, 4096, 4096)
op = torch.ops.moe_ext
for call in (
    lambda: moe_ext.ops.permute_tokens(x, idx, 8),
    lambda: op._unpermute_tokens_backward(x, rows, tables.slot_of_row, tables.row_of_slot, weights),
    lambda: moe_ext.ops.gated_activation(up),
    lambda: op._gated_activation_backward(grad, up, "swiglu", "concatenated"),
    lambda: op._grouped_mm_backward_weight(grad[:64], grad[:64], offsets),
):
    print(faults(call, times=1, warmup=1))

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
GIVEN_BACK = """
def pages(num_bytes):
    return num_bytes / 2**21 + 2 * 511

def touch():
    rows.fill_(1.0)

D, F, E, K, T = 512, 192, 64, 8, 4096
x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
idx = (torch.arange(T * K) % E).view(T, K)
rows, tables = moe_ext.ops.permute_tokens(x.detach(), idx, E)
touch()
few = torch.ones(T * K, 8, dtype=torch.bfloat16)
owned = (False, True, False)  # not transposed, the gradient of rows to be given back, x not
torch.ops.moe_ext._grouped_mm_backward_weight(rows, few, tables.expert_offsets, *owned)
print(faults(touch, times=1, warmup=0))
print(rows.nbytes)
del rows, few

layer = moe_ext.MoELayer(D, F, E, K, dtype=torch.bfloat16)
grad = torch.randn_like(x)
# Gradients are added to those that are there: no fresh memory is theirs.
step = lambda: layer(x).backward(grad)
faults(step, times=2, warmup=0)
print(max(faults(step, times=1, warmup=0) for _ in range(2)))
# Rows, results and the gradients of both: D columns four times, 2F twice, F twice; and for each
# token the result, its gradient and that of x.
columns = 4 * [D] + 2 * [2 * F] + 2 * [F]
num_rows = T * K + 7 * E  # counts of rows are rounded up to multiples of 8
print(sum(pages(2 * num_rows * c) for c in columns) + 3 * pages(x.nbytes))
"""


def run(*codes, **environment):
    """Numbers that each code prints, in a fork of a process that has done nothing but imports."""
    command = [sys.executable, "-c", PRELUDE, *codes]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return [[float(x) for x in each.split()] for each in result.stdout.split("\n\n")[:-1]]


@pytest.fixture(scope="module")
def found():
    return run(REUSED, PLAIN, GIVEN_BACK)


needs_glibc = pytest.mark.skipif(
    "no effect" in moe_ext.info()["memory"], reason="torch's memory is not of glibc's malloc"
)


@needs_glibc
@pytest.mark.parametrize("cached", [True, False])
def test_reused_memory_saves_the_page_faults_of_forward_and_backward(cached, request):
    """Now and then if malloc's cache takes the ends of the gaps, else in every step."""
    if cached:
        fresh, least, most, in_thread, undone = request.getfixturevalue("found")[0]
    else:
        tunables = "glibc.malloc.tcache_count=0"
        [[fresh, least, most, in_thread, undone]] = run(REUSED, GLIBC_TUNABLES=tunables)
    assert fresh > 4000 and undone > 4000
    # A thread's heap holds 64 MiB, one of the larger gradients.
    assert (least if cached else most) < fresh / 10 and in_thread < fresh / 2


@needs_glibc
def test_what_ends_the_loss_of_gaps_is_told(monkeypatch):
    from moe_ext import _memory

    monkeypatch.setattr(_memory, "_reuses", True)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for version, told in (("glibc 2.36", True), ("glibc 2.39", False), ("glibc 2.41", False)):
        monkeypatch.setattr(os, "confstr", lambda name, version=version: version)
        assert ("tcache_count=0" in moe_ext.info()["memory"]) == told
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    assert "tcache_count" not in moe_ext.info()["memory"]


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


def huge_pages():
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


@needs_glibc
def test_undoing_gives_the_memory_back(found):
    *_, held, given_back = found[1]
    assert held > 2**27 * 0.9 and given_back < 2**27 * 0.1


@needs_glibc
@pytest.mark.skipif(not huge_pages(), reason="the system gives no huge pages")
def test_large_results_come_in_huge_pages(found):
    """Fresh memory, as in a process that did not ask for its reuse: 16384 small pages a result."""
    assert max(found[1][:-2]) < 4096, found[1]


def frees_page_tables():
    """Linux 6.14 and later free the page tables of what `madvise` gives back as a whole."""
    release = os.uname().release.split(".")
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in release[:2]) >= (6, 14)


@needs_glibc
@pytest.mark.skipif(not huge_pages(), reason="the system gives no huge pages")
@pytest.mark.skipif(not frees_page_tables(), reason="Linux before 6.14 keeps page tables")
def test_rows_that_were_given_back_come_again_in_huge_pages(found):
    """64 experts of 576 rows: pieces of less than 2 MiB, which leave their page tables behind.

    A tensor of b bytes holds all whole huge pages but for its two ends, of less than 512 small
    pages each: `pages` is the most faults that it takes. In small pages it takes b / 4096.
    """
    in_pieces, rows_bytes, most, bound = found[2]
    assert in_pieces < rows_bytes / 2**21 + 2 * 511, in_pieces
    assert most < bound, (most, bound)


def test_rows_that_were_not_sent_are_not_padded():
    """Bytes of new tensors in a combine and its backward, where half of the slots are masked."""

    class Bytes(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if tensor.dtype == torch.float64 and not tensor._is_view():
                    self.total += tensor.nbytes
            return result

    num_tokens, model_dim = 64, 32
    idx = torch.arange(2 * num_tokens).view(-1, 2) % 4
    idx[num_tokens // 2 :] = -1
    rows, tables = moe_ext.ops.permute_tokens(torch.randn(num_tokens, model_dim).double(), idx, 4)
    weights = torch.rand(num_tokens, 2, dtype=torch.float64)
    metadata = DispatchMetadata(tables, weights, sent=(num_tokens,))
    sent = rows[:num_tokens].clone().requires_grad_()
    with Bytes() as counted:
        y = LocalDispatcher(4).weighted_sum(sent, metadata)
    assert counted.total == y.nbytes
    torch.testing.assert_close(y, moe_ext.ops.unpermute_tokens(rows, tables, weights))
    grad = torch.randn_like(y)
    counted.total = 0
    with counted:
        (found,) = torch.autograd.grad(y, sent, grad)
    # The gradients of the rows that were sent and of the weights, which are dropped.
    assert counted.total == sent.nbytes + weights.nbytes
    (expected,) = torch.autograd.grad(
        moe_ext.ops.unpermute_tokens(rows.requires_grad_(), tables, weights), rows, grad
    )
    torch.testing.assert_close(found, expected[:num_tokens])
