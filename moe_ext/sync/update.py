"""One update of weights as bytes: a table of tensors in JSON, and their payloads.

Layout: the magic b"MXWD", uint32 format version, uint64 length of the table, uint32 CRC-32 of all
other bytes, the table, the payloads. All numbers are little-endian. The table has the versions and
the chain that the update belongs to, and for each tensor its name, dtype, region, number of bytes,
and `moe_ext.ops.delta_hash` of its region before and after.
"""

from __future__ import annotations

import itertools
import json
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_ext._checks import check_choice
from moe_ext.sync.region import Region

FORMAT = 1
_MAGIC = b"MXWD"
_HEAD = struct.Struct("<4sIQ")
_CRC = struct.Struct("<I")
_START = _HEAD.size + _CRC.size
KINDS = ("full", "delta", "base")


@dataclass(frozen=True)
class UpdateEntry:
    """One tensor of an update.

    Attributes:
        name: name in the state dict.
        dtype: name of the dtype, such as "bfloat16".
        region: the part of the tensor.
        payload: uint8: result of `moe_ext.ops.delta_encode` in a delta, all elements in a full
            update.
        before: hash of the region before a delta.
        after: hash of the region after the update.
    """

    name: str
    dtype: str
    region: Region
    payload: Tensor
    before: int
    after: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The `torch.dtype` of that name."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"Update: expected a dtype of torch, got {self.dtype!r}")
        return found


@dataclass(frozen=True)
class Update:
    """Changes from one version of a set of tensors to another.

    Attributes:
        kind: "delta" changes `base_version`, and "full" holds all elements. "base" holds only
            hashes, for a receiver that loaded the same weights by itself.
        chain: identity of the encoder; for several encoders, their identities joined by "+".
        base_version: version to which the update applies; -1 for any.
        version: version that the update makes.
        xored: True if a delta holds the bits that differ instead of values.
        entries: the tensors.
    """

    kind: Literal["full", "delta", "base"]
    chain: str
    base_version: int
    version: int
    xored: bool
    entries: tuple[UpdateEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads, uncompressed."""
        return sum(entry.payload.numel() for entry in self.entries)

    def to_bytes(self, *, compression: Literal["zstd"] | None = None) -> Tensor:
        """Return the update as one uint8 tensor on the CPU.

        Raises:
            RuntimeError: zstd was asked for, and the package zstandard is not installed.
            ValueError: compression is neither None nor "zstd".
        """
        check_choice("Update.to_bytes", "compression", compression, (None, "zstd"))
        parts = [entry.payload for entry in self.entries]
        body = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        stored = body.numpy().tobytes()
        if compression:
            stored = _zstd().ZstdCompressor(level=1).compress(stored)
        table = {
            **{k: getattr(self, k) for k in ("kind", "chain", "base_version", "version", "xored")},
            "compression": compression,
            "num_bytes": body.numel(),
            "entries": [
                {
                    **{k: getattr(entry, k) for k in ("name", "dtype", "before", "after")},
                    **entry.region.to_json(),
                    "num_bytes": entry.payload.numel(),
                }
                for entry in self.entries
            ],
        }
        text = json.dumps(table, separators=(",", ":")).encode()
        whole = bytearray(_HEAD.pack(_MAGIC, FORMAT, len(text)))
        whole += _CRC.pack(_crc(whole, text, stored))
        whole += text
        whole += stored
        return torch.frombuffer(whole, dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, data: Tensor | bytes) -> Update:
        """Return the update of `to_bytes`. Payloads are checked when they are applied.

        Raises:
            ValueError: the bytes are cut, damaged, or of a later format.
        """
        raw = data.cpu().numpy().tobytes() if isinstance(data, Tensor) else bytes(data)
        try:
            magic, version, length = _HEAD.unpack_from(raw)
            if magic != _MAGIC:
                raise ValueError(f"expected bytes that begin with {_MAGIC!r}, got {magic!r}")
            if version != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {version}: update moe_ext")
            (crc,) = _CRC.unpack_from(raw, _HEAD.size)
            if crc != _crc(raw[: _HEAD.size], raw[_START:]):
                raise ValueError(f"expected bytes with the CRC-32 {crc:x}, got others")
            table = json.loads(raw[_START : _START + length])
            stored = raw[_START + length :]
            if table["compression"] == "zstd":
                stored = _decompressed(stored, _whole(table["num_bytes"]))
            return cls._of(table, bytearray(stored))
        except (KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise ValueError(f"Update.from_bytes: expected a whole update, got {error!r}") from None
        except ValueError as error:
            raise ValueError(f"Update.from_bytes: {error}") from None

    @classmethod
    def _of(cls, table: Mapping[str, Any], body: bytearray) -> Update:
        entries, at = [], 0
        for row in table["entries"]:
            size = _whole(row["num_bytes"])
            if size < 0 or at + size > len(body):
                raise ValueError(f"expected {at + size} bytes of payloads, got {len(body)}")
            payload = torch.empty(0, dtype=torch.uint8)
            if size:
                payload = torch.frombuffer(body, dtype=torch.uint8, count=size, offset=at)
            region = Region.parse(row["whole"], row["runs"])
            facts = str(row["name"]), str(row["dtype"])
            hashes = _whole(row["before"]), _whole(row["after"])
            entries.append(UpdateEntry(*facts, region, payload, *hashes))
            at += size
        if at != len(body):
            raise ValueError(f"expected {at} bytes of payloads, got {len(body)}")
        kind, base, version = table["kind"], _whole(table["base_version"]), _whole(table["version"])
        if kind not in KINDS:
            raise ValueError(f"expected a kind of {KINDS}, got {kind!r}")
        return cls(kind, str(table["chain"]), base, version, bool(table["xored"]), tuple(entries))

    def __post_init__(self) -> None:
        """Raise a ValueError if two entries hold the same elements."""
        regions: dict[str, list[Region]] = {}
        for entry in self.entries:
            regions.setdefault(entry.name, []).append(entry.region)
        for name, parts in regions.items():
            if len(parts) > 1 and _overlap(parts):
                raise ValueError(
                    f"Update: expected the parts of {name} to be equal or apart from each other, "
                    "got parts that overlap"
                )

    def merged(self, *others: Update) -> Update:
        """Return one update of the parts that several ranks encoded at the same version.

        A part that several of them hold, such as a tensor that is not sharded, is taken once.

        Raises:
            ValueError: the updates are not of one kind and version; they have different hashes of a
                part that several hold; or parts overlap that are not equal.
        """
        updates = (self, *others)
        for other in others:
            mine, theirs = ((u.kind, u.base_version, u.version, u.xored) for u in (self, other))
            if mine != theirs:
                raise ValueError(
                    "Update.merged: expected updates of one kind, versions and form, got "
                    f"{mine} and {theirs}"
                )
        chain = "+".join(update.chain for update in updates)
        entries: dict[tuple[str, Region], tuple[int, UpdateEntry]] = {}
        for number, update in enumerate(updates):
            for entry in update.entries:
                first, kept = entries.setdefault((entry.name, entry.region), (number, entry))
                held, sent = ((e.dtype, e.before, e.after) for e in (kept, entry))
                if held != sent:
                    raise ValueError(
                        f"Update.merged: expected sources {first} and {number} to send the same "
                        f"{entry.name}, which both hold, got (dtype, hash before, hash after) "
                        f"{held} and {sent}; are these replicas still equal?"
                    )
        return replace(self, chain=chain, entries=tuple(entry for _, entry in entries.values()))


def _overlap(parts: Sequence[Region]) -> bool:
    spans = [(start, start + p.numel) for p in parts if (start := p.start) is not None and p.numel]
    if len(spans) < sum(part.numel > 0 for part in parts):
        return any(one.overlap(other) for one, other in itertools.combinations(parts, 2))
    # All parts are contiguous. If any of them overlap, two neighbours in the sorted order do.
    return any(end > start for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def _crc(*parts: bytes | bytearray) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def _whole(value: Any) -> int:
    # JSON may hold true, which `int` would accept, and 1e999, for which `int` would raise an
    # OverflowError.
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise ValueError(f"expected whole numbers of 64 bits in the table, got {value!r}")


def _decompressed(stored: bytes, num_bytes: int) -> bytes:
    """Return the content of a zstd frame; refuse another size before memory is taken for it."""
    zstd = _zstd()
    try:
        if zstd.frame_content_size(stored) != num_bytes:
            raise ValueError(f"expected a zstd frame of {num_bytes} bytes, got another size")
        return bytes(zstd.ZstdDecompressor().decompress(stored))
    except zstd.ZstdError as error:
        raise ValueError(f"expected a whole zstd frame, got {error}") from None


def _zstd() -> Any:
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise RuntimeError(
            "Update: expected the package zstandard to be installed for zstd, got none; "
            "pip install zstandard"
        ) from None
    return zstandard


assert sys.byteorder == "little", "payloads hold elements as they lie in memory"
