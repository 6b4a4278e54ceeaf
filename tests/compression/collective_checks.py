"""What the tests of collectives share: checks that ranks run in one spawn, and simulated ranks."""

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from rank_checks import assert_passed, run_checks

from moe_ext import _runtime_library
from moe_ext.comm.workers import Messages
from moe_ext.compression import shard_numel
from moe_ext.ops import dequantize_blockwise, quantize_blockwise
from moe_ext.testing import spawn_ranks

PATHS = {"python": "0", "compiled": "1"}


class ChecksOfSizes(dict):
    """Functions that every rank calls, by name; as a decorator, for groups of so many ranks."""

    def __call__(self, *num_ranks):
        def register(function):
            for count in num_ranks:
                self.setdefault(count, {})[function.__name__] = function
            return function

        return register

    def cases(self):
        """Tuples (ranks, name) of all checks."""
        return [(count, name) for count, found in sorted(self.items()) for name in found]

    def assert_passed(self, num_ranks, name, path):
        """Assert that a check passed on every rank; one spawn for all of a size and a path."""
        skip_unless_built(path)
        found = self.__dict__.setdefault("found", {})
        if (num_ranks, path) not in found:
            found[num_ranks, path] = spawn_ranks(run_on_path, num_ranks, self[num_ranks], path)
        assert_passed(found[num_ranks, path], name)


def run_on_path(rank, functions, path):
    """Outcome of each function on this rank, on one of the paths."""
    os.environ["MOE_EXT_RUNTIME"] = PATHS[path]
    return run_checks(functions, rank, dist.get_world_size())


def skip_unless_built(path):
    """Skip where the path is the compiled one and is not there."""
    if path == "compiled" and _runtime_library._load()[0] is None:
        pytest.skip(_runtime_library.state())


def of_rank(rank, numel, *, salt=0, dtype=torch.float32):
    """What a rank holds; every rank can tell."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def whole_numbers(rank, numel, *, salt=0, dtype=torch.float32):
    """Numbers whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)


@functools.lru_cache(maxsize=64)
def sums_of_ranks(size, numel, salt=0):
    """(sum, sum of magnitudes) of what the ranks hold, in float64 and without a message."""
    every = torch.stack([of_rank(rank, numel, salt=salt).double() for rank in range(size)])
    return every.sum(0), every.abs().sum(0)


def _gathered(x):
    """That of every rank, on rank 0; a list of none elsewhere.

    An all-reduce or all-gather of 8 ranks takes ten times as many messages.
    """
    count = dist.get_world_size() if dist.get_rank() == 0 else 0
    found = [torch.empty_like(x) for _ in range(count)]
    dist.gather(x, found or None)
    return found


def assert_same_on_all_ranks(x):
    """The same bits everywhere; fails on rank 0."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    for rank, other in enumerate(_gathered(flat)):
        assert torch.equal(other, flat), f"other bits on rank {rank}"


def total(x):
    """Sum over ranks in float64."""
    x = x.detach().double().contiguous()
    found = sum(_gathered(x), torch.zeros_like(x))
    dist.broadcast(found, 0)
    return found


def quantized_reference(size, numel, format, block, average):
    """(x, residuals, server residuals) of one process that does what the ranks do."""
    shard = shard_numel(numel, size, block)
    sums, residuals = torch.zeros(size * shard), [torch.zeros(numel) for _ in range(size)]
    for rank in range(size):
        for part in range(0, numel, shard):
            end = min(part + shard, numel)
            x, owed = of_rank(rank, numel)[part:end], residuals[rank][part:end]
            codes, scales = quantize_blockwise(x, format=format, block=block, residual=owed)
            sums[part:end] += dequantize_blockwise(
                codes, scales, end - part, format=format, block=block
            )
    result, servers = torch.zeros(numel), [torch.zeros(shard) for _ in range(size)]
    for rank in range(size):
        part, end = rank * shard, min((rank + 1) * shard, numel)
        if part < end:
            codes, scales = quantize_blockwise(
                sums[part:end], format=format, block=block, residual=servers[rank][: end - part]
            )
            result[part:end] = dequantize_blockwise(
                codes, scales / size if average else scales, end - part, format=format, block=block
            )
    return result, residuals, servers


class LocalMessages(Messages):
    """The messages of one of several ranks that are threads of this process."""

    def __init__(self, rank, size, rows):
        super().__init__(None)
        self.rank, self.size, self._rows = rank, size, rows

    def ask(self, num_bytes, like):
        message = super().ask(0, like)
        message.wait = functools.partial(self._received, message.tag, num_bytes)
        return message

    def all_reduce(self, x):
        if x.numel():
            found = self.gather(x.view(-1).view(torch.uint8)).view(x.dtype)
            x.copy_(found.sum(0).view_as(x))

    def _send(self, kind, message, row, parts):
        with self._rows.changed:
            for rank in range(self.size):
                self._rows[message.tag, self.rank, rank] = parts[rank]
            self._rows.changed.notify_all()

    def _received(self, tag, num_bytes):
        wanted = [(tag, rank, self.rank) for rank in range(self.size)]
        with self._rows.changed:
            assert self._rows.changed.wait_for(lambda: all(key in self._rows for key in wanted), 60)
        found = torch.cat([self._rows[key] for key in wanted])
        assert found.numel() == self.size * num_bytes
        return found


class _Rows(dict):
    """What was sent: (tag, from, to) to a row of bytes."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()


def simulate(twins):
    """Run a function over messages for each rank in this process; returns the results of each."""
    rows = _Rows()
    ranks = [LocalMessages(rank, len(twins), rows) for rank in range(len(twins))]
    with torch.no_grad(), ThreadPoolExecutor(len(twins)) as threads:
        return list(threads.map(lambda twin, messages: twin(messages), twins, ranks))
