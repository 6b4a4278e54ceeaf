"""Measured rates of codecs, products, copies and links of a processor, saved in a cost table."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moe_ext._checks import check_fields
from moe_ext._files import read_json, write_json
from moe_ext.comm.link import Link, quickest, seconds_of

SCHEMA = 1
# Numbers of elements at which codecs are measured. The tensors fit into the second-level cache,
# into the last-level cache of a server, and into no cache.
SIZES = (2**14, 2**20, 2**24)
_DTYPES = (torch.float32, torch.bfloat16)
# Bytes of the measured copy, which fit into no cache, and dimension of the square products.
_COPY_BYTES, _PRODUCT_DIM = 2**26, 1024
_REPEATS, _QUICK_REPEATS = 5, 2
# A call that takes longer is timed only once. On a CPU without bfloat16 instructions, a product in
# bfloat16 takes seconds.
_LONG_SECONDS = 0.2

# A rehearsal takes a number of elements, and returns their bytes, the bytes of their payload, a
# call that encodes them and a call that decodes them.
Rehearsed = tuple[int, int, Callable[[], object], Callable[[], object]]
Rehearsal = Callable[[int], Rehearsed]


@dataclass(frozen=True)
class CodecRate:
    """Measured times of a codec at one size.

    Attributes:
        numel: number of elements.
        input_bytes: bytes of these elements.
        payload_bytes: bytes of their payload.
        encode_seconds: seconds to encode them.
        decode_seconds: seconds to decode them.
    """

    numel: int
    input_bytes: int
    payload_bytes: int
    encode_seconds: float
    decode_seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        check_fields(self, may_be_zero=("encode_seconds", "decode_seconds"), below=2**63)


def least_seconds(
    call: Callable[[], object], repeats: int = _REPEATS, *, device: torch.device | str = "cpu"
) -> float:
    """Return the least seconds of a few calls, after a first call that does not count.

    A call that takes longer than `_LONG_SECONDS` is repeated only once.
    """
    on = torch.empty(0, device=device)
    is_long = seconds_of(call, on.device) > _LONG_SECONDS
    return max(quickest(lambda _: call(), on, 1 if is_long else repeats), 1e-9)


def measure_codec(
    rehearsal: Rehearsal,
    sizes: Sequence[int],
    *,
    repeats: int = _REPEATS,
    device: torch.device | str = "cpu",
) -> tuple[CodecRate, ...]:
    """Measure a codec at several sizes. Each time is the least of a few calls.

    Args:
        rehearsal: see `CostTable.measure`.
        sizes: numbers of elements, ascending.
        repeats: number of timed calls, after a first one that is not timed.
        device: device to synchronise with around each call.
    """
    rows = []
    for numel in sizes:
        num_bytes, payload_bytes, encode, decode = rehearsal(numel)
        seconds = [least_seconds(call, repeats, device=device) for call in (encode, decode)]
        rows.append(CodecRate(numel, num_bytes, payload_bytes, *seconds))
    return tuple(rows)


_known: dict[tuple[str, str], tuple[CodecRate, ...]] = {}


def known_codec(
    name: str, rehearsal: Rehearsal, device: torch.device | str = "cpu"
) -> tuple[CodecRate, ...]:
    """Return the rates of a codec at the two smaller sizes of `SIZES`, measured on this rank.

    The first call for a name and a device measures. The result is kept for the life of the process.
    """
    key = (name, str(device))
    if key not in _known:
        _known[key] = measure_codec(rehearsal, SIZES[:2], repeats=_QUICK_REPEATS, device=device)
    return _known[key]


@dataclass(frozen=True)
class CostTable:
    """Measured rates of one processor; equal on the ranks that read the same file.

    Attributes:
        processor: name of the CPU or GPU.
        device: "cpu" or "cuda".
        threads: number of torch's threads during the measurement.
        torch_version: torch version of the measurement.
        copy_bandwidth: bytes a second of a copy; each copied byte counts once.
        product_rates: dtype to floating point operations a second of a matrix product.
        codecs: name to rates, in ascending order of size.
        links: name, such as "node" or "network", to link.
    """

    processor: str
    device: str
    threads: int
    torch_version: str
    copy_bandwidth: float = 0.0
    product_rates: Mapping[str, float] = field(default_factory=dict)
    codecs: Mapping[str, tuple[CodecRate, ...]] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for impossible rates."""
        check_fields(self, may_be_zero=("copy_bandwidth",))
        for name, kind in (("codecs", CodecRate), ("links", Link)):
            held = getattr(self, name)
            rows = held.values() if isinstance(held, Mapping) else [held]
            every = [each if isinstance(each, tuple) else (each,) for each in rows]
            if not all(each and all(isinstance(row, kind) for row in each) for each in every):
                raise ValueError(
                    f"CostTable: expected {name} to hold {kind.__name__} by name, got {held!r:.80}"
                )

    @classmethod
    def measure(
        cls,
        *,
        device: torch.device | str = "cpu",
        codecs: Mapping[str, Rehearsal] | None = None,
        links: Mapping[str, Link] | None = None,
        sizes: tuple[int, ...] = SIZES,
    ) -> CostTable:
        """Measure a device of this process: a copy, products in float32 and bfloat16, and codecs.

        Args:
            device: device to measure.
            codecs: name to a function that takes a number of elements. The function returns their
                bytes, the bytes of their payload, a call that encodes and a call that decodes them.
            links: name to a link that was measured between ranks.
            sizes: numbers of elements at which codecs are measured, ascending.

        Returns:
            CostTable: each time is the least of five calls. A call over 0.2 s is repeated once.
        """
        device = torch.device(device)
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        least = functools.partial(least_seconds, device=device)
        copy_bandwidth = _COPY_BYTES / least(lambda: target.copy_(source))
        rates = {}
        for dtype in _DTYPES:
            a = torch.randn(_PRODUCT_DIM, _PRODUCT_DIM, device=device, dtype=dtype)
            product = functools.partial(torch.mm, a, a, out=torch.empty_like(a))
            rates[str(dtype).removeprefix("torch.")] = 2 * _PRODUCT_DIM**3 / least(product)
        found = {
            name: measure_codec(rehearsal, sizes, device=device)
            for name, rehearsal in (codecs or {}).items()
        }
        return replace(
            cls.of_process(device),
            copy_bandwidth=copy_bandwidth,
            product_rates=rates,
            codecs=found,
            links=dict(links or {}),
        )

    @classmethod
    def of_process(cls, device: torch.device | str = "cpu") -> CostTable:
        """Return a table without rates for a device of this process."""
        device = torch.device(device)
        return cls(
            processor=_processor(device),
            device=device.type,
            threads=torch.get_num_threads(),
            torch_version=torch.__version__,
        )

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table that `save` has written.

        Args:
            path: path of the JSON file.

        Raises:
            ValueError: the file is not JSON, has another schema, or lacks a field.
        """
        return cls.of(read_json("CostTable.load", path, SCHEMA), "CostTable.load")

    @classmethod
    def of(cls, fields: Mapping[str, Any], owner: str = "CostTable.of") -> CostTable:
        """Make a table from a mapping of its fields, as `dataclasses.asdict` returns it.

        Args:
            fields: field name to value.
            owner: name for error messages.

        Raises:
            ValueError: a field is missing, or there are other fields.
        """
        text = dict(fields)
        try:
            codecs = {
                name: tuple(CodecRate(**row) for row in rows)
                for name, rows in text.pop("codecs").items()
            }
            links = {name: Link(**link) for name, link in text.pop("links").items()}
            return cls(**text, codecs=codecs, links=links)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{owner}: expected the fields of CostTable, got {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the table as JSON with the schema number. The file is replaced atomically."""
        write_json(path, SCHEMA, asdict(self))

    def codec_seconds(self, name: str, numel: int) -> tuple[float, float]:
        """Return the seconds to encode and to decode, interpolated between the measured sizes.

        Above the largest size, the time grows in proportion to the elements. Below the smallest
        size, a call takes as long as at the smallest.

        Args:
            name: name of the codec.
            numel: number of elements.

        Raises:
            ValueError: the table has no such codec.
        """
        rows = self._rows(name)
        numbers = [(row.numel, row.encode_seconds, row.decode_seconds) for row in rows]
        above = next((i for i, row in enumerate(numbers) if row[0] >= numel), None)
        if above == 0:
            return numbers[0][1], numbers[0][2]
        if above is None:
            share = numel / numbers[-1][0]
            return numbers[-1][1] * share, numbers[-1][2] * share
        low, high = numbers[above - 1], numbers[above]
        share = (numel - low[0]) / (high[0] - low[0])
        return low[1] + share * (high[1] - low[1]), low[2] + share * (high[2] - low[2])

    def payload_bytes(self, name: str, numel: int) -> float:
        """Return the payload bytes of `numel` elements, by the ratio at the next larger size."""
        rows = self._rows(name)
        row = next((row for row in rows if row.numel >= numel), rows[-1])
        return row.payload_bytes / row.numel * numel

    def product_seconds(self, flops: float, dtype: torch.dtype | str) -> float:
        """Return the seconds of a matrix product; a multiply-add counts as two operations.

        Raises:
            ValueError: the table has no such dtype.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.product_rates:
            raise ValueError(
                f"CostTable: expected dtype to be one of {sorted(self.product_rates)}, got {name}"
            )
        return flops / self.product_rates[name]

    def share_of_copy(self, name: str) -> tuple[float, float]:
        """Return the rates of encoding and decoding at the largest size, over the copy bandwidth.

        Both rates count the bytes of the elements: `encode` reads them, `decode` writes them.
        """
        row = self._rows(name)[-1]
        copied = row.input_bytes / self.copy_bandwidth
        return copied / row.encode_seconds, copied / row.decode_seconds

    def _rows(self, name: str) -> tuple[CodecRate, ...]:
        if name not in self.codecs:
            raise ValueError(
                f"CostTable: expected codec to be one of {sorted(self.codecs)}, got {name!r}"
            )
        return self.codecs[name]


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
