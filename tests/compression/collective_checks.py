"""What the tests of collectives share: checks that ranks run in one spawn, and simulated ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from rank_checks import assert_passed, run_checks

from moe_ext import _runtime_library
from moe_ext.compression import shard_numel
from moe_ext.compression.stages import Slot, _operator
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


def assert_same_on_all_ranks(x):
    """The same bits everywhere."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    for rank, other in enumerate(found):
        assert torch.equal(other, flat), f"other bits on rank {rank}"


def total(x):
    """Sum over ranks in float64."""
    found = x.detach().double().clone()
    dist.all_reduce(found)
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


def simulate(programs, inputs):
    """Run one list of stages for each rank in this process; returns the results of each."""
    ranks = [_steps(stages, given) for stages, given in zip(programs, inputs, strict=True)]
    asked = [next(rank) for rank in ranks]
    while asked[0] is not None:
        names = {name for name, _ in asked}
        assert len(names) == 1, names
        asked = [rank.send(answer) for rank, answer in zip(ranks, _answers(asked), strict=True)]
    assert all(one is None for one in asked)
    return [next(rank) for rank in ranks]


def _answers(asked):
    name, sent = asked[0][0], [x.reshape(-1) for _, x in asked]
    if name == "all_gather":
        return [torch.cat(sent) for _ in sent]
    if name == "all_to_all":
        parts = [x.chunk(len(sent)) for x in sent]
        return [torch.cat([part[rank] for part in parts]) for rank in range(len(sent))]
    return [torch.stack(sent).sum(0)] * len(sent)


def _steps(stages, inputs):
    """Yields every message, then None, then the results."""
    slots = [*inputs, *[None] * (stages.num_slots - len(inputs))]

    def value(arg):
        if isinstance(arg, Slot):
            return slots[arg.index]
        return [value(entry) for entry in arg] if isinstance(arg, (list, tuple)) else arg

    for step in stages.steps:
        args = [value(arg) for arg in step.args]
        if step.name == "scratch":
            found = torch.full((args[1],), 0xA5, dtype=torch.uint8)
        elif step.name == "wait":
            found = None
        elif "::" not in step.name:
            found = yield step.name, args[0]
            if step.name == "all_reduce":
                args[0].copy_(found.view_as(args[0]))
        else:
            operator, keywords = _operator(step.name)
            plain = [a for a, key in zip(args, keywords, strict=False) if not key]
            found = operator(*plain, **{k: a for a, k in zip(args, keywords, strict=False) if k})
        outputs = [found] if len(step.outputs) == 1 else found or []
        for index, tensor in zip(step.outputs, outputs, strict=True):
            slots[index] = tensor
    yield None
    yield [slots[index] for index in stages.results]
