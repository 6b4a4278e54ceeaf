"""Indices that float32 cannot hold, and those that 32 bits cannot."""

import ctypes
import mmap
import os

import pytest
import torch

from moe_ext import ops

TRAP = 2**24 + 3  # beyond 2^24 float32 has even numbers only
HUGE = 2**31 + 4096
CHUNK = 2**21  # of memory that is mapped again and again: the caches hold it


def available_bytes():
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return 0


class RepeatedZeros:
    """Zeros of any size in little memory: one stretch is mapped again and again.

    What is written anywhere is written everywhere, so that only zeros may be; the last megabytes
    are memory of their own.
    """

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.file = os.memfd_create("zeros")
        os.ftruncate(self.file, CHUNK)
        self.mapped = []

    def map(self, at, size, flags, file):
        fixed = 0x10 if at else 0x4000  # MAP_FIXED, MAP_NORESERVE
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        address = self.libc.mmap(at, size, prot, flags | fixed, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            pytest.skip(f"cannot map {size} bytes: {os.strerror(ctypes.get_errno())}")
        return address

    def tensor(self, numel, dtype):
        size = -(-numel * dtype.itemsize // CHUNK) * CHUNK
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self.map(None, size, private, -1)
        self.mapped.append((start, size))
        last = (numel * dtype.itemsize - 2**20) // CHUNK * CHUNK
        for offset in range(0, last, CHUNK):
            self.map(start + offset, CHUNK, mmap.MAP_SHARED, self.file)
        memory = (ctypes.c_char * size).from_address(start)
        return torch.frombuffer(memory, dtype=dtype)[:numel]

    def close(self):
        for start, size in self.mapped:
            self.libc.munmap(start, size)
        os.close(self.file)


@pytest.fixture(scope="module")
def zeros():
    if not hasattr(os, "memfd_create"):
        pytest.skip("no memory without a file (memfd_create) on this system")
    if available_bytes() < 6 * 2**30:
        pytest.skip(f"6 GiB of memory are needed, {available_bytes() / 2**30:.1f} are free")
    memory = RepeatedZeros()
    yield memory
    memory.close()


WHERE = torch.tensor([5, 2**24 + 1, TRAP - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_beyond_the_integers_of_float32(dtype):
    grad = torch.zeros(TRAP, dtype=dtype)
    grad[WHERE] = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    for check_finite in (True, False):
        residual = torch.zeros(TRAP)
        out = ops.topk_compress_(grad, residual, 3, check_finite=check_finite)
        assert torch.equal(out.indices, WHERE) and torch.equal(out.values, grad[WHERE].float())
        residual = torch.zeros(TRAP)
        carried = ops.threshold_compress_(grad, residual, 0.5, 5, check_finite=check_finite)
        assert carried.indices.tolist() == [*WHERE.tolist(), TRAP - 1, TRAP - 1]
        assert carried.count == 3 and not residual.any()


def test_ties_beyond_the_integers_of_float32():
    grad = torch.zeros(TRAP)
    grad[2**24 - 1 :] = 1.0
    out = ops.topk_compress_(grad, torch.zeros(TRAP), 3)
    assert out.indices.tolist() == [2**24 - 1, 2**24, 2**24 + 1]


@pytest.mark.parametrize("index_codec", ["bitmap", "u16", "delta"])
def test_payloads_beyond_the_integers_of_float32(index_codec):
    values = torch.tensor([1.0, -2.0, 3.0])
    payload = ops.encode_gradient(values, WHERE, TRAP, index_codec=index_codec)
    decoded = ops.decode_gradient(payload)
    assert torch.equal(decoded.indices, WHERE) and torch.equal(decoded.values, values)


def test_rows_and_blocks_beyond_the_integers_of_float32():
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    row_idx = torch.tensor([TRAP - 1, 2**24 + 1, TRAP - 1])
    sums, unique = ops.sum_rows(rows, row_idx, TRAP)
    assert unique.tolist() == [2**24 + 1, TRAP - 1] and sums.tolist() == [[2.0], [5.0]]
    x = torch.zeros(TRAP)
    x[-1] = 1.0
    bitmap = ops.nonzero_blocks(x, block=64)
    assert bitmap[-1] == 1 and not bitmap[:-1].any()


def test_codes_beyond_the_integers_of_float32():
    x = torch.zeros(TRAP)
    x[WHERE] = torch.tensor([3.0, -3.0, 3.0])
    codes, scales = ops.quantize_blockwise(x, format="int8", block=64)
    out = ops.dequantize_blockwise(codes, scales, TRAP, format="int8", block=64)
    assert torch.equal(out.nonzero().squeeze(1), WHERE) and torch.equal(out[WHERE], x[WHERE])


@pytest.fixture(scope="module")
def huge(zeros):
    """A gradient and a residual of more than 2^31 elements."""
    return zeros.tensor(HUGE, torch.bfloat16), zeros.tensor(HUGE, torch.float32)


FAR = [2**31 - 1, 2**31, HUGE - 2]


@pytest.mark.slow
def test_selection_beyond_32_bits(huge):
    grad, residual = huge
    values = torch.tensor([1.0, -2.0, 3.0])
    grad[FAR] = values.bfloat16()
    # A check writes a log besides, which the next test reads back.
    out = ops.topk_compress_(grad, residual, 3, check_finite=False)
    assert out.indices.tolist() == FAR and torch.equal(out.values, values)
    carried = ops.threshold_compress_(grad, residual, 2.0, 3, check_finite=False)
    assert carried.indices.tolist() == [*FAR[1:], HUGE - 1] and carried.count == 2
    rest = ops.topk_compress_(torch.zeros_like(grad[-8192:]), residual[-8192:], 1)
    assert rest.indices.tolist() == [8192 - HUGE + FAR[0]] and rest.values == 1.0
    # The elements of the tail went one by one; those of the shared stretch never changed.
    assert not residual[-8192:].any() and not residual[:8192].any()


@pytest.mark.slow
def test_nan_beyond_32_bits_is_named(huge):
    grad, residual = huge
    grad[-7] = float("nan")
    try:
        with pytest.raises(RuntimeError, match=f"got nan at element {HUGE - 7} "):
            ops.threshold_compress_(grad, residual, 2.0, 3)
        assert not residual[-8192:].any()
    finally:
        grad[-7] = 0


@pytest.mark.slow
def test_blocks_and_codes_beyond_32_bits(huge):
    grad, residual = huge
    grad[FAR] = torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16)
    bitmap = ops.nonzero_blocks(grad, block=64)
    blocks = torch.tensor(sorted({i // 64 for i in FAR}))
    found = bitmap.nonzero().squeeze(1)
    assert found.tolist() == sorted({i // 64 // 8 for i in FAR})
    packed = ops.gather_blocks(grad, blocks, block=64)
    assert packed.float().abs().sum() == 6
    ops.scatter_blocks_(residual, packed.float(), blocks, block=64)
    assert residual[FAR].tolist() == [1.0, -2.0, 3.0]
    codes, scales = ops.quantize_blockwise(residual, format="sign", block=1024)
    assert codes[2**31 // 8] & 1 == 1 and scales[-4:].count_nonzero() == 2
    residual[FAR] = 0
