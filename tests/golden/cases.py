"""Inputs and the table of golden cases."""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch


def _bits(seed, count):
    """`[count]` int64 in [0, 2^32), by splitmix64: the same for every version of torch."""
    x = torch.arange(1, count + 1) * -7046029254386353131 + seed * 1640531527
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x >> 32) & 0xFFFFFFFF


def _seed(seed):
    return zlib.crc32(repr(seed).encode())


def integers(seed, high, *shape):
    """int64 in [0, high)."""
    count = torch.Size(shape).numel()
    return (_bits(_seed(seed), count) % high).view(shape)


def numbers(seed, *shape, scale=1.0, dtype=torch.float32):
    """Multiples of 2^-23 in [-1, 1), times the scale."""
    count = torch.Size(shape).numel()
    units = (_bits(_seed(seed), count) >> 8) - (1 << 23)
    return ((units.double() / (1 << 23)) * scale).to(dtype).view(shape)


def gradient(seed, *shape, dtype=torch.float32):
    """Numbers of many magnitudes, as gradients are: each is shifted by up to 7 bits."""
    shifts = integers((seed, "shift"), 8, *shape)
    return (numbers(seed, *shape).double() / (1 << shifts)).to(dtype)


def fill(module, *, scale=0.5, rank=0, num_ranks=1):
    """Sets every parameter by its name, those of experts to this rank's part of all experts."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "to_local"):
                parameter = parameter.to_local()
            parts = num_ranks if name.startswith("experts.") else 1
            whole = numbers(name, parts, *parameter.shape, scale=scale)
            parameter.copy_(whole[rank if parts > 1 else 0])
    return module


@dataclass(frozen=True)
class Case:
    """A computation that gives nested tensors.

    Attributes:
        function: called without arguments, on every rank where there are any.
        exact: its bits are those of every processor; otherwise its values are.
        num_ranks: 0 runs it in this process.
    """

    function: Callable[[], object]
    exact: bool
    num_ranks: int = 0


CASES: dict[str, Case] = {}


def case(*params, exact=False, ranks=(0,)):
    """Registers a function for each tuple of arguments, and for each number of ranks."""

    def register(function):
        family = function.__module__.rsplit(".", 1)[-1].removesuffix("_cases")
        for count in ranks:
            for given in params or [()]:
                parts = [function.__name__, *map(str, given)] + (
                    [f"{count}_ranks"] if count else []
                )
                name = f"{family}/" + "-".join(parts).replace(" ", "")
                assert name not in CASES, name
                CASES[name] = Case(functools.partial(function, *given), exact, count)
        return function

    return register
