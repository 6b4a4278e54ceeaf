"""Every operator takes tensors at any address that its dtype allows, and rows at any distance.

A gradient may be a view of a flat buffer, at an offset that no vector of a SIMD loop or of a CUDA
kernel divides. The emulation of CUDA refuses an access that is not aligned to its width.
"""

import functools
import importlib
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Elements that a tensor lies behind the beginning of its storage.
OFFSETS = (1, 2, 3, 5)
# Packed bytes are read in whole words; tensors written in place or read as bytes are dense.
REFUSALS = {
    "shifted": re.compile("expected packed to begin at a multiple of 4 bytes"),
    "spread": re.compile("contiguous|columns of out to be adjacent"),
}
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def calls():
    """The table of every operator's arguments."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("gpu_operators")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def shifted(x, offset):
    """A copy of x at an offset in its storage."""
    storage = torch.zeros(x.numel() + offset, dtype=x.dtype)
    return storage[offset:].view(x.shape).copy_(x)


def spread(x, gap):
    """A copy of x whose rows lie `gap` elements apart, and whose elements are not dense."""
    if x.dim() == 0:
        return x.clone()
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + gap, dtype=x.dtype)
    return wide[..., : 2 * x.shape[-1] : 2].copy_(x)


def changed(arguments, which, change):
    """Copies of the arguments; those tensors that `which` names are changed."""
    tensors = itertools.count()
    return tuple(
        change(x) if isinstance(x, torch.Tensor) and next(tensors) in which else copied(x)
        for x in arguments
    )


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def test_every_operator_is_in_the_table(calls):
    assert set(calls.registered()) == set(calls.CALLS)


@pytest.mark.parametrize("layout", ["shifted", "spread"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gives_the_same_result_or_refuses_the_layout(calls, device, dtype, layout):
    """Each tensor by itself, and all at once."""
    wrong = []
    for name, make in calls.CALLS.items():
        arguments = make(calls.Inputs(dtype))
        expected = calls.result(name, changed(arguments, (), None))
        count = sum(isinstance(x, torch.Tensor) for x in arguments)
        for which, change in changes(layout, count):
            try:
                found = calls.result(name, changed(arguments, which, change))
                why = calls.difference(found, expected, calls.TOLERANCE[dtype])
            except RuntimeError as error:
                why = str(error)
                if why.startswith(f"{name}: expected ") and REFUSALS[layout].search(why):
                    continue
            if why:
                wrong.append(f"{name}, tensors {list(which)}: {why}")
    assert not wrong, "\n".join(wrong)


def changes(layout, count):
    """Pairs: the tensors of an operator that change, and the change."""
    if layout == "spread":
        return [((i,), functools.partial(spread, gap=3)) for i in range(count)]
    together = [(range(count), offset) for offset in (OFFSETS if count == 1 else OFFSETS[:2])]
    alone = [((i,), OFFSETS[i % len(OFFSETS)]) for i in range(count) if count > 1]
    return [(which, functools.partial(shifted, offset=at)) for which, at in together + alone]
