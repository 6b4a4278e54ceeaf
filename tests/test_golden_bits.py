"""Cases whose results must not move: bits of exact families, values of the others.

Run by hand, it writes what this processor makes of them:

    python tests/test_golden_bits.py --write FILE  every bit, for MOE_EXT_GOLDEN=FILE
    python tests/test_golden_bits.py --renew       tests/golden/*.json, if results change on purpose

With MOE_EXT_GOLDEN=FILE the test compares every bit of all families with those of the file, which
only holds for the processor and the versions that it was written with.
"""

import argparse
import functools
import hashlib
import json
import os
import traceback
from pathlib import Path

import pytest
import torch
from golden import (  # noqa: F401  (they register their cases)
    attention_cases,
    codecs_cases,
    collectives_cases,
    gradients_cases,
    layers_cases,
    optimizers_cases,
)
from golden.cases import CASES, numbers

from moe_ext import _runtime_library
from moe_ext.testing import spawn_ranks

FOLDER = Path(__file__).parent / "golden"
# Roundings on the way to an element, of half a unit each: sums of up to 64 products, taken 4 times
# in a row (experts: two products; backward: two more), and as many for exp, softmax and weights.
ROUNDINGS = 512
# One rounding at the end that goes the other way, where it is coarser than all before.
TOLERANCE = {
    torch.float32: ROUNDINGS * 2**-24,
    # Gates, statistics and routers stay in float32.
    torch.float64: ROUNDINGS * 2**-24,
    # Two layers of results that are rounded, and gradients that are.
    torch.bfloat16: 4 * 2**-8,
    torch.float16: 4 * 2**-11,
}


def flattened(value, path=""):
    """(path, tensor or plain value) of everything inside."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "to_local"):
            value = value.to_local()
        if value.layout == torch.sparse_coo:
            value = value.coalesce()
            yield from flattened((value.indices(), value.values()), path)
        else:
            yield path, value.contiguous()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flattened(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flattened(item, f"{path}/{index}")
    else:
        yield path, value


def hash_of(items):
    """Of names, kinds and bytes."""
    found = hashlib.sha256()
    for path, value in items:
        if isinstance(value, torch.Tensor):
            found.update(f"{path} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{path} {value!r}".encode())
    return found.hexdigest()[:16]


def sums_of(items):
    """Two weighted sums of every tensor in float64, and what they may be wrong by."""
    found = []
    for index, (_, value) in enumerate(items):
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            continue
        x = value.reshape(-1).double()
        allowed = TOLERANCE.get(value.dtype, 0.0) * float(x.abs().max())
        for salt in range(2):
            weights = numbers((index, salt), x.numel(), dtype=torch.float64)
            error = allowed * float(weights.abs().sum())
            found.append((float((x * weights).sum()), error))
    return found


def digest(case):
    """What is compared: hashes of the parts of the result, and sums."""
    result = case.function()
    parts = result if isinstance(result, dict) else {"all": result}
    hashes = {str(name): hash_of(flattened(part)) for name, part in parts.items()}
    return hashes, [] if case.exact else sums_of(list(flattened(result)))


def _on_rank(rank, names):
    found = {}
    for name in names:
        try:
            found[name] = digest(CASES[name])
        except BaseException:
            # The ranks may be at different messages from here on.
            found[name] = traceback.format_exc()
            break
    return found


@functools.cache
def digests_of(num_ranks):
    """Name to digests, one of each rank, of all cases for so many ranks."""
    names = [name for name, case in CASES.items() if case.num_ranks == num_ranks]
    return spawn_ranks(_on_rank, num_ranks, names, timeout=240)


def digests(name):
    """One of each rank."""
    case = CASES[name]
    if case.num_ranks == 0:
        return [digest(case)]
    found = [
        rank.get(name, "not run, after another failure") for rank in digests_of(case.num_ranks)
    ]
    failed = {rank: text for rank, text in enumerate(found) if isinstance(text, str)}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return found


def bits_of(name):
    """Part of the result to hash, or hashes of the ranks."""
    hashes = [found for found, _ in digests(name)]
    return {part: " ".join(rank[part] for rank in hashes) for part in hashes[0]}


def data_of(name):
    """What is kept of a case in the repository."""
    if CASES[name].exact:
        return hashlib.sha256(json.dumps(bits_of(name)).encode()).hexdigest()[:16]
    return [[float(f"{value:.9g}") for value, _ in sums] for _, sums in digests(name)]


@functools.cache
def kept(family):
    return json.loads((FOLDER / f"{family}.json").read_text())


@functools.cache
def kept_here():
    path = os.environ.get("MOE_EXT_GOLDEN")
    return json.loads(Path(path).read_text()) if path else {}


@pytest.fixture(autouse=True)
def one_thread(num_threads):
    num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    want = kept(name.split("/")[0])[name]
    if name in kept_here():
        assert bits_of(name) == kept_here()[name]
    if CASES[name].exact:
        if CASES[name].num_ranks > 2 and _runtime_library.load() is None:
            pytest.skip("Gloo adds what three ranks have in another order")
        assert data_of(name) == want, "other bits than those in tests/golden"
        return
    for rank, ((_, found), expected) in enumerate(zip(digests(name), want, strict=True)):
        for (value, allowed), wanted in zip(found, expected, strict=True):
            # The data have 9 digits.
            assert abs(value - wanted) <= allowed + 1e-8 * abs(wanted), f"rank {rank}"


def test_every_family_has_its_data():
    names = [name for path in FOLDER.glob("*.json") for name in json.loads(path.read_text())]
    assert sorted(names) == sorted(CASES)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="file for all hashes of this machine")
    parser.add_argument("--renew", action="store_true", help="write tests/golden/*.json anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write:
        found = {name: bits_of(name) for name in CASES}
        arguments.write.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.renew:
        families = {}
        for name in CASES:
            families.setdefault(name.split("/")[0], {})[name] = data_of(name)
        for family, found in families.items():
            lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
            (FOLDER / f"{family}.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    # Ranks find the cases by their module, which is not __main__.
    import test_golden_bits

    test_golden_bits.main()
